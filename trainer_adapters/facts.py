"""What engines say of themselves, asked of servers too."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ..rollout.client import RolloutClient
from ..rollout.errors import ServerUnreachable

log = logging.getLogger(__name__)
TELL_S = 2.0
"""how long a server that is not there is waited for in silence"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What engines say of themselves; servers of one target say the same."""

    dtype: str
    """bfloat16 or float32: weights are best sent in it"""
    fingerprint: str
    """of the numerics"""
    vocab_size: int
    max_model_len: int
    """tokens of prompt and completion together"""
    computation: dict[str, Any] = field(default_factory=dict)
    """what a forward pass computes, by the names of DecoderConfig"""

    @classmethod
    def of(cls, info: Any) -> Facts:
        """Out of `Engine.info`, or a server's status."""
        told = info if isinstance(info, dict) else {name: getattr(info, name) for name in cls.__slots__ if hasattr(info, name)}
        return cls(**{name: told[name] for name in cls.__slots__ if name in told})


def info_of(client: RolloutClient, url: str, deadline_s: float) -> dict[str, Any]:
    """What a server says of its engine, once that is loaded; it need not be ready, as it may wait for its first weights."""
    end = time.monotonic() + deadline_s
    told_at = time.monotonic() + TELL_S
    while True:
        try:
            status = client.status()
            words = f"{url} was still loading its model"
            if status["info"]:
                info: dict[str, Any] = status["info"]
                return info
        except ServerUnreachable as error:
            words = str(error)
        if time.monotonic() >= end:
            raise ServerUnreachable(f"{words} (waited {deadline_s:g} s): is `rollsync serve` running there?")
        if time.monotonic() >= told_at:
            log.warning("waiting for %s (up to %g s)", url, deadline_s)
            told_at = end
        time.sleep(0.2)


def differences(told: Facts, first: Facts) -> list[str]:
    """Every fact in which they are not the same."""
    mine, other = ({**dataclasses.asdict(facts), **facts.computation} for facts in (told, first))
    names = [name for name, value in mine.items() if name != "computation" and value != other.get(name)]
    return [f"{name} ({mine[name]!r} and {other.get(name)!r})" for name in names]


def instance_of(client: RolloutClient) -> str | None:
    """Another one whenever an engine is started; None while it loads."""
    found: str | None = (client.weights().get("weights") or {}).get("instance")
    return found
