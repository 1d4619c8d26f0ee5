"""docs/python.md, the calls a trainer makes from Python, made from their signatures and docstrings.

    python docs/python.py            print it
    python docs/python.py --write    write docs/python.md

tests/test_api_docs.py keeps the file equal to this.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from rollsync import Engine, RolloutClient, RolloutFleet, SamplingMask, read_trace, replay
from rollsync.kernels.logprobs import (
    hidden_token_logprobs,
    hidden_token_logprobs_and_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from rollsync.rollout.engine import weight_digest
from rollsync.rollout.engine.control import Control
from rollsync.rollout.replay import Mismatch as TraceMismatch
from rollsync.rollout.replay import ReplayReport
from rollsync.rollout.trace import TraceRecord
from rollsync.trainer_adapters import colocated, parity, targets, trl, trl_async, trl_rollout_func
from rollsync.trainer_adapters.errors import TargetError
from rollsync.weight_sync import checkpoint_writer, model_weights, sender, sources
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.replicas import Failure
from rollsync.weight_sync.transports.broadcast import Broadcast
from rollsync.weight_sync.transports.disk import DiskTransport
from rollsync.weight_sync.transports.ipc import SharedBuffers
from rollsync.weight_sync.transports.shards import Reshard

FILE = Path(__file__).resolve().parent / "python.md"
INTRO = """\
<!-- Made by docs/python.py (`make docs`) from signatures and docstrings. Do not edit. -->
# From Python

What a trainer calls. Over HTTP the same is in [api.md](api.md); how weights travel and land, in [weight_sync.md](weight_sync.md).
`AsyncRolloutClient` has the calls of `RolloutClient` as coroutines.
"""
SECTIONS: dict[str, list[Any]] = {
    "A trainer's bits": [
        parity.rollsync_parity, parity.make_parity, parity.parity_of, parity.check, parity.ParityReport, parity.ParityError
    ],
    "Trainers": [
        trl.attach, trl.RollsyncGeneration, trl_async.rollout_worker, trl_async.weight_transfer, trl_rollout_func.rollout_func,
        targets.target_of, targets.UrlTarget, TargetError,
    ],
    "Sending weights": [sender.WeightSender, sender.SyncReport, Failure, UpdateError, sender.DistRanks, weight_digest.fast_fill],
    "What is sent": [
        sources.weights_from, model_weights.ModelWeights, sources.ModuleSource, sources.TensorSource, checkpoint_writer.write_folder
    ],
    "Transports with options": [SharedBuffers, Broadcast, Reshard, DiskTransport],
    "Clients": [RolloutClient, RolloutFleet],
    "In process": [Engine, Control],
    "In the trainer's process": [colocated.ColocatedEngine, colocated.PhaseReport],
    "Traces": [read_trace, TraceRecord, replay, ReplayReport, TraceMismatch],
    "Logprobs, as the engine computes them": [
        SamplingMask, token_logprobs, token_logprobs_and_entropy, hidden_token_logprobs, hidden_token_logprobs_and_entropy
    ],
}
ONLY: dict[Any, tuple[str, ...]] = {
    SharedBuffers: (),
    Broadcast: (),
    Reshard: (),
    DiskTransport: (),
    sender.DistRanks: (),
    sources.TensorSource: (),
    colocated.ColocatedEngine: ("generating", "generate", "as_target", "close"),
    colocated.PhaseReport: (),
    Engine: ("generate", "score", "add_request", "step", "abort", "stats", "reset_prefix_cache", "close"),
    Control: (
        *("pause", "resume", "renew_lease", "revoke_lease", "sleep", "wake", "open_update", "take_chunk", "commit_update", "abort_update"),
        *("load_folder", "update_status", "digests"),
    ),
}
"""the methods to show of classes that have others besides"""


def _signature(call: Any, name: str) -> str:
    """As in the source, a parameter a line if it is long; of a class, that of its __init__."""
    function = ast.parse(textwrap.dedent(inspect.getsource(call.__init__ if inspect.isclass(call) else call))).body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = function.args
    parameters = inspect.signature(call).parameters
    for group in (arguments.posonlyargs, arguments.args):
        group[:] = [a for a in group if a.arg in parameters and a.arg != "self"]
    ends = "" if function.returns is None or inspect.isclass(call) else f" -> {ast.unparse(function.returns)}"
    prefix = "await " if isinstance(function, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{name}({ast.unparse(arguments)}){ends.removesuffix(' -> None')}"
    if len(line) <= 100:
        return line
    each = [ast.unparse(ast.arguments([], [], None, [a], [default], None, [])).removeprefix("*, ") for a, default in _pairs(arguments)]
    stars = [f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else []
    keywords = len(arguments.kwonlyargs)
    star = (["*"] if arguments.vararg is None else [f"*{ast.unparse(arguments.vararg)}"]) if keywords or arguments.vararg else []
    lines = [*each[: len(each) - keywords], *star, *each[len(each) - keywords :], *stars]
    return f"{prefix}{name}(\n" + "".join(f"    {text},\n" for text in lines) + f"){ends.removesuffix(' -> None')}"


def _pairs(arguments: ast.arguments) -> list[tuple[ast.arg, Any]]:
    """Every named parameter with its default, or None."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    return [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]


def _doc(thing: Any) -> str:
    """The docstring: prose as it is, its lists of arguments and errors as they were laid out."""
    text = inspect.getdoc(thing) or ""
    prose, _, rest = re.sub(r"^(Args|Returns|Raises|Attributes):", r"\0\1:", text, count=1, flags=re.MULTILINE).partition("\0")
    return prose.strip() + (f"\n\n```text\n{rest.strip()}\n```" if rest else "")


def _fields(kind: type) -> list[str]:
    """Fields of a dataclass with the strings that follow them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    rows = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            rows.append(f"- `{node.target.id}: {ast.unparse(node.annotation)}` {' '.join(str(told).split())}".rstrip())
    return rows


def _methods(kind: type) -> list[tuple[str, Any]]:
    found = {name: getattr(kind, name) for base in reversed(kind.__mro__[:-1]) for name in vars(base) if not name.startswith("_")}
    shown = ONLY.get(kind, tuple(found))
    return [(name, found[name]) for name in shown if inspect.isfunction(found[name]) and inspect.getdoc(found[name])]


def _entry(thing: Any) -> str:
    parts = [f"### {thing.__name__}\n"]
    if not (inspect.isclass(thing) and issubclass(thing, Exception)):
        where = thing.__module__.removeprefix("rollsync.")
        public = f"from rollsync import {thing.__name__}" if hasattr(sys.modules["rollsync"], thing.__name__) else f"`rollsync.{where}`"
        parts.append(f"{public if public.startswith('`') else f'`{public}`'}\n")
        if thing is not Control and not hasattr(thing, "__dataclass_fields__"):
            parts.append(f"```python\n{_signature(thing, thing.__name__)}\n```\n")
    parts.append(_doc(thing) + "\n")
    if not inspect.isclass(thing):
        return "\n".join(parts)
    if hasattr(thing, "__dataclass_fields__"):
        return "\n".join([*parts, *_fields(thing), ""])
    for name, call in _methods(thing):
        parts.append(f"```python\n{_signature(call, f'.{name}')}\n```\n")
        parts.append(_doc(call) + "\n")
    return "\n".join(parts)


def render() -> str:
    parts = [INTRO]
    for title, things in SECTIONS.items():
        parts += [f"## {title}\n", *map(_entry, things)]
    return "\n".join(parts).rstrip() + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    if parser.parse_args(argv).write:
        FILE.write_text(render())
    else:
        print(render())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
