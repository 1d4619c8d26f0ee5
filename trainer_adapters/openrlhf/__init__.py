"""Stock OpenRLHF with engines of Rollsync: `python -m rollsync.trainer_adapters.openrlhf ...OpenRLHF's arguments...`. docs/openrlhf.md."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

ENGINE_MODULE = "openrlhf.trainer.ray.vllm_engine"


def install(own: Mapping[str, Any] | None = None) -> None:
    """Put Rollsync's engines in the place of OpenRLHF's, in this process, before it is imported. Ray's workers call it as their hook.

    Args:
        own: options of the engines that this process will make; see `launch.HELP`.

    Raises:
        ImportError: OpenRLHF's own module was imported already.
    """
    from .engines import call_engines, make_engines
    from .launch import NEXT_HOOK
    from .stub import stand_in_for_vllm

    there = sys.modules.get(ENGINE_MODULE)
    if there is not None and getattr(there, "__rollsync__", None) is None:
        raise ImportError(f"{ENGINE_MODULE} was imported before Rollsync could take its place: start by `python -m {__name__}`")
    stand_in_for_vllm()
    module: Any = types.ModuleType(ENGINE_MODULE, "Rollsync's engines, in the place of vLLM's.")
    module.__rollsync__ = True
    module.create_vllm_engines = functools.partial(make_engines, dict(own or {}))
    module.batch_vllm_engine_call = call_engines
    sys.modules[ENGINE_MODULE] = module
    if theirs := os.environ.get(NEXT_HOOK):
        package, _, name = theirs.rpartition(".")
        getattr(importlib.import_module(package), name)()
