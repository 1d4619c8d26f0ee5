"""Names that both ends and the server share; imports nothing, since the server's front holds no torch."""

BACKENDS = ("gloo", "nccl")
"""of groups"""
LAYOUTS = ("native", "plain", "torch")
"""of what the ranks of a group write to their store; see transports/rendezvous.py"""
