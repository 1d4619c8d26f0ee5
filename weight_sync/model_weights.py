"""The weights of a model that trains: complete tensors one after another, or the slices that each rank holds, for a sender.

What this leaves behind is the model as it was: nothing is written, nothing merged in place, no random number drawn.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .boxes import Box
from .control import UpdateError
from .lora import merged
from .model_tree import Slot, Tree, is_zero3, loaded, parameter_of, tree_of
from .ranks import Alone, DistRanks, Ranks
from .sources import TensorMeta, WeightSource, dtype_name, held_box


@dataclass(slots=True)
class _Group:
    """Parameters that can be read while `open` is open."""

    open: Callable[[], contextlib.AbstractContextManager[Any]]
    slots: list[Slot]


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
        slots = [slot for group in _groups(self._tree()) for slot in group.slots]
        return [TensorMeta(s.name, dtype_name(self._dtype or s.dtype), s.shape, (Box.whole(s.shape),)) for s in slots]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        tree = self._tree()
        ranks = self._ranks or (DistRanks() if _is_spread(tree) else Alone())
        left: str | None = None
        reader = _Reader(tree, self._dtype)
        for slot in reader.slots():
            values = reader.whole(slot)
            if left is None:
                try:
                    yield slot.name, values
                except GeneratorExit:  # the caller is gone, but the other ranks need this one to the end
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
        reader = _Reader(tree, self._dtype)
        trouble: Exception | None = None
        words: str | None = None
        for slot in reader.slots():
            values = reader.whole(slot)
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
        for slot in (slot for group in _groups(self._tree()) for slot in group.slots):
            box = self._box(slot)
            boxes = (box,) if box is not None and box.elements else ()
            metas.append(TensorMeta(slot.name, dtype_name(self._weights._dtype or slot.dtype), slot.shape, boxes))
        return metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        reader = _Reader(self._tree(), None)  # the sender casts as it copies
        left = False
        for slot in reader.slots():
            values = reader.part(slot) if is_cut(slot) else reader.whole(slot)
            box = self._box(slot)
            if not left and box is not None and box.elements:
                try:
                    yield slot.name, values
                except GeneratorExit:
                    left = True
            del values

    def _box(self, slot: Slot) -> Box | None:
        if is_cut(slot):
            return held_box(parameter_of(slot), self._ranks.rank)
        return Box.whole(slot.shape) if self._ranks.rank == 0 else None


def is_cut(slot: Slot) -> bool:
    """Whether ranks hold boxes of this parameter."""
    kind = loaded("torch.distributed.tensor", "DTensor")
    parameter: Any = parameter_of(slot)
    if kind == () or slot.unit is not None or not isinstance(parameter, kind):
        return False
    from torch.distributed.tensor import Replicate, Shard

    return all(type(p) in (Replicate, Shard) for p in parameter.placements)


def _is_spread(tree: Tree) -> bool:
    """Whether reading it takes all ranks."""
    kind = loaded("torch.distributed.tensor", "DTensor")
    if tree.roots or tree.shards:
        return True
    held: list[Any] = [parameter_of(slot) for slot in tree.slots]
    return any(is_zero3(p) or (kind != () and isinstance(p, kind)) for p in held)


def _groups(tree: Tree) -> list[_Group]:
    """The parameters in the order in which they are read; those of one group are gathered together."""
    flat: dict[int, list[Slot]] = {id(root): [] for root in tree.roots}  # FSDP1 wants its roots first
    units = {id(root): root for root in tree.roots}
    others: list[Slot] = []
    for slot in tree.slots:
        if slot.unit is None:
            others.append(slot)
        else:
            units[id(slot.unit)] = slot.unit
            flat.setdefault(id(slot.unit), []).append(slot)
    groups = [_Group(_summoned(units[key]), slots) for key, slots in flat.items()]
    for zero3, run in itertools.groupby(others, lambda slot: is_zero3(parameter_of(slot))):
        if zero3:
            groups += [_Group(_collected(slots), slots) for slots in _batches(list(run))]
        else:
            groups.append(_Group(contextlib.nullcontext, list(run)))
    return groups


def _summoned(unit: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: unit.summon_full_params(unit, recurse=False, writeback=False)


def _batches(slots: list[Slot]) -> Iterator[list[Slot]]:
    """Runs that together are no larger than the largest one."""
    sizes = [torch.Size(slot.shape).numel() for slot in slots]
    limit, batch, used = max(sizes), [slots[0]], sizes[0]
    for slot, size in zip(slots[1:], sizes[1:], strict=True):
        if used + size > limit:
            yield batch
            batch, used = [], 0
        batch.append(slot)
        used += size
    yield batch


def _collected(slots: list[Slot]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """ZeRO-3 parameters, whole within. Those that are whole anyway stay so."""

    def begin() -> contextlib.AbstractContextManager[Any]:
        import deepspeed

        wanted: list[Any] = [parameter_of(s) for s in slots] + [
            parameter_of(f) for s in slots if s.lora is not None for f in (s.lora.a, s.lora.b)
        ]
        missing = [p for p in wanted if is_zero3(p) and p.ds_status.name != "AVAILABLE"]
        found: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(missing) if missing else contextlib.nullcontext()
        return found

    return begin


class _Reader:
    """Reads a model's parameters, in groups. All ranks call the same things in the same order."""

    def __init__(self, tree: Tree, dtype: torch.dtype | None) -> None:
        self._roots, self._groups, self._dtype = tree.roots, _groups(tree), dtype
        self._early: dict[int, Tensor] = {}
        """adapters that FSDP1 flattens apart from what they belong to, by id of their slot"""

    def slots(self) -> Iterator[Slot]:
        """One after another, readable until the next."""
        self._read_early()
        for group in self._groups:
            with group.open():
                yield from group.slots

    def _read_early(self) -> None:
        apart: dict[int, list[Slot]] = {}
        units = {}
        for slot in (slot for group in self._groups for slot in group.slots if slot.lora is not None):
            assert slot.lora is not None
            for factor in (slot.lora.a, slot.lora.b):
                if factor.unit is not None and factor.unit is not slot.unit:
                    units[id(factor.unit)] = factor.unit
                    apart.setdefault(id(factor.unit), []).append(factor)
        if not apart:
            return
        for root in self._roots:
            with _summoned(root)():
                pass
        for key, factors in apart.items():
            with _summoned(units[key])():
                self._early |= {id(factor): factor.read().clone() for factor in factors}

    def _factors(self, slot: Slot) -> tuple[Tensor, Tensor] | None:
        if slot.lora is None:
            return None
        a, b = (self._early[id(f)] if id(f) in self._early else _whole(f.read()) for f in (slot.lora.a, slot.lora.b))
        return a, b

    @torch.no_grad()
    def part(self, slot: Slot) -> Tensor:
        """What this rank holds of a cut parameter, the adapter added, cast."""
        factors, tensor = self._factors(slot), slot.read()
        local: Tensor = tensor.to_local()
        if factors is None:
            return local if self._dtype is None else local.to(self._dtype)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        assert slot.lora is not None
        return merged(local, Box(tuple(offset), tuple(shape)), *factors, slot.lora, self._dtype or local.dtype)

    @torch.no_grad()
    def whole(self, slot: Slot) -> Tensor:
        """The complete parameter, the adapter added, cast: before it is gathered, where ranks hold parts of it."""
        if is_cut(slot):
            return _whole(_like(slot.read(), self.part(slot)))
        factors, tensor = self._factors(slot), _whole(slot.read())
        if factors is None:
            return tensor if self._dtype is None else tensor.to(self._dtype)
        assert slot.lora is not None
        return merged(tensor, Box.whole(tensor.shape), *factors, slot.lora, self._dtype or tensor.dtype)


def _like(sharded: Any, local: Tensor) -> Any:
    """A DTensor of other local values, laid out alike."""
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = sharded.device_mesh, sharded.shape, sharded.stride()
    local = local.to(mesh.device_type)  # an offloaded shard travels over the devices' group
    return DTensor.from_local(local, mesh, sharded.placements, run_check=False, shape=shape, stride=stride)


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
