"""A step's arrays on a device: written by the host in place, sent in one copy, and what rows drew comes back in one.

Tokens that pad a step have slot -1: they store nothing, and no work item names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..step import StepArrays, StepLimits
from .queue import Queue
from .weights import take

_ALIGN = 256
LISTS = ("banned", "adjust", "allowed", "out_mask")
"""columns whose size hangs on requests: sent by themselves, by steps that use them"""
HOST_ONLY = ("runs", "num_keys", "first_key")
"""that no kernel here reads"""
_TORCH: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
"""unsigned columns keep their bits; kernels read them as what they are"""


class DeviceArrays(StepArrays):
    """`StepArrays` in memory that the device copies from; `on_device` has the columns there, with unsigned ones as signed."""

    grouped = False

    def __init__(self, limits: StepLimits, queue: Queue) -> None:
        super().__init__(limits)
        self._queue = queue
        inputs = [name for name in self.columns if name not in LISTS + HOST_ONLY and not name.startswith("out_")]
        inputs.sort(key=lambda name: name == "tables")  # last: a step that takes no new block sends what stands before
        self.on_device: dict[str, Tensor] = {}
        self._host_in, self._device_in, places = self._move(inputs)
        self._host_out, self._device_out, _ = self._move([name for name in self.columns if name.startswith("out_") and name not in LISTS])
        self._before_tables = places["tables"]
        self._rooms: dict[str, tuple[Tensor, Tensor]] = {}
        """of each list that was ever sent: bytes here that the device copies from, and bytes there"""

    def _move(self, names: list[str]) -> tuple[Tensor, Tensor, dict[str, int]]:
        """Put columns into one buffer here and one on the device."""
        places, end = {}, 0
        for name in names:
            places[name] = end
            end += -(-self.columns[name].nbytes // _ALIGN) * _ALIGN
        host, device = self._queue.host_buffer(end), take(self._queue.device, end, dtype=torch.uint8)
        for name, place in places.items():
            old = self.columns[name]
            raw = host[place : place + old.nbytes].numpy()
            self.columns[name] = raw.view(old.dtype).reshape(old.shape)
            self.columns[name][...] = old
            self.on_device[name] = device[place : place + old.nbytes].view(_TORCH[old.dtype]).view(old.shape)
        return host, device, places

    def pad(self, tokens: int, rows: int, items: int) -> None:
        """Fill the step up to so many tokens, logits rows and work items with some that do nothing."""
        T, R = self.num_tokens, self.num_rows
        for name, value in (("ids", 0), ("positions", 0), ("token_slot", -1)):
            self.columns[name][T:tokens] = value
        self.columns["hidden_row"][R:rows] = 0
        self.columns["items"][self.num_items : items] = 0

    def send(self) -> None:
        """To the device, within the queue's scope: one copy, unless rows have lists."""
        end = len(self._host_in) if self.tables_changed else self._before_tables
        self.tables_changed = False
        self._device_in[:end].copy_(self._host_in[:end], non_blocking=True)

    def send_list(self, name: str) -> Tensor:
        """One of LISTS, sent within the queue's scope, [entries] or [slots, words] int32; of adjustments [entries, 4], their fields' bits.

        The next call overwrites it; its copy must be done by then.
        """
        column = self.columns[name]
        if name == "adjust":
            used = column[: max(int(self["adjust_offset"][self.num_rows]), 1)].view(np.int32).reshape(-1, 4)
        elif name == "banned":
            used = column[: max(int(self["ban_offset"][self.num_rows]), 1)]
        else:
            used = column.view(np.int32)
        if name not in self._rooms or len(self._rooms[name][0]) < used.nbytes:
            size = used.nbytes * 5 // 4
            self._rooms[name] = self._queue.host_buffer(size), take(self._queue.device, size, dtype=torch.uint8)
            self.allowed_changed |= name == "allowed"
        host, there = (room[: used.nbytes] for room in self._rooms[name])
        if name != "allowed" or self.allowed_changed:
            host.numpy()[:] = used.reshape(-1).view(np.uint8)
            there.copy_(host, non_blocking=True)
            self.allowed_changed &= name != "allowed"
        return there.view(torch.int32).view(used.shape)

    def fetch(self) -> None:
        """Results to the host, within the queue's scope; they are there once the queue has been waited for."""
        self._host_out.copy_(self._device_out, non_blocking=True)
