"""As much of a `vllm` module as TRL's clients import, made at run time: nothing of it is on disk, nothing of it computes."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any


def install(version: str = "0.32.0") -> None:
    class Keywords:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this stub of vLLM computes nothing")

    _module("vllm", __version__=version, LLM=never, RequestOutput=Keywords, SamplingParams=Keywords)
    _module("vllm.sampling_params", StructuredOutputsParams=Keywords, GuidedDecodingParams=Keywords)
    _module("vllm.utils", get_ip=lambda: "127.0.0.1", get_open_port=never)
    _module("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1", get_open_port=never)
    for name in ("vllm.distributed", "vllm.distributed.weight_transfer"):
        _module(name)
    _module("vllm.distributed.weight_transfer.base")
    _module("vllm.distributed.weight_transfer.nccl_common", trainer_init=never)
    _module("vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer=never)


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
