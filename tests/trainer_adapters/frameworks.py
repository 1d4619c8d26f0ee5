"""What the folders `with_<framework>` say where they cannot run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

LEFT_OUT = pytest.StashKey[dict[str, str]]()
"""why a folder's tests are not run, by folder"""


def leave_out(config: pytest.Config, folder: Path, *modules: str) -> bool:
    """Whether the tests in `folder` cannot be collected here, for want of `modules`; noted for the end of the run."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    left_out = config.stash.setdefault(LEFT_OUT, {})
    if missing:
        left_out[folder.name] = f"{' and '.join(missing)} not installed here"
    elif "not adapters" in config.getoption("markexpr", ""):
        left_out[folder.name] = "those marked `adapters` have a run of their own"
    if missing and config.getoption("--no-skips"):
        raise pytest.UsageError(f"{folder.name} needs {', '.join(missing)}, which this environment lacks, and --no-skips is given")
    return bool(missing)
