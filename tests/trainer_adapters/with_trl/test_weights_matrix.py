"""`weights_from` on two ranks, for every wrapper a trainer may use and what they make together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "weight_sync")]

import weights_worker
from test_weights_from import run_ranks

pytestmark = pytest.mark.adapters

TORCH = (
    *("compile+fsdp2", "regional+ddp", "tied+ac+fsdp2", "fsdp2columns", "hsdp", "hsdp1", "llama+tied+fsdp2"),
    *("fsdp1", "tied+fsdp1", "ac+fsdp1", "fsdp1mixed", "fsdp1flat", "fsdp1+compile", "llama+fsdp1"),
)
PEFT = (
    *("peft+ddp", "peftsave+ddp", "peft+compile+ddp", "peft+fsdp2", "peftsave+fsdp2", "peft+fsdp2mixed", "peft+partly", "peft+ac+fsdp2"),
    *("peft+fsdp2columns", "peft+hsdp", "peft+fsdp2apart", "peftembed+fsdp2", "peftrows+fsdp2", "peftembed+fsdp1", "llama+tied+peft+fsdp2"),
    *("peft+fsdp1", "peftsave+fsdp1", "peft+fsdp1apart", "llama+peft+fsdp1"),
)
ACCELERATE = ("llama+accelerate", "llama+tied+accelerate", "llama+acceleratemixed", "llama+tied+acceleratemixed", "llama+peft+accelerate")
ZERO3 = ("zero3", "tied+zero3", "zero3persist", "ac+zero3", "peft+zero3", "peftsave+zero3", "peft+zero3persist", "llama+tied+peft+zero3")
MEMORY = ("memory+ddp", "memory+fsdp2", "memory+fsdp2columns", "memory+fsdp1", "memory+zero3", "memory+peft+fsdp2", "memory+peft+fsdp1")


@pytest.mark.parametrize("kinds", [TORCH, PEFT, ACCELERATE, ZERO3, MEMORY], ids=["torch", "peft", "accelerate", "zero3", "memory"])
def test_two_ranks(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """All that `model_cases.check` holds against them."""
    for found in run_ranks(weights_worker.__file__, kinds, tmp_path, 600):
        assert found == dict.fromkeys(kinds, "ok")
