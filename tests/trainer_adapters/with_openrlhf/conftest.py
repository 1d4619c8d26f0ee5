"""Needs openrlhf, which has an environment of its own: `make test-adapters FRAMEWORKS=openrlhf`."""

from __future__ import annotations

from pathlib import Path

import pytest
from frameworks import leave_out


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file here is left out."""
    return (collection_path.name.startswith("test_") and leave_out(config, Path(__file__).parent, "ray", "openrlhf")) or None
