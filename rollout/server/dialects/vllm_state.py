"""What vLLM's weight routes remember between two calls; the update itself is the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request


@dataclass(slots=True)
class VllmState:
    """Of one server."""

    layout: dict[str, Any] | None = None
    """how tensors are cut into messages, as the trainer said when its group was formed; None: none is formed"""
    update_id: str | None = None
    """the update that these routes opened and did not finish"""
    finished: int | None = None
    """version of the last one, if it was finished"""
    turn: int = 0
    """grows whenever all of this is dropped: who began before must leave alone what came after"""
    ended: str = "none was started"
    """why no update is open"""


def state_of(request: Request) -> VllmState:
    state: VllmState = request.app.state.vllm
    return state
