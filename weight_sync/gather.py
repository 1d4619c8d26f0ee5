"""Complete tensors out of what a trainer's ranks hold of them, one at a time: FSDP2's DTensors, FSDP1's flat parameters, ZeRO-3's parts.

A tensor is received where it will lie, so a gather takes the memory of its result and of this rank's part, no more.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def loaded(module: str, name: str) -> tuple[type, ...]:
    """A class out of a module, if that is imported already: what `isinstance` takes. Without it nothing is its instance."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def is_zero3(parameter: Any) -> bool:
    """Whether DeepSpeed's ZeRO-3 shares this parameter out."""
    return hasattr(parameter, "ds_id") and hasattr(parameter, "ds_shape")


def is_sharded(parameter: Any) -> bool:
    return isinstance(parameter, loaded("torch.distributed.tensor", "DTensor"))


def is_cut(parameter: Any) -> bool:
    """Whether ranks hold boxes of this parameter."""
    if not is_sharded(parameter):
        return False
    from torch.distributed.tensor import Replicate, Shard

    return all(type(placement) in (Replicate, Shard) for placement in parameter.placements)


def joined(sharded: Any, local: Tensor) -> Tensor:
    """The complete tensor of the `local` parts of all ranks, which lie as those of the DTensor `sharded`, in any dtype."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, shape = sharded.device_mesh, sharded.shape
    local = local.to(mesh.device_type)  # an offloaded part travels over the devices' group
    cut = [axis for axis, placement in enumerate(sharded.placements) if isinstance(placement, Shard)]
    exact = is_cut(sharded)
    if exact and not cut:
        return local
    if not exact or len(cut) > 1:  # (a partial sum, or a strided shard, is no box: PyTorch puts it together)
        whole = DTensor.from_local(local, mesh, sharded.placements, run_check=False, shape=shape, stride=sharded.stride())
        return whole.full_tensor()
    dim, size = sharded.placements[cut[0]].dim, mesh.size(cut[0])
    many = -(-shape[dim] // size)
    ends = [min(rank * many, shape[dim]) for rank in range(size + 1)]
    group = mesh.get_group(cut[0])
    if dim == 0:
        width = torch.Size(shape[1:]).numel()
        return _received(local.reshape(-1), [end * width for end in ends], group).view(shape)
    return _received_within(local, dim, ends, shape, group)


def joined_zero3(parameter: Any, dtype: torch.dtype) -> Tensor:
    """The complete tensor of a ZeRO-3 parameter, cast before it is gathered; whatever of it is whole at the moment stays as it is.

    DeepSpeed's own `GatheredParameters` takes two to three times the memory, and of several parameters it waits for the last only, which
    with gloo says nothing of the others.
    """
    held, group, shape = parameter.ds_tensor, parameter.ds_process_group, torch.Size(parameter.ds_shape)
    own = held.detach().to(parameter.device, dtype)  # it may be offloaded
    ends = [min(rank * held.ds_numel, shape.numel()) for rank in range(dist.get_world_size(group) + 1)]
    rank = dist.get_rank(group)
    return _received(own[: ends[rank + 1] - ends[rank]], ends, group).view(shape)


def zero3_objection(parameter: Any) -> str | None:
    """Why the parts of a ZeRO-3 parameter cannot be read; None if they can."""
    held = parameter.ds_tensor
    if hasattr(held, "ds_quant_scale"):
        return "is quantised by ZeRO-3 (zero_quantized_nontrainable_weights)"
    return "is offloaded to NVMe by ZeRO-3" if held.final_location == "nvme" else None


def _received(own: Tensor, ends: Sequence[int], group: Any) -> Tensor:
    """[ends[-1]]: the parts of all ranks of a group one behind the other. Part r has the elements from ends[r] to ends[r + 1]."""
    rank = dist.get_rank(group)
    out = own.new_empty(ends[-1])
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    if len(set(sizes)) == 1 and out.device.type != "cpu":  # (gloo makes another copy of all)
        dist.all_gather_into_tensor(out, own.contiguous(), group=group)
        return out
    out[ends[rank] : ends[rank + 1]] = own
    for sender, size in enumerate(sizes):
        if size:
            dist.broadcast(out[ends[sender] : ends[sender + 1]], dist.get_global_rank(group, sender), group=group)
    return out


def _received_within(own: Tensor, dim: int, ends: Sequence[int], shape: Sequence[int], group: Any) -> Tensor:
    """[shape]: the parts of all ranks side by side in `dim`, each received and put into its place."""
    rank, out = dist.get_rank(group), own.new_empty(shape)
    for sender, (first, last) in enumerate(itertools.pairwise(ends)):
        if last > first:
            place = out.narrow(dim, first, last - first)
            part = own.contiguous() if sender == rank else torch.empty_like(place, memory_format=torch.contiguous_format)
            dist.broadcast(part, dist.get_global_rank(group, sender), group=group)
            place.copy_(part)
    return out


@dataclass(eq=False, slots=True)
class Flat:
    """One parameter within the flat one of an FSDP1 unit. PyTorch tells of these in private attributes only, which no longer change."""

    handle: Any
    index: int
    start: int
    """its first element in the flat parameter"""
    first: tuple[int, str]
    """(id of the module, name): those tied to it have the same"""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.flat_param._shapes[self.index])

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.handle._orig_param_dtype  # also while a forward's bfloat16 copy stands there
        return found

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The complete parameter, cast before it is gathered. Called on all ranks of its group."""
        handle, flat = self.handle, self.handle.flat_param
        held = self._held().detach()
        count, size = torch.Size(self.shape).numel(), handle.world_size if handle.uses_sharded_strategy else 1
        part = flat._sharded_size.numel() if size > 1 else held.numel()
        ends = [min(max(rank * part - self.start, 0), count) for rank in range(size)] + [count]
        at = handle.rank * part if size > 1 else 0
        first, last = (max(self.start - at, 0), min(self.start + count - at, held.numel()))
        own = held[first : max(first, last)].to(handle.device, dtype)
        found = _received(own, ends, handle.process_group) if size > 1 else own
        return found.as_strided(self.shape, flat._strides[self.index])

    def _held(self) -> Tensor:
        """This rank's part of the flat parameter, of full precision, whatever stands in its place at the moment."""
        handle, flat = self.handle, self.handle.flat_param
        if handle._use_orig_params and not handle._skip_writeback_check and handle.is_sharded(flat):
            handle._writeback_orig_params()  # parameters that were replaced since, as the next forward would find them
        found: Tensor = getattr(flat, "_local_shard", flat)
        return found


def flat_parameters(unit: Any) -> dict[tuple[int, str], Flat]:
    """Parameters that an FSDP1 module flattens, by (id of their module, name). Tied ones have an entry under each name."""
    handle = unit._handle
    if handle is None:
        return {}
    flat, found = handle.flat_param, {}
    start, infos = 0, iter(enumerate(flat._param_infos))
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            index, info = next(infos)
            key = (id(info.module), info.param_name)
            found[key] = Flat(handle, index, start, key)
        start += numel
    for info in flat._shared_param_infos:
        found[id(info.module), info.param_name] = found[id(info.prim_module), info.prim_param_name]
    return found
