"""Memory of a rank that is given back and had again, tag by tag."""

from __future__ import annotations

from ...kernels.weights import Weights
from .devices import Device, Kv


class RunnerMemory:
    """The sleep of one rank: "weights" and "kv_cache"."""

    def __init__(self, device: Device, weights: Weights, kv: Kv) -> None:
        self._device, self._weights, self._kv = device, weights, kv
        self._keeper = device.keeper()
        self._away: set[str] = set()
        """memory that sleeps"""

    def sleep(self, tag: str, keep: bool) -> int:
        """Give memory to the system: the KV pool's, or that of the weights (`keep`: copied elsewhere first).

        Returns the bytes freed, as the system counts them.
        """
        before = self._device.held_bytes()
        self._release(tag, keep)
        self._away.add(tag)
        return max(0, before - self._device.held_bytes())

    def _release(self, tag: str, keep: bool) -> None:
        if tag == "kv_cache":
            self._kv.release()
            return
        self._keeper.drop()  # of weights that were kept and are now discarded
        if keep:
            self._keeper.keep(self._weights)
        self._weights.release()

    def wake(self, tag: str) -> None:
        """Have that memory again, if it is away; weights that were not kept are zeros, and the copy of those that were is freed.

        Raises:
            MemoryError: says how much is needed and how much is free. OSError: the copy cannot be read. Nothing is taken then.
        """
        if tag not in self._away:
            return
        needed, free = self._kv.layout.nbytes if tag == "kv_cache" else self._weights.nbytes, self._device.available_bytes()
        if needed > free:
            raise MemoryError(f"{needed} bytes are needed, {free} are free")
        if tag == "kv_cache":
            self._kv.resume()
            self._away.remove(tag)
            return
        try:
            self._weights.resume()
            self._keeper.restore(self._weights)
        except BaseException:
            self._weights.release()
            raise
        self._keeper.drop()
        self._away.remove(tag)

    def close(self) -> None:
        """Free what was kept."""
        self._keeper.drop()
