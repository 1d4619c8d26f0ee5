"""Checkpoints for the self-test's weight updates: a model's own weights, and others of the same shapes."""

from __future__ import annotations

from pathlib import Path

from ...weight_sync.checkpoint_writer import write_folder
from ...weight_sync.sources import TensorSource
from ..models.config import load_decoder_config
from ..models.loader import iter_checkpoint


class Folders:
    """`own` and `other` below `root`, written once. In `other` every tensor's first dimension is shifted by one."""

    def __init__(self, model: str, root: str) -> None:
        tensors = dict(iter_checkpoint(model, "safetensors", load_decoder_config(model)))
        self.root = root
        self.own = str(write_folder(Path(root) / "own", TensorSource(tensors)))
        self.other = str(write_folder(Path(root) / "other", TensorSource({name: t.roll(1, 0) for name, t in tensors.items()})))
