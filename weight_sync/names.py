"""Names that both ends and the server share; imports nothing, since the server's front holds no torch."""

from __future__ import annotations

TRANSPORTS = ("http", "ipc", "collective", "reshard", "disk")
"""those an engine can receive by; a server lists them as capabilities, which senders ask for"""
BACKENDS = ("gloo", "nccl")
"""of groups"""
LAYOUTS = ("native", "plain", "torch")
"""of what the ranks of a group write to their store; see transports/rendezvous.py"""

DEFAULT_TIMEOUT_S = 60.0
"""of a group's operations"""


class GroupError(ValueError):
    """A group could not be formed, or an operation on it failed. The message names phase, host, port, peer, bucket and seconds."""

    def __init__(self, phase: str, name: str, host: str, port: int, cause: str, *, peer: str = "", what: str = "", elapsed_s: float = 0.0):
        peer, what = f" with {peer}" if peer else "", f" ({what})" if what else ""
        super().__init__(f"{phase} of group {name!r} at {host}:{port}{peer}{what} failed after {elapsed_s:.1f} s: {cause}")
        self.phase, self.cause = phase, cause
