"""What OpenRLHF imports of vLLM, for environments without it: sampling parameters, and the two classes its weights travel by.

The modules exist in memory only, and hold nothing else: whoever asks for more is told so.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ...weight_sync.names import GroupError
from ...weight_sync.transports.collective import form
from ...weight_sync.transports.rendezvous import Store

STANDS_FOR = "0.29.0"
"""the vLLM version that OpenRLHF 0.11 asks for"""
GROUP = "openrlhf"
WAIT_S = 300.0
"""how long the trainer and all engines may take to meet, and one parameter to come"""


@dataclass
class SamplingParams:
    """vLLM's sampling parameters, as far as Rollsync has them; any other is a TypeError. -1 and None mean what they mean there."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True


class StatelessProcessGroup:
    """Where the trainer (rank 0) and the engines meet."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        """Rank 0 hosts the place at `port`; the others reach it within WAIT_S.

        Raises:
            GroupError: the port is taken, or nobody answers there.
        """
        store = Store.bind(GROUP, host, int(port)) if rank == 0 else Store.connect(GROUP, host, int(port), world_size, WAIT_S)
        return cls(store, rank, world_size)


class PyNcclCommunicator:
    """Broadcasts among those who met: by NCCL if every rank has a GPU, else by gloo, through host memory.

    Args:
        device: of this rank's tensors: a CUDA device's number, or anything torch.device takes.
    """

    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.rank, self.world_size = group.rank, group.world_size
        kinds = _told_by_all(group, self.device.type)
        backend = "nccl" if set(kinds) == {"cuda"} else "gloo"
        own = self.device if backend == "nccl" else None
        self._group = form(group.store, group.rank, group.world_size, backend=backend, device=own, timeout_s=WAIT_S, layout="native")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Copy `tensor` of rank `src` into that of every other rank; complete on return.

        Args:
            stream: not needed: what wrote to the tensor on the current stream comes first.

        Raises:
            GroupError: it did not come through within WAIT_S, or a rank is gone.
        """
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer = raw.to(self._group.device)
        self._group.broadcast(buffer, src).wait()
        if self.rank != src and buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        """Leave; what others wait for fails soon."""
        self._group.close()


def _told_by_all(group: StatelessProcessGroup, kind: str) -> list[str]:
    """The kind of device of every rank."""
    raw: Any = group.store.raw
    raw.set(f"device/{group.rank}", kind)
    keys = [f"device/{rank}" for rank in range(group.world_size)]
    try:
        raw.wait(keys, timedelta(seconds=WAIT_S))
    except RuntimeError:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not raw.check([key]))
        raise GroupError("joining", GROUP, group.store.host, group.store.port, f"rank {missing} did not join within {WAIT_S:g} s") from None
    return [raw.get(key).decode() for key in keys]


class _Missing(types.ModuleType):
    """A module of the stand-in; what it lacks it says."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name}: vLLM is not installed, and Rollsync stands in only for what OpenRLHF's trainers use")


def _put(name: str, **held: Any) -> None:
    module = _Missing(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(held)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def stand_in_for_vllm() -> bool:
    """Put the stand-in in this process's modules. False, and nothing happens, where vLLM is installed, or the stand-in is there."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return False
    _put("vllm", SamplingParams=SamplingParams, __version__=STANDS_FOR)
    _put("vllm.distributed")
    _put("vllm.distributed.utils", StatelessProcessGroup=StatelessProcessGroup)
    _put("vllm.distributed.device_communicators")
    _put("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=PyNcclCommunicator)
    return True
