"""Weights of one rank as an update sees them: names and shapes of a checkpoint in, slices of local parameters out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.weights import NativeWeights, Weights
from ...weight_sync.boxes import Box
from ...weight_sync.manifest import Manifest, TensorEntry
from ..models.config import DecoderConfig
from ..models.params import hf_shapes, is_ignored, param_specs, plan, tied_name
from .weight_digest import Inspect, inspect_where_they_lie, native_inspect


class ParamTarget:
    """Writes an update into the shadow side (`staged`) or the live side (`in_place`) of a rank's parameters.

    Args:
        weights: both sides.
        staged: which side. The shadow is reserved and seeded by the first write that needs it: neither is work for the engine's thread.
    """

    def __init__(self, cfg: DecoderConfig, weights: Weights, *, staged: bool, tp_rank: int = 0, tp_size: int = 1) -> None:
        self._cfg, self._weights, self._staged = cfg, weights, staged
        self._rank, self._size = tp_rank, tp_size
        self._params: list[str] = []
        self._unseeded: set[str] = set()
        self._inspect = inspector(weights)

    def cover(self, tensors: Sequence[TensorEntry]) -> None:
        """Get ready for (more) tensors: a parameter that they cover in part only keeps the rest of what is live."""
        covered: dict[str, int] = {}
        for tensor in tensors:
            for w in plan(self._cfg, tensor.name, self._rank, self._size):
                covered[w.param] = covered.get(w.param, 0) + w.rows * w.cols
        specs = param_specs(self._cfg, self._size, self._rank) if self._staged else {}
        for name, elements in covered.items():
            if name not in self._params:
                self._params.append(name)
                if self._staged and elements != torch.Size(specs[name].shape).numel():
                    self._unseeded.add(name)

    def take(self, name: str, box: Box, values: Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
        """Take in a piece of a whole tensor: what of it this rank keeps, cast (round to nearest) to the engine's dtype.

        Returns:
            What all of it adds to the tensor's digest, and how many of its values are not finite, or not once they are cast.
        """
        if self._staged:
            self._weights.reserve_shadow()
        weights, kept = self._weights, self._kept(name, box)
        if len(kept) == 1 and kept[0][0] == box and isinstance(weights, NativeWeights) and weights.takes(values):
            _, param, row, col = kept[0]
            place = box.offset[0] * shape[1] + box.offset[1]
            return weights.take(param, row, col, values, place, shape[1], shadow=self._staged)
        digest, bad = self._inspect(values, box, shape)
        if kept:
            cast = values.to(weights.dtype)
            for part, param, row, col in kept:
                weights.write(param, row, col, cast[part.within(box).slices()], shadow=self._staged)
        return digest, bad + overflows(values, weights.dtype)

    def _kept(self, name: str, box: Box) -> list[tuple[Box, str, int, int]]:
        """What of a piece goes where: its part, parameter, row and column there."""
        found = []
        for w in plan(self._cfg, name, self._rank, self._size):
            flat = len(box.length) == 1
            kept = Box((w.src_row,), (w.rows,)) if flat else Box((w.src_row, w.src_col), (w.rows, w.cols))
            both = box.intersect(kept)
            if both is None:
                continue
            if w.param in self._unseeded:
                self._unseeded.remove(w.param)
                self._weights.seed_shadow(w.param)
            row = w.dst_row + both.offset[0] - w.src_row
            col = w.dst_col + (0 if flat else both.offset[1] - w.src_col)
            found.append((both, w.param, row, col))
        return found

    def commit(self) -> None:
        """Make what was written live. Between two steps."""
        if self._staged:
            self._weights.flip(self._params)


def overflows(values: Tensor, dtype: torch.dtype) -> int:
    """How many finite values become infinite in `dtype`; for most dtypes none can."""
    limit = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max <= limit or not values.numel():
        return 0
    low, high = (bound.item() for bound in values.aminmax())
    if -limit <= low and high <= limit:
        return 0
    return int((values.isfinite() & ~values.to(dtype).isfinite()).sum())


def missing_tensors(cfg: DecoderConfig, manifest: Manifest) -> list[str]:
    """What a manifest lacks to be a full update of this model."""
    names = {t.name for t in manifest.tensors}
    return [f"{name} {list(shape)} is missing" for name, shape in hf_shapes(cfg).items() if name not in names]


def wanted_boxes(cfg: DecoderConfig, tp_rank: int, tp_size: int) -> dict[str, list[Box]]:
    """What a rank keeps of each checkpoint tensor, by name; tensors of which it keeps nothing are left out."""
    wanted = {}
    for name, shape in hf_shapes(cfg).items():
        boxes = [
            Box((w.src_row,), (w.rows,)) if len(shape) == 1 else Box((w.src_row, w.src_col), (w.rows, w.cols))
            for w in plan(cfg, name, tp_rank, tp_size)
            if w.rows * w.cols
        ]
        if boxes:
            wanted[name] = boxes
    return wanted


def manifest_problems(cfg: DecoderConfig, manifest: Manifest, mode: str | None) -> list[str]:
    """What keeps a manifest from being an update of this model; empty if nothing does."""
    wanted = hf_shapes(cfg)
    problems = []
    for t in manifest.tensors:
        expected = wanted.get(tied_name(cfg, t.name) or t.name)
        if expected is None and not is_ignored(cfg, t.name):
            problems.append(f"{t.name} {list(t.shape)} is not part of this model")
        elif expected is not None and t.shape != expected:
            problems.append(f"{t.name} is {list(t.shape)}, must be {list(expected)}")
    return problems + (missing_tensors(cfg, manifest) if mode == "full" else [])


def lone_heads(cfg: DecoderConfig, names: Iterable[str]) -> list[str]:
    """Tied tensors that would come without the one that is held: nothing would be written."""
    given = set(names)
    return [f"{n} is tied to {twin}, which must come along" for n in given if (twin := tied_name(cfg, n)) and twin not in given]


def tie_problems(cfg: DecoderConfig, digests: dict[str, int]) -> list[str]:
    """A tied head that came along must be the embedding that came with it."""
    problems = []
    for name, digest in digests.items():
        twin = tied_name(cfg, name)
        if twin is not None and twin in digests and digests[twin] != digest:
            problems.append(f"{name} is tied to {twin}, but they came with different values")
    return problems


def inspector(weights: Weights) -> Inspect:
    """Digest and finite check where values lie: by the library the weights are packed with, on their device, or without kernels."""
    library = getattr(weights, "library", None)
    return inspect_where_they_lie if library is None else native_inspect(library)


def live_digests(cfg: DecoderConfig, weights: Weights, tp_rank: int = 0, tp_size: int = 1) -> dict[str, int]:
    """Digest by checkpoint name of the weights in use, in the engine's dtype; of a rank: what its share adds to it.

    What every rank holds whole counts on rank 0 only, so that ranks' values add up (modulo 2**64).
    """
    inspect, found = inspector(weights), {}
    for name, shape in hf_shapes(cfg).items():
        (w,) = plan(cfg, name, tp_rank, tp_size)
        if tp_rank and (w.rows * w.cols == 0 or w.rows * w.cols == torch.Size(shape).numel()):
            continue
        part = weights.read(w.param)[w.dst_row : w.dst_row + w.rows]
        box = Box((w.src_row,), (w.rows,)) if len(shape) == 1 else Box((w.src_row, w.src_col), (w.rows, w.cols))
        found[name] = inspect(part, box, shape)[0]
    return found


def live_values(cfg: DecoderConfig, weights: Weights, name: str, rows: int, tp_rank: int = 0, tp_size: int = 1) -> dict[str, Any]:
    """The first rows of a checkpoint tensor in use, of what of it this rank holds.

    Returns:
        "shape" of the whole tensor, and "pieces": (first row, first column, rows of values); a vector is a column.

    Raises:
        ValueError: the model has no tensor of this name.
    """
    held = tied_name(cfg, name) or name
    shape = hf_shapes(cfg).get(held)
    if shape is None:
        raise ValueError(f"name must be a tensor of this model, got {name[:200]!r}")
    pieces = []
    for w in plan(cfg, held, tp_rank, tp_size):
        whole = weights.read(w.param)
        end = w.dst_row + max(0, min(w.rows, rows - w.src_row))
        part = whole.reshape(whole.shape[0], -1)[w.dst_row : end, w.dst_col : w.dst_col + w.cols]
        pieces.append((w.src_row, w.src_col, part.float().tolist()))
    return {"shape": list(shape), "pieces": pieces}
