"""StepPlan -> the arrays of a step. Pure: the same plan and slots give the same arrays.

E entries (sequences fed this step), T tokens, R logits rows.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.step import StepArrays, allowed_words
from ..errors import describe
from .adjust import Adjustments
from .types import SlotInit, StepPlan

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

KEY_BLOCK = 32
"""keys the attention kernel takes at once, whatever the size of a page"""
ITEM_ROWS = 48
"""query rows of one attention work item: three tiles of 16"""
MASKS_KEPT = 8
"""of lists of allowed ids"""
LONG_KEYS = 4096
"""beyond this an item takes one tile, so that its scores stay in the cache"""


class Slots:
    """What the runner keeps per slot while a sequence runs: its block table and how to sample its rows.

    `arrays` hold the tables and the ids that slots allow; both are written in place.
    """

    def __init__(self, arrays: StepArrays) -> None:
        num_slots = arrays.limits.slots
        self._arrays = arrays
        self.tables = arrays["tables"]
        self.temperature = np.ones(num_slots, np.float64)
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.sample_index = np.zeros(num_slots, np.uint32)
        self.want = np.zeros(num_slots, np.uint8)
        self.banned_until = np.zeros(num_slots, np.int64)
        self.banned: list[tuple[int, ...]] = [()] * num_slots
        self.prompt_tokens = np.zeros(num_slots, np.int64)
        self.top_n = np.zeros(num_slots, np.uint8)
        self.restricted = np.zeros(num_slots, np.bool_)
        """whether the slot's row of `allowed` counts"""
        self._masks: dict[int, tuple[tuple[int, ...], Array]] = {}
        """of the last lists of allowed ids, by identity: samples of a call share theirs"""
        self.adjusting: dict[int, Adjustments] = {}
        self._last_bias: Adjustments | None = None
        self.special = np.zeros(num_slots, np.bool_)
        """whether any of the last three applies, or a mask is asked for"""
        self.faults: dict[int, str] = {}
        """slots whose request met an exception, with its words; their rows are drawn greedily and mean nothing"""

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's new slots and block tables."""
        for init in plan.new_slots:
            self.faults.pop(init.slot, None)
            try:
                self._init(init)
            except Exception as error:  # that request's, so it ends alone
                self.fail(init.slot, error)
        for slot, first, blocks in plan.block_updates:
            self.tables[slot, first : first + len(blocks)] = blocks
            self._arrays.tables_changed = True

    def _init(self, init: SlotInit) -> None:
        s = init.slot
        self.temperature[s], self.top_p[s], self.min_p[s] = init.temperature, init.top_p, init.min_p
        self.top_k[s], self.seed[s], self.sample_index[s] = init.top_k, init.seed, init.sample_index
        self.want[s] = init.want_model_logprobs | init.want_entropy << 1 | init.want_mask << 2
        if init.want_mask:
            self._arrays.reserve_masks()
        self.banned[s] = tuple(map(operator.index, init.banned_ids))
        self.banned_until[s] = init.banned_until if init.banned_ids else 0
        self.prompt_tokens[s], self.top_n[s] = init.prompt_tokens, init.top_logprobs
        self.adjusting.pop(s, None)
        if Adjustments.wanted(init):
            last = self._last_bias
            if last is None or not last.serves(init):  # the samples of a group come one after another, with one bias
                last = self._last_bias = Adjustments(init)
            self.adjusting[s] = last
        self.restricted[s] = init.allowed_token_ids is not None
        if init.allowed_token_ids is not None:
            words = self._mask(init.allowed_token_ids)
            self._arrays.reserve_allowed(len(words))
            row = self._arrays["allowed"][s]
            row[:] = 0
            row[: len(words)] = words
            self._arrays.allowed_changed = True
        self.special[s] = s in self.adjusting or self.restricted[s] or init.top_logprobs > 0 or init.want_mask

    def _mask(self, ids: tuple[int, ...]) -> Array:
        if id(ids) not in self._masks:
            if len(self._masks) == MASKS_KEPT:
                del self._masks[next(iter(self._masks))]
            self._masks[id(ids)] = ids, allowed_words(ids)  # with the list, so that its id stays taken
        return self._masks[id(ids)][1]

    def fail(self, slot: int, error: Exception) -> None:
        """The request in a slot met an exception of its own: until the scheduler ends it, columns that any row can be drawn with."""
        log.error("the request in slot %d failed", slot, exc_info=error)
        self.faults[slot] = describe(error)
        self.temperature[slot], self.top_p[slot], self.min_p[slot], self.top_k[slot] = 0.0, 1.0, 0.0, 0
        self.want[slot], self.banned[slot], self.banned_until[slot] = 0, (), 0
        self.top_n[slot], self.restricted[slot], self.special[slot] = 0, False, False
        self.adjusting.pop(slot, None)

    def faulty_rows(self, row_slot: list[int]) -> list[tuple[int, str]]:
        """(row, words) of the rows of slots that failed."""
        faults = self.faults
        return [(row, faults[slot]) for row, slot in enumerate(row_slot) if slot in faults] if faults else []


