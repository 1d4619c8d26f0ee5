"""What an engine must know of a trainer's model beside its weights, out of the model itself: no checkpoint is needed."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..rollout.engine.config import DTYPES
from ..rollout.models.config import ARCHITECTURES

_INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""where DDP and DeepSpeed, torch.compile and FSDP1 keep what they wrap"""


def bare_model(model: Any) -> Any:
    """The transformers model inside DDP, FSDP1, DeepSpeed, torch.compile and peft.

    Raises:
        TypeError: there is none.
    """
    found = model
    while True:
        inner = next((child for name in _INSIDE if (child := getattr(found, "_modules", {}).get(name)) is not None), None)
        if inner is None and hasattr(found, "get_base_model"):
            inner = found.get_base_model()
        if inner is None:
            break
        found = inner
    if not hasattr(getattr(found, "config", None), "to_dict"):
        raise TypeError(f"a transformers model is needed, or one that is wrapped; got {type(model).__name__}, which has no config")
    return found


def compute_dtype(model: Any, mixed_precision: str | None = None) -> str:
    """bfloat16 or float32: what a model's forward pass computes in.

    Args:
        mixed_precision: of an Accelerator: "no", "bf16", ...

    Raises:
        ValueError: it computes in something else, or in several dtypes.
    """
    if mixed_precision not in (None, "no"):
        name = {"bf16": "bfloat16", "fp16": "float16"}.get(str(mixed_precision), str(mixed_precision))
        return _checked(name, f"the Accelerator's mixed_precision is {mixed_precision}")
    for module in model.modules():
        policy = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_mp_policy", None)
        if policy is not None and policy.param_dtype is not None:
            return _checked(str(policy.param_dtype), "that is FSDP2's param_dtype")
    named = ((name, p) for name, p in model.named_parameters() if "lora_" not in name)  # peft keeps adapters in float32
    names = sorted({str(p.dtype) for _, p in named if p.dtype.is_floating_point})
    if len(names) != 1:
        raise ValueError(f"the model's parameters are of {', '.join(names) or 'no floating dtype'}: give dtype, as its forward pass has it")
    return _checked(names[0], "that is the dtype of its parameters")


def _checked(name: str, why: str) -> str:
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"the model computes in {name} ({why}), the engine in {' or '.join(DTYPES)}: give dtype to have one of these")
    return name


@contextlib.contextmanager
def model_folder(model: Any, dtype: str, tokenizer: Any = None) -> Iterator[str]:
    """A temporary folder that describes a model as a checkpoint does, without weights: gone when the context ends.

    Args:
        model: what `bare_model` takes.
        dtype: of the engine.
        tokenizer: one of transformers', or None.
    """
    bare = bare_model(model)
    raw = {key: value for key, value in bare.config.to_dict().items() if key != "torch_dtype"}
    raw["dtype"] = dtype
    known = [kind.__name__ for kind in type(bare).__mro__ if kind.__name__ in ARCHITECTURES]  # fully_shard puts a class of its own on top
    raw["architectures"] = known[:1] or raw.get("architectures") or [type(bare).__name__]
    with tempfile.TemporaryDirectory(prefix="rollsync-model-") as name:
        folder = Path(name)
        if tokenizer is not None:
            tokenizer.save_pretrained(name)
        (folder / "config.json").write_text(json.dumps(raw, default=str))
        generation = getattr(bare, "generation_config", None)
        if generation is not None and generation.eos_token_id is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation.eos_token_id}))
        yield name
