"""A trainer's parameters in the engine's memory, where both want them in the same order: then nothing of them is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..rollout.engine.engine import Engine
from .model_folder import bare_model


@torch.no_grad()
def share(model: Any, engine: Engine) -> int:
    """Move a model's parameters to where the engine reads them from, as far as its layout is theirs. They stay the same objects.

    Plain torch (`kernels="reference"`) reads all in the order of the model. The compiled kernels read linear layers packed in tiles, and
    with them a tied embedding; an embedding that is not tied, and norms, are plain.

    Returns:
        Bytes that lie in one place for both.

    Raises:
        ValueError: the model does not stand whole in this process's memory, in the engine's dtype; it names what stands in the way.
    """
    parameters = dict(bare_model(model).named_parameters())
    dtype = getattr(torch, engine.info.dtype)
    lend: Any = getattr(engine.runner, "lend", None)
    problems = [words for name, p in parameters.items() if (words := _problem(name, p, dtype)) is not None]
    if lend is None:
        problems.append("the engine has several ranks (tp)")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"share needs a model that stands whole in this process, as the engine reads it: {'; '.join(problems[:5])}{more}")
    shared = 0
    for name, parameter in parameters.items():
        lent = lend(name)
        if lent is not None:
            lent.copy_(parameter)
            parameter.data = lent
            shared += lent.nbytes
    return shared


def _problem(name: str, parameter: Any, dtype: torch.dtype) -> str | None:
    if type(parameter) is not nn.Parameter or hasattr(parameter, "ds_id") or hasattr(parameter.data, "placements"):
        return f"{name} is sharded, or quantised ({type(parameter.data).__name__})"
    if "lora_" in name or ".base_layer." in name:
        return f"{name} belongs to an adapter (LoRA)"
    if parameter.device.type != "cpu":
        return f"{name} lies on {parameter.device}"
    return f"{name} is {parameter.dtype}, the engine computes in {dtype}" if parameter.dtype != dtype else None
