"""Where a trainer's weights come from: names and shapes without a gather, then the tensors one after another, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .boxes import Box

if TYPE_CHECKING:
    from .model_weights import ModelWeights
    from .ranks import Ranks


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor and the boxes of it that this rank holds, in the order in which the source yields their values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class WeightSource(Protocol):
    """Weights of one trainer rank. `metadata` moves nothing; iteration yields (name, values of the next box) in its order.

    Values may be of another dtype than the metadata says: the sender casts them.
    """

    def metadata(self) -> list[TensorMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@runtime_checkable
class SharedSource(Protocol):
    """Weights that know what each rank of a sender is to send of them."""

    def share(self, ranks: Ranks) -> WeightSource: ...


def share_of(source: WeightSource | SharedSource, ranks: Ranks) -> WeightSource:
    """What this rank is to send."""
    return source.share(ranks) if isinstance(source, SharedSource) else source


def weights_from(model: nn.Module, *, dtype: torch.dtype | None = None, ranks: Ranks | None = None) -> ModelWeights:
    """The weights of a model that trains, under their Hugging Face names: plain, compiled, DDP, FSDP1, FSDP2, DeepSpeed ZeRO-3, LoRA.

    Iterate it for complete tensors on every rank, or give it to a `WeightSender` (with `ranks=DistRanks()` if there are several). It is
    cheap: make it where it is needed, of the outermost wrapper. LoRA adapters are merged into copies as they go.

    Args:
        dtype: to give them in, cast before they are gathered; None keeps each parameter's own.
        ranks: who agrees on how an iteration ended; None: all of torch.distributed if the model lies on several ranks, else nobody.

    Raises:
        UnsupportedModel: DoRA and other variants, several active adapters, merged or disabled ones, LoRA on tied weights, other kinds of
            peft, quantised weights. A ValueError.
    """
    from .model_weights import ModelWeights

    return ModelWeights(model, dtype=dtype, ranks=ranks)


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests have it, without "torch."; also of one that does not travel: the sender refuses it, naming the tensor."""
    return str(dtype).removeprefix("torch.")


class TensorSource:
    """Plain or sharded (DTensor) tensors by name. A sharded one is sent as the slices its ranks hold; nothing is gathered.

    Plain tensors are the same on every rank, so rank 0 alone sends them.

    Args:
        tensors: by Hugging Face name; of tied names give one.
        dtype: to send them in; None keeps each tensor's own.
        rank: of this trainer process.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, rank: int = 0) -> None:
        self._tensors, self._dtype, self._rank = dict(tensors), dtype, rank

    def metadata(self) -> list[TensorMeta]:
        metas = []
        for name, tensor in self._tensors.items():
            box = held_box(tensor, self._rank)
            boxes = (box,) if box is not None and box.elements else ()
            metas.append(TensorMeta(name, dtype_name(self._dtype or tensor.dtype), tuple(tensor.shape), boxes))
        return metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            box = held_box(tensor, self._rank)
            if box is not None and box.elements:
                yield name, _local(tensor).detach()  # cast as it is copied, so that no second copy of it is made


class ModuleSource(TensorSource):
    """The parameters of a module under their own names, tied ones once."""

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None, rank: int = 0) -> None:
        super().__init__(dict(module.named_parameters()), dtype=dtype, rank=rank)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return local


def held_box(tensor: Tensor, rank: int) -> Box | None:
    """The part of `tensor` that this rank is to send; None if another rank sends it.

    Raises:
        ValueError: a DTensor placement that is neither a shard nor a replica.
    """
    if not _is_sharded(tensor):
        return Box.whole(tensor.shape) if rank == 0 else None
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for placement in placements:  # on every rank alike
        if type(placement) not in (Replicate, Shard):
            raise ValueError(f"a DTensor placed as {placement} cannot be sent: shard or replicate it")
    if any(isinstance(placement, Replicate) and at != 0 for at, placement in zip(coordinate, placements, strict=True)):
        return None  # the first replica sends
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Box(tuple(offset), tuple(shape))
