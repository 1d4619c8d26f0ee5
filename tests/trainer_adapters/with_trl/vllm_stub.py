"""As much of a `vllm` module as TRL's clients import, made at run time: nothing of it is on disk, and it samples nothing.

Weights leave as vLLM packs them, over a gloo group in the place of the NCCL one, which wants a GPU at either end.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any


class Endpoint:
    """The trainer's end of a weight transfer group: it hosts the store, and is rank 0."""

    def __init__(self, info: dict[str, Any], rank: int = 0) -> None:
        import torch.distributed as dist

        store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"], is_master=True, wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(store, rank, info["world_size"], timedelta(seconds=30))
        self.group = types.SimpleNamespace(store=store, socket=None)
        """what a client lets go of when it closes"""

    def broadcast(self, tensor: Any) -> None:
        import torch.distributed as dist

        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()


def send_packed(iterator: Iterator[Any], group: Endpoint, src: int, post_iter_func: Callable[[Any], Any], limit: int = 1 << 30) -> None:
    """Tensors as bytes, one broadcast each time that more than `limit` have come together."""
    import torch

    waiting: list[Any] = []
    for item in iterator:
        waiting.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(t.numel() for t in waiting) > limit:
            group.broadcast(torch.cat(waiting))
            waiting = []
    if waiting:
        group.broadcast(torch.cat(waiting))


class Keywords:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Engine:
    """As vLLM had it before 0.28."""

    trainer_init = staticmethod(Endpoint)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        send_packed(iterator, trainer_args.group, 0, lambda item: item[1])


def install(version: str = "0.32.0") -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this stub of vLLM computes nothing")

    network = {"get_ip": lambda: "127.0.0.1", "get_open_port": never}
    transfer = "vllm.distributed.weight_transfer"
    _module("vllm", __version__=version, LLM=never, RequestOutput=Keywords, SamplingParams=Keywords)
    _module("vllm.sampling_params", StructuredOutputsParams=Keywords, GuidedDecodingParams=Keywords)
    _module("vllm.utils", **network)
    _module("vllm.utils.network_utils", **network)
    _module("vllm.distributed")
    _module(transfer)
    _module(f"{transfer}.nccl_common", trainer_init=Endpoint)
    _module(f"{transfer}.packed_tensor", packed_nccl_broadcast_producer=send_packed)
    _module(f"{transfer}.nccl_engine", NCCLTrainerSendWeightsArgs=Keywords, NCCLWeightTransferEngine=Engine)


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
