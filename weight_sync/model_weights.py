"""The weights of a model that trains: complete tensors one after another, or the slices that each rank holds, for a sender.

What this leaves behind is the model as it was: nothing is written, nothing merged in place, no random number drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .boxes import Box
from .control import UpdateError
from .gather import is_cut, is_sharded, is_zero3, joined, joined_zero3
from .lora import merged
from .model_tree import Slot, Tree, tree_of
from .ranks import Alone, DistRanks, Ranks
from .sources import TensorMeta, WeightSource, dtype_name, held_box


class ModelWeights:
    """What `weights_from` makes. It keeps no state: each use reads the model as it then is.

    Iterating gives (Hugging Face name, complete tensor) on every rank, in one order. Where ranks hold parts of a model, all of them must
    iterate: a rank that leaves the loop early reads on to the end by itself, and then the others raise UpdateError. A tensor is to be
    used, or copied, before the next one is asked for, and not to be written to.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None, ranks: Ranks | None = None) -> None:
        self._model, self._dtype, self._ranks = model, dtype, ranks
        tree_of(model)  # what cannot be sent is refused at once

    def metadata(self) -> list[TensorMeta]:
        """Names, dtypes and shapes as the tensors will come, in that order. Nothing is gathered."""
        return [TensorMeta(s.name, dtype_name(self._dtype or s.dtype), s.shape, (Box.whole(s.shape),)) for s in self._tree().slots]

    @property
    def collective(self) -> bool:
        """Whether reading it takes all ranks of torch.distributed."""
        return _is_spread(self._tree())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        tree = self._tree()
        ranks = self._ranks or (DistRanks() if _is_spread(tree) else Alone())
        left: str | None = None
        for slot in tree.slots:
            values = _whole(slot, self._dtype)
            if left is None:
                try:
                    yield slot.name, values
                except GeneratorExit:  # the caller is gone, but the other ranks need this one to the end
                    if ranks.size == 1:
                        return
                    left = slot.name
            del values
        words = [f"trainer rank {rank} left at {name}" for rank, name in enumerate(ranks.gather(left)) if name is not None]
        if words and left is None:
            raise UpdateError(f"the weights were not read to their end: {'; '.join(words)}")

    def feed(self, consume: Callable[[str, Tensor], object]) -> None:
        """Call `consume(name, tensor)` for every tensor, on every rank.

        Raises:
            UpdateError: on all ranks alike, once all have read to the end: `consume` raised on one of them. There it is the cause.
        """
        tree = self._tree()
        ranks = self._ranks or (DistRanks() if _is_spread(tree) else Alone())
        trouble: Exception | None = None
        words: str | None = None
        for slot in tree.slots:
            values = _whole(slot, self._dtype)
            if trouble is None:
                try:
                    consume(slot.name, values)
                except Exception as error:  # raised on every rank below
                    trouble, words = error, f"{slot.name}: {type(error).__name__}: {error}"
            del values
        where = " on trainer rank {}" if ranks.size > 1 else ""
        told = [f"failed{where.format(rank)} at {said}" for rank, said in enumerate(ranks.gather(words)) if said is not None]
        if told:
            raise UpdateError(f"reading the weights {'; '.join(told)}") from trouble

    def share(self, ranks: Ranks) -> WeightSource:
        """What one rank of a sender is to send: of sharded tensors its slices; of others, and of gathered ones, rank 0 all."""
        return _Share(self, ranks)

    def _tree(self) -> Tree:
        tree = tree_of(self._model)
        if tree.shards:
            for module in tree.shards:
                module.reshard()  # after a forward pass without a backward, some would stand there whole, and in another dtype
            tree = tree_of(self._model)
        return tree


class _Share:
    """A rank's part of the weights, as senders take it."""

    def __init__(self, weights: ModelWeights, ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks

    def _tree(self) -> Tree:
        tree = self._weights._tree()
        if _is_spread(tree) and self._ranks.size < (world := torch.distributed.get_world_size()):
            raise ValueError(f"this model lies on {world} ranks, but the sender has {self._ranks.size}: give it ranks=DistRanks(), on each")
        return tree

    def metadata(self) -> list[TensorMeta]:
        metas = []
        for slot in self._tree().slots:
            box = self._box(slot)
            boxes = (box,) if box is not None and box.elements else ()
            metas.append(TensorMeta(slot.name, dtype_name(self._weights._dtype or slot.dtype), slot.shape, boxes))
        return metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        left = False
        for slot in self._tree().slots:
            box = self._box(slot)
            use = not left and box is not None and box.elements > 0
            if is_cut(slot.parameter):
                values = _part(slot, None)  # the sender casts as it copies
            else:
                gathered = slot.flat is not None or is_zero3(slot.parameter)
                values = _whole(slot, self._weights._dtype if gathered else None, use)
            if use:
                try:
                    yield slot.name, values
                except GeneratorExit:
                    left = True
            del values

    def _box(self, slot: Slot) -> Box | None:
        if is_cut(slot.parameter):
            return held_box(slot.parameter, self._ranks.rank)
        return Box.whole(slot.shape) if self._ranks.rank == 0 else None


def _is_spread(tree: Tree) -> bool:
    """Whether reading it takes all ranks."""
    return bool(tree.shards) or any(s.flat is not None or is_zero3(s.parameter) or is_sharded(s.parameter) for s in tree.slots)


@torch.no_grad()
def _part(slot: Slot, dtype: torch.dtype | None) -> Tensor:
    """What this rank holds of a cut parameter, the adapter added, cast."""
    factors, tensor = _factors(slot), slot.parameter
    local: Tensor = tensor.to_local()
    if slot.lora is None or factors is None:
        return local if dtype is None else local.to(dtype)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return merged(local, Box(tuple(offset), tuple(shape)), *factors, slot.lora, dtype or local.dtype)


@torch.no_grad()
def _whole(slot: Slot, dtype: torch.dtype | None, use: bool = True) -> Tensor:
    """The complete parameter, the adapter added, cast: before it is gathered, where ranks hold parts of it. Called on all ranks alike.

    Args:
        use: whether it is wanted on this rank; if not, it only takes part.
    """
    if is_cut(slot.parameter):
        return joined(slot.parameter, _part(slot, dtype))
    factors = _factors(slot)
    if slot.lora is None or factors is None:
        return _read(slot, dtype or slot.dtype)
    tensor = _read(slot, slot.dtype)
    return merged(tensor, Box.whole(tensor.shape), *factors, slot.lora, dtype or tensor.dtype) if use else tensor


def _factors(slot: Slot) -> tuple[Tensor, Tensor] | None:
    """A and B of its adapter, whole."""
    return None if slot.lora is None else (_read(slot.lora.a, slot.lora.a.dtype), _read(slot.lora.b, slot.lora.b.dtype))


def _read(slot: Slot, dtype: torch.dtype) -> Tensor:
    """A parameter, whole and cast."""
    if slot.flat is not None:
        return slot.flat.whole(dtype)
    parameter = slot.parameter
    if is_zero3(parameter):
        return joined_zero3(parameter, dtype)
    tensor: Any = parameter.detach()
    return joined(tensor, tensor.to_local().to(dtype)) if is_sharded(tensor) else tensor.to(dtype)
