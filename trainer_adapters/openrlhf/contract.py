"""Whether the OpenRLHF that is installed calls engines as this adapter expects: read from its source, since its modules need vLLM."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

from .actor import RolloutActor
from .engines import make_engines

MADE_FOR = "0.11.2"
ACTOR = "RolloutRayActor"


def find_openrlhf() -> Path:
    """Its folder. Raises ModuleNotFoundError, saying how to install it."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"openrlhf is not installed: pip install openrlhf=={MADE_FOR} (docs/openrlhf.md)")
    return Path(next(iter(spec.submodule_search_locations)))


def differences(folder: Path) -> list[str]:
    """What OpenRLHF's own engine has that this one lacks: arguments of create_vllm_engines, methods of the actor, their arguments."""
    file = folder / "trainer" / "ray" / "vllm_engine.py"
    if not file.is_file():
        return [f"{file} is missing"]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if "create_vllm_engines" not in functions or ACTOR not in classes:
        return [f"{file} has no {'create_vllm_engines' if 'create_vllm_engines' not in functions else ACTOR}"]
    found = _lacking(
        "create_vllm_engines", _arguments(functions["create_vllm_engines"]), list(inspect.signature(make_engines).parameters)[1:]
    )
    for node in classes[ACTOR].body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        own = getattr(RolloutActor, node.name, None)
        if own is None:
            found.append(f"an engine has no method {node.name}")
        else:
            found += _lacking(node.name, _arguments(node), list(inspect.signature(own).parameters))
    return found


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _lacking(name: str, theirs: list[str], ours: list[str]) -> list[str]:
    """Arguments that are missing here, or stand in another place: OpenRLHF passes some by position."""
    if theirs == ours[: len(theirs)]:
        return []
    missing = [argument for argument in theirs if argument not in ours]
    return [f"{name} takes {', '.join(missing)}" if missing else f"{name} takes its arguments in the order {', '.join(theirs)}"]
