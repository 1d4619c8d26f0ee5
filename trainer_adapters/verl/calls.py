"""Calls to a replica's server, each with a deadline."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from ...rollout.errors import RollsyncError, describe
from ...weight_sync.control import UpdateError
from ...weight_sync.names import GroupError
from . import NAME

MARGIN_S = 30.0
"""beyond what the server itself waits"""


def server_name(replica_rank: int, suffix: str = "") -> str:
    """Of the Ray actor of a replica."""
    return f"{NAME}_server_{replica_rank}_0{suffix}"


def find_server(replica_rank: int) -> Any:
    """The handle of a replica's server. UpdateError if it was not launched, or has ended."""
    try:
        return ray.get_actor(server_name(replica_rank))
    except ValueError as error:
        raise UpdateError(f"replica {replica_rank} has no server: {error}") from None


async def answer(reference: Any, what: str, timeout_s: float) -> Any:
    """What the server answers to `what`. UpdateError if it does not within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s + MARGIN_S):
            return await reference
    except TimeoutError:
        raise UpdateError(f"its server did not answer {what} within {timeout_s + MARGIN_S:g} s") from None


def in_words(error: BaseException) -> str:
    """What an error says, without the stack that Ray puts around a server's."""
    error = getattr(error, "cause", None) or error
    return str(error) if isinstance(error, RollsyncError | UpdateError | GroupError) else describe(error)
