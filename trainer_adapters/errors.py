"""What the adapters raise."""

from __future__ import annotations


class ParityError(ValueError):
    """Equal bits cannot be had, or cannot be claimed: the message names the module, setting or pair of things that stands in the way."""
