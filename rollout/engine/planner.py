"""Which tokens each step feeds, and to whom it gives KV blocks.

There are no phases: every sequence has tokens, the first `num_computed` of which are in the KV cache, and each step feeds it more
of them; a row is read where a value is needed. Prefill, chunk, decode, prefix hit and resumption are all that one rule.

Why nothing livelocks: running sequences are kept in (priority, arrival) order, only the last is ever preempted, so the first always
moves on; and a request that would not fit into the pool alone is refused when it comes.
"""

from __future__ import annotations

import heapq
import logging
from bisect import insort
from collections import Counter

from ..errors import describe
from .block_manager import BlockManager
from .runner_info import RunnerInfo
from .sequence import Sequence
from .types import SlotInit, StepPlan

log = logging.getLogger(__name__)

MAX_FORCED_ROWS = 256
"""scored (not sampled) logits rows per step; a prefill that needs more is split"""

COUNTERS = (
    "steps", "fed_tokens", "generated_tokens", "prompt_tokens", "cached_tokens", "cut_prefills", "preemptions",
    "nonfinite", "faults", "aborted", "finished",
)  # fmt: skip


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.key


class Chunk:
    """What an entry of the plan in flight is, unless it is a plain decode."""

    __slots__ = ("children", "count", "draws", "first_row", "num_forced")

    def __init__(self, count: int, first_row: int, num_forced: int, draws: bool, children: list[Sequence]) -> None:
        self.count = count
        self.first_row = first_row
        """token index the first row gives values for"""
        self.num_forced = num_forced
        self.draws = draws
        self.children = children
        """samples that draw their first token from this entry's last hidden state too"""

    @property
    def num_rows(self) -> int:
        return self.num_forced + self.draws + len(self.children)