def _entry_order(starts: Array, counts: Array, slots: Array, tables: Array, block_tokens: int) -> Array:
    """Entries so that decoding sequences with common leading blocks stand side by side, chunks last. Never changes a bit."""
    single = counts == 1
    if single.sum() < 2:
        return np.argsort(~single, kind="stable")  # a chunk of one token counts as a decode, and need not be planned first
    width = int(starts[single].max()) // block_tokens + 1
    rows = tables[slots, :width]
    keys = [(not one, row) for one, row in zip(single.tolist(), map(bytes, rows), strict=True)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__))


def _shared_keys(starts: Array, slots: Array, tables: Array, block_tokens: int) -> list[int]:
    """Leading keys, in whole key blocks, that each sequence has in common with its successor."""
    full = starts // block_tokens  # blocks that are full before this step's token
    width = int(full.max()) if len(full) else 0
    rows = tables[slots, :width]
    same = (rows[:-1] == rows[1:]) & (np.arange(width) < np.minimum(full[:-1], full[1:])[:, None])
    shared: list[int] = (np.minimum.accumulate(same, axis=1).sum(axis=1) * block_tokens // KEY_BLOCK).tolist()
    return shared


def _decode_items(first: int, starts: Array, shared: list[int], max_tokens: int, items: list[tuple[int, int, int, int]]) -> None:
    """Cut neighbouring decodes into groups that share most of their keys."""
    keys = (starts + 1).tolist()
    begin, common = 0, 0
    for i in range(1, len(keys) + 1):
        if i < len(keys):
            joint = shared[i - 1] if i - begin == 1 else min(common, shared[i - 1])
            if joint > 0 and i - begin < max_tokens and joint * 4 >= common * 3:
                common = joint
                continue
        items.append((first + begin, i - begin, common if i - begin > 1 else 0, max(keys[begin:i])))
        begin, common = i, 0


class BatchBuilder:
    """Fills `arrays` from plans.

    Args:
        arrays: written in place.
        slots: persistent rows; `slots.tables` is `arrays["tables"]`.
        block_tokens: tokens per KV block.
        heads_per_kv: query heads that share a KV head.
        threads: of a step; few sequences are cut finer, so that all have work.
    """

    def __init__(self, arrays: StepArrays, slots: Slots, *, block_tokens: int, heads_per_kv: int, kv_heads: int, threads: int) -> None:
        self._arrays, self._slots = arrays, slots
        self._block_tokens, self._kv_heads, self._threads = block_tokens, kv_heads, threads
        self._rep = heads_per_kv
        self._decoded: list[int] | None = None
        """slots of the last step, in the plan's order, if all it did was draw one token for each"""
        self._order: Array = np.zeros(0, np.int64)
        self._adjusts = False
        """whether a row of the last step has adjustments that change as its tokens come"""

    def build(self, plan: StepPlan) -> None:
        """Write one step. The plan's slots must have been applied."""
        a = self._arrays
        a.num_copies = len(plan.copies)
        if plan.copies:
            a["copies"][: a.num_copies] = plan.copies
        if self._decoded is not None and not plan.new_slots and plan.slots == self._decoded and self._only_draws(plan):
            self._advance(plan)
        else:
            self._build(plan)

    @staticmethod
    def _only_draws(plan: StepPlan) -> bool:
        return len(plan.token_ids) == len(plan.slots) and plan.row_slot == plan.slots and max(plan.row_forced) < 0

    def _advance(self, plan: StepPlan) -> None:
        """The last step again, one token later: who shares what, the order and the sampling columns stand as they are."""
        a, columns, T = self._arrays, self._arrays.columns, len(plan.slots)
        starts = np.array(plan.starts, np.int32)
        columns["row_position"][:T] = starts + 1
        starts = starts[self._order]
        columns["ids"][:T] = np.array(plan.token_ids, np.int32)[self._order]
        columns["positions"][:T] = starts
        keys = columns["num_keys"][:T]
        np.add(starts, 1, out=keys)
        if a.grouped:
            runs, items = a["runs"][:T], a["items"][: a.num_items]
            runs[:, 2] = self._slots.tables[columns["token_slot"][:T], starts // self._block_tokens]
            runs[:, 3] = starts % self._block_tokens
            items[:, 3] = np.maximum.reduceat(keys, items[:, 0])
        if self._adjusts:
            self._adjust(plan, columns["row_position"][:T].tolist())

    def _build(self, plan: StepPlan) -> None:
        a, columns = self._arrays, self._arrays.columns
        slots, starts = np.array(plan.slots, np.int32), np.array(plan.starts, np.int32)
        counts = np.array(plan.counts, np.int32)
        tables = self._slots.tables
        order = _entry_order(starts, counts, slots, tables, self._block_tokens) if a.grouped else np.arange(len(slots))
        first_of_plan = np.cumsum(counts) - counts
        slots, starts, counts = slots[order], starts[order], counts[order]
        first = np.cumsum(counts) - counts
        T = a.num_tokens = int(counts.sum())
        within = np.arange(T, dtype=np.int32) - np.repeat(first, counts)
        positions = np.repeat(starts, counts) + within
        columns["ids"][:T] = np.array(plan.token_ids, np.int32)[np.repeat(first_of_plan[order], counts) + within]
        columns["positions"][:T] = positions
        columns["num_keys"][:T] = positions + 1
        columns["token_slot"][:T] = np.repeat(slots, counts)
        if a.grouped:
            self._runs(positions, within, columns["token_slot"][:T])
            self._items(starts, counts, slots, first)
        entry_first = np.empty_like(first)
        entry_first[order] = first
        banning = self._rows(plan, entry_first)
        self._decoded = plan.slots.copy() if not banning and len(plan.row_slot) and self._only_draws(plan) else None
        self._order = order

    def _runs(self, positions: Array, within: Array, token_slot: Array) -> None:
        unit = min(KEY_BLOCK, self._block_tokens)
        first = np.flatnonzero((within == 0) | (positions % unit == 0))
        n = self._arrays.num_runs = len(first)
        runs = self._arrays["runs"][:n]
        at = positions[first]
        runs[:, 0] = first
        runs[:, 1] = np.diff(first, append=len(positions))
        runs[:, 2] = self._slots.tables[token_slot[first], at // self._block_tokens]
        runs[:, 3] = at % self._block_tokens

    def _items(self, starts: Array, counts: Array, slots: Array, first: Array) -> None:
        items: list[tuple[int, int, int, int]] = []
        num_decodes = int((counts == 1).sum())  # they come first
        longest = int((starts + counts).max())
        max_tokens = max(1, (ITEM_ROWS if longest <= LONG_KEYS else 16) // self._rep)
        if num_decodes:
            if len(counts) == num_decodes and num_decodes * self._kv_heads < 4 * self._threads * max_tokens:
                max_tokens = max(1, num_decodes * self._kv_heads // (4 * self._threads))
            shared = _shared_keys(starts[:num_decodes], slots[:num_decodes], self._slots.tables, self._block_tokens)
            _decode_items(0, starts[:num_decodes], shared, max_tokens, items)
        for start, count, t0 in zip(
            starts[num_decodes:].tolist(), counts[num_decodes:].tolist(), first[num_decodes:].tolist(), strict=True
        ):
            for i in range(0, count, max_tokens):
                n = min(max_tokens, count - i)
                keys = start + i + n
                items.append((t0 + i, n, -(-keys // KEY_BLOCK), keys))
        self._arrays.num_items = len(items)
        self._arrays["items"][: len(items)] = items

    def _rows(self, plan: StepPlan, entry_first: Array) -> bool:
        """The logits rows' columns; whether any of them bans ids."""
        a, columns, s = self._arrays, self._arrays.columns, self._slots
        R = a.num_rows = len(plan.row_entry)
        if R == 0:
            return False
        entry, offset = np.array(plan.row_entry), np.array(plan.row_offset)
        slot = np.array(plan.row_slot)
        columns["hidden_row"][:R] = entry_first[entry] + offset
        position = np.array(plan.starts)[entry] + offset + 1
        columns["row_position"][:R] = position
        columns["forced"][:R] = plan.row_forced
        for name in ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "want"):
            columns[name][:R] = getattr(s, name)[slot]
        self._changes(plan, slot, position)
        bans = position < s.banned_until[slot]
        if not bans.any():
            columns["ban_offset"][: R + 1] = 0
            return False
        lists = [s.banned[i] if ban else () for i, ban in zip(slot.tolist(), bans.tolist(), strict=True)]
        columns["ban_offset"][1 : R + 1] = np.cumsum([len(ids) for ids in lists])
        flat = [i for ids in lists for i in ids]
        if len(flat) > len(columns["banned"]):
            raise ValueError(f"a step bans {len(flat)} ids; the arrays hold {len(columns['banned'])}")
        columns["banned"][: len(flat)] = flat
        return True

    def _changes(self, plan: StepPlan, slot: Array, position: Array) -> None:
        """What rows change about their logits, and whether they report a mask or more than one token. Rows within a prompt do neither."""
        columns, s, R = self._arrays.columns, self._slots, len(slot)
        self._adjusts = False
        if not s.special[slot].any():
            columns["top_n"][:R], columns["allowed_row"][:R], columns["adjust_offset"][: R + 1] = 0, -1, 0
            return
        output = position >= s.prompt_tokens[slot]
        columns["top_n"][:R] = np.where(output, s.top_n[slot], 0)
        columns["want"][:R] &= np.where(output, 7, 3).astype(np.uint8)
        columns["allowed_row"][:R] = np.where(output & s.restricted[slot], slot, -1)
        found = [s.adjusting[i] for i in plan.row_slot if i in s.adjusting]
        self._adjusts = any(one.follows for one in found)
        if found:
            self._adjust(plan, position.tolist())
        else:
            columns["adjust_offset"][: R + 1] = 0

    def _adjust(self, plan: StepPlan, positions: list[int]) -> None:
        """Rows' lists of changed logits, brought up to what this step feeds."""
        a, adjusting = self._arrays, self._slots.adjusting
        first = 0
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            found = adjusting.get(slot)
            if found is not None and found.follows:
                try:
                    found.feed(start, plan.token_ids[first : first + count])
                except Exception as error:
                    self._slots.fail(slot, error)
            first += count
        offsets = [0]
        for slot, position in zip(plan.row_slot, positions, strict=True):
            end, found = offsets[-1], adjusting.get(slot)
            if found is not None and position >= found.first_position:
                try:
                    end = a.put_adjust(end, found.at(position))
                except Exception as error:
                    self._slots.fail(slot, error)
            offsets.append(end)
        a["adjust_offset"][: len(offsets)] = offsets
