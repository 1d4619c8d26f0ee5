"""Rollsync: RL-rollout inference whose tokens and logprobs are the same bits however a request is served.

Names are imported on first use, so `import rollsync` needs neither torch nor a server package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": ".rollout.engine.engine",
    "EngineConfig": ".rollout.engine.config",
    "RolloutClient": ".rollout.client",
    "AsyncRolloutClient": ".rollout.client",
    "RolloutFleet": ".rollout.fleet",
    "AsyncRolloutFleet": ".rollout.fleet",
    "RolloutRequest": ".rollout.engine.types",
    "SampleOutput": ".rollout.engine.types",
    "SamplingMask": ".kernels.sampling_mask",
    "SamplingParams": ".rollout.engine.types",
    "BadRequest": ".rollout.errors",
    "ConfigError": ".rollout.errors",
    "DetachLimit": ".rollout.errors",
    "DuplicateRequest": ".rollout.errors",
    "EngineDead": ".rollout.errors",
    "IllegalState": ".rollout.errors",
    "NotReady": ".rollout.errors",
    "NotSupported": ".rollout.errors",
    "Overloaded": ".rollout.errors",
    "PromptTooLong": ".rollout.errors",
    "ProtocolMismatch": ".rollout.errors",
    "RollsyncError": ".rollout.errors",
    "ServerUnreachable": ".rollout.errors",
    "ShuttingDown": ".rollout.errors",
    "Unauthorized": ".rollout.errors",
    "UnknownRequest": ".rollout.errors",
    "UnsupportedModel": ".rollout.errors",
    "read_trace": ".rollout.trace",
    "replay": ".rollout.replay",
}
__all__ = [
    "AsyncRolloutClient",
    "AsyncRolloutFleet",
    "BadRequest",
    "ConfigError",
    "DetachLimit",
    "DuplicateRequest",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "IllegalState",
    "NotReady",
    "NotSupported",
    "Overloaded",
    "PromptTooLong",
    "ProtocolMismatch",
    "RolloutClient",
    "RolloutFleet",
    "RolloutRequest",
    "RollsyncError",
    "SampleOutput",
    "SamplingMask",
    "SamplingParams",
    "ServerUnreachable",
    "ShuttingDown",
    "Unauthorized",
    "UnknownRequest",
    "UnsupportedModel",
    "__version__",
    "read_trace",
    "replay",
]

if TYPE_CHECKING:
    from .kernels.sampling_mask import SamplingMask
    from .rollout.client import AsyncRolloutClient, RolloutClient
    from .rollout.engine.config import EngineConfig
    from .rollout.engine.engine import Engine
    from .rollout.engine.params import SamplingParams
    from .rollout.engine.types import RolloutRequest, SampleOutput
    from .rollout.errors import (
        BadRequest,
        ConfigError,
        DetachLimit,
        DuplicateRequest,
        EngineDead,
        IllegalState,
        NotReady,
        NotSupported,
        Overloaded,
        PromptTooLong,
        ProtocolMismatch,
        RollsyncError,
        ServerUnreachable,
        ShuttingDown,
        Unauthorized,
        UnknownRequest,
        UnsupportedModel,
    )
    from .rollout.replay import replay
    from .rollout.trace import read_trace


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'rollsync' has no attribute {name!r}")
    return getattr(importlib.import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