class Planner:
    """The sequences, their slots and blocks, and the next step's plan. `Scheduler` adds the way in and the way out."""

    def __init__(self, info: RunnerInfo) -> None:
        limits, cache = info.config.scheduler, info.config.cache
        self.blocks = BlockManager(info.num_blocks, info.block_tokens, prefix_cache=cache.prefix_cache)
        self.max_batch_tokens = limits.max_batch_tokens
        self.max_seqs = min(limits.max_num_seqs, limits.max_batch_tokens)
        self.running: list[Sequence] = []
        """in (priority, arrival, sample) order; all hold a slot"""
        self.num_waiting = 0
        """samples accepted and not running"""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        """a heap; holds the first sample of a request until its prompt is prefilled, then those that found no room"""
        self._num_dead = 0
        """entries of the heap that ended while they waited"""
        self._filling: Counter[bytes] = Counter()
        """how many running sequences are to fill the block of a digest"""
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._flight: list[Sequence] | None = None
        self._chunks: dict[int, Chunk] = {}
        self._row_room = 0
        self._faulted: list[tuple[Sequence, str]] = []
        """samples that could not be started, with the words of the exception; in no other list"""

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing is to be computed. An exception that concerns one sequence ends up in `_faulted`."""
        assert self._flight is None, "the last plan has no result yet"
        if not self.running and len(self._waiting) == self._num_dead:
            return None
        plan = StepPlan(step=self.counters["steps"])
        self._flight, self._chunks, self._row_room = [], {}, MAX_FORCED_ROWS
        prefills = self._plan_decodes(plan)
        for seq in prefills:
            if len(plan.token_ids) >= self.max_batch_tokens:
                break
            self._plan_chunk(seq, plan)
        self._plan_waiting(plan)
        if not plan.slots:
            assert self._faulted, "sequences wait, none runs, and none can start"
            self._flight = None
            return None
        self.counters["steps"] += 1
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """One token for every sequence that is decoding. Returns the running ones that are not."""
        assert self._flight is not None
        prefills, flight = [], self._flight
        slots, starts, token_ids = plan.slots, plan.starts, plan.token_ids
        for seq in self.running:  # `_grow` may cut its tail while we walk
            if not seq.decoding:
                prefills.append(seq)
                continue
            start = seq.num_computed
            if start == seq.writable_end and not self._grow(seq, plan):
                continue
            flight.append(seq)
            slots.append(seq.slot)
            starts.append(start)
            token_ids.append(seq.tokens[start])
        count = len(slots)
        plan.counts = [1] * count
        plan.row_entry = list(range(count))
        plan.row_offset = [0] * count
        plan.row_slot = slots.copy()
        plan.row_forced = [-1] * count
        return prefills

    def _grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Give `seq` a block of its own for its next position: new, or a copy of one it shares. False if it had to go itself."""
        blocks, table = self.blocks, seq.blocks
        index = seq.num_computed // blocks.block_tokens
        while index == len(table) or blocks.is_shared(table[index]):
            new = blocks.allocate(1)
            if new is None:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    return False
                continue
            plan.block_updates.append((seq.slot, index, new))
            if index == len(table):
                table.append(new[0])
            else:
                plan.copies.append((table[index], new[0]))
                blocks.release([table[index]])
                table[index] = new[0]
        seq.writable_end = (index + 1) * blocks.block_tokens
        return True

    def _plan_chunk(self, seq: Sequence, plan: StepPlan) -> None:
        """Feed `seq` as much as the step has room for, with a row wherever a token lacks its values."""
        assert self._flight is not None
        tokens, start = seq.tokens, seq.num_computed
        count = min(seq.num_to_feed - start, self.max_batch_tokens - len(plan.token_ids))
        first = max(seq.next_row, start + 1)
        row_room = self._row_room
        if min(start + count, len(tokens) - 1) - first >= row_room:
            count = first + row_room - 1 - start
        if count <= 0:
            return
        end = start + count
        self.counters["cut_prefills"] += end < seq.num_to_feed
        forced = tokens[first : end + 1]
        draws = end == len(tokens)
        self._row_room -= len(forced)
        entry, slot = len(plan.slots), seq.slot
        plan.slots.append(slot)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.token_ids += tokens[start:end]
        num_rows = len(forced) + draws
        plan.row_entry += [entry] * num_rows
        plan.row_offset += range(count - num_rows, count)
        plan.row_slot += [slot] * num_rows
        plan.row_forced += forced
        children: list[Sequence] = []
        if draws:
            plan.row_forced.append(-1)
            if seq.request.pending:
                children = self._fork(seq, plan)
                plan.row_entry += [entry] * len(children)
                plan.row_offset += [count - 1] * len(children)
                plan.row_slot += [child.slot for child in children]
                plan.row_forced += [-1] * len(children)
        self._flight.append(seq)
        self._chunks[entry] = Chunk(count, first, len(forced), draws, children)

    def _fork(self, seq: Sequence, plan: StepPlan) -> list[Sequence]:
        """Start siblings on the blocks of `seq`, whose common prefix is complete after this step; the rest queue up by themselves."""
        room = min(self.max_seqs - len(self.running), self.blocks.num_free - len(self.running))
        children: list[Sequence] = []
        request = seq.request
        seq.writable_end = len(seq.tokens)
        while request.pending:
            child = request.next_sequence()
            if len(children) >= room:
                self._enqueue(child)
                continue
            try:
                child.start()
                init = child.slot_init(self._free_slots[-1])
            except Exception as error:
                self._set_aside(child, error)
                continue
            children.append(child)
            child.blocks = seq.blocks.copy()
            self.blocks.share(child.blocks)
            child.digests, child.epoch = seq.digests.copy(), seq.epoch
            child.num_computed = child.writable_end = len(child.tokens)
            child.num_registered = child.num_computed // self.blocks.block_tokens
            child.cached_tokens, child.was_admitted = seq.cached_tokens, True
            self._enter(child, init, plan)
        return children

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit from the front of the queue while slots, blocks and tokens last. Nobody passes one that does not fit.

        Who wants a block that somebody is just prefilling is put off until it is cached; a slot and a block are held for each.
        """
        waiting = self._waiting
        put_off: list[tuple[tuple[int, int, int], Sequence]] = []
        while waiting and len(plan.token_ids) < self.max_batch_tokens and self.blocks.num_free:
            held = len(self.running) + len(put_off)
            if held >= self.max_seqs:
                break
            seq = waiting[0][1]
            if seq.end is not None:
                heapq.heappop(waiting)
                self._num_dead -= 1
                continue
            try:
                hits, soon = self._look_up(seq)
                init = None if soon else seq.slot_init(self._free_slots[-1])
            except Exception as error:
                heapq.heappop(waiting)
                self._set_aside(seq, error)
                continue
            if init is None:
                put_off.append(heapq.heappop(waiting))
                continue
            # One block per running sequence stays free, so that who comes in does not push somebody out at once.
            if not self._allocate(seq, hits, headroom=held):
                break
            heapq.heappop(waiting)
            self._enter(seq, init, plan)
            self._plan_chunk(seq, plan)
        for entry in put_off:
            heapq.heappush(waiting, entry)

    def _look_up(self, seq: Sequence) -> tuple[list[int], bool]:
        """Cached blocks for the prefix of `seq`, and whether the next one is being prefilled."""
        blocks = self.blocks
        seq.start()
        if seq.epoch != blocks.epoch:
            seq.epoch = blocks.epoch
            seq.digests.clear()
        if not blocks.prefix_cache:
            return [], False
        blocks.extend_digests(seq.digests, seq.tokens, len(seq.tokens) // blocks.block_tokens, seq.request.salt)
        limit = (seq.next_row - 1) // blocks.block_tokens
        hits = blocks.match(seq.digests, limit)
        return hits, len(hits) < limit and seq.digests[len(hits)] in self._filling

    def _allocate(self, seq: Sequence, hits: list[int], headroom: int) -> bool:
        """Blocks for all tokens that `seq` has; False (nothing changed) if they are not to be had now."""
        blocks = self.blocks
        needed = -(-seq.num_to_feed // blocks.block_tokens)
        table = blocks.take(hits, needed - len(hits), headroom)
        if table is None:
            return False
        seq.blocks = table
        seq.num_registered = len(hits)
        seq.num_computed = len(hits) * blocks.block_tokens
        seq.writable_end = needed * blocks.block_tokens
        self._filling.update(seq.digests[len(hits) : seq.num_to_feed // blocks.block_tokens])
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.cached_tokens = min(seq.num_computed, len(seq.request.prompt))
            self.counters["cached_tokens"] += seq.cached_tokens
        return True

    # Moves between waiting and running

    def _enqueue(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.key, seq))

    def _set_aside(self, seq: Sequence, error: Exception) -> None:
        """Waiting to faulted: a sample that cannot be started."""
        log.error("request %r, sample %d could not be started", seq.request.id, seq.index, exc_info=error)
        self.num_waiting -= 1
        self._faulted.append((seq, describe(error)))

    def _enter(self, seq: Sequence, init: SlotInit, plan: StepPlan) -> None:
        """Waiting to running: a slot, its sampling columns and its block table."""
        seq.slot = self._free_slots.pop()
        assert seq.slot == init.slot
        self.num_waiting -= 1
        insort(self.running, seq, key=_order)
        plan.new_slots.append(init)
        plan.block_updates.append((seq.slot, 0, seq.blocks.copy()))

    def _leave(self, seq: Sequence) -> None:
        """Give slot and blocks back; the caller takes it out of `running`."""
        self._free_slots.append(seq.slot)
        seq.slot = -1
        self.blocks.release(seq.blocks)
        seq.blocks = []
        self._settle(seq, len(seq.digests))
        seq.num_computed = seq.writable_end = seq.num_registered = 0
        seq.decoding = False

    def _settle(self, seq: Sequence, end_block: int) -> None:
        """Blocks of `seq` below `end_block` are not being prefilled any more: done, or given up."""
        filling = self._filling
        for digest in seq.digests[seq.num_registered : end_block]:
            left = filling[digest] - 1
            if left > 0:
                filling[digest] = left
            else:
                filling.pop(digest, None)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the front of its kind in the queue, tokens kept, KV freed (full blocks stay findable while nobody needs them)."""
        assert seq is self.running[-1]
        self.running.pop()
        self._leave(seq)
        seq.columns.version = -1
        self.num_waiting += 1
        self.counters["preemptions"] += 1
        self._enqueue(seq)
