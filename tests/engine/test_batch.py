"""The arrays of a step, from the plans of a real scheduler: everything covered once, and nothing shared that is not the same."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_runner import VOCAB, FakeMatcher, FakeRunner, make_info
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.kernels.step import StepArrays, StepLimits
from rollsync.rollout.engine import batch
from rollsync.rollout.engine.batch import ITEM_ROWS, KEY_BLOCK, LONG_KEYS, BatchBuilder, Slots
from rollsync.rollout.engine.types import SlotInit, StepPlan

SLOT_COLUMNS = ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index")


class Builder:
    """A BatchBuilder with arrays of its own, and what a plan says, one token after another."""

    def __init__(self, *, block_tokens: int, max_tokens: int = 64, slots: int = 16, rep: int = 3, threads: int = 2) -> None:
        rows, table_blocks = 256 + slots, 256 // block_tokens
        self.arrays = StepArrays(StepLimits(tokens=max_tokens, rows=rows, slots=slots, table_blocks=table_blocks, banned=64 * rows))
        self.slots = Slots(self.arrays)
        self.block_tokens, self.rep = block_tokens, rep
        self.batch = BatchBuilder(self.arrays, self.slots, block_tokens=block_tokens, heads_per_kv=rep, kv_heads=3, threads=threads)

    def build(self, plan: StepPlan) -> SimpleNamespace:
        if plan.step % 3 == 0:  # a step built from nothing owes nothing to what an earlier one left; others may go on from the last
            self.batch._decoded = None
            for name, column in self.arrays.columns.items():
                if name not in ("tables", "first_key", "ban_offset", "adjust_offset", "adjust", "allowed"):
                    column[...] = 77
        self.slots.apply(plan)
        self.batch.build(plan)
        a = self.arrays
        T, R = a.num_tokens, a.num_rows
        columns = {name: a[name][:T].tolist() for name in ("ids", "positions", "num_keys", "token_slot")}
        columns |= {name: a[name][:R].tolist() for name in ("hidden_row", "row_position", "forced", "want", *SLOT_COLUMNS)}
        return SimpleNamespace(
            T=T, R=R, runs=a["runs"][: a.num_runs].tolist(), items=a["items"][: a.num_items].tolist(),
            copies=[tuple(c) for c in a["copies"][: a.num_copies].tolist()], **columns,
        )  # fmt: skip

    def table(self, slot: int) -> list[int]:
        row: list[int] = self.arrays["tables"][slot].tolist()
        return row


def fed(plan: StepPlan) -> dict[tuple[int, int], int]:
    """Token id by (slot, position)."""
    ids = iter(plan.token_ids)
    return {(s, p): next(ids) for s, start, n in zip(plan.slots, plan.starts, plan.counts, strict=True) for p in range(start, start + n)}


def check(builder: Builder, plan: StepPlan, step: SimpleNamespace) -> None:
    cells = list(zip(step.token_slot, step.positions, strict=True))
    assert dict(zip(cells, step.ids, strict=True)) == fed(plan) and len(cells) == len(plan.token_ids) == step.T
    assert step.num_keys == [p + 1 for p in step.positions]
    assert step.copies == plan.copies
    check_rows(builder, plan, step, cells)
    check_runs(builder, step, cells)
    check_items(builder, step, cells)


def check_rows(builder: Builder, plan: StepPlan, step: SimpleNamespace, cells: list[tuple[int, int]]) -> None:
    """Rows come in the plan's order, whatever the order of entries, and read the token the plan means."""
    assert len(plan.row_entry) == step.R
    for r, (entry, offset, slot) in enumerate(zip(plan.row_entry, plan.row_offset, plan.row_slot, strict=True)):
        at = (plan.slots[entry], plan.starts[entry] + offset)
        assert cells[step.hidden_row[r]] == at
        assert step.row_position[r] == at[1] + 1 and step.forced[r] == plan.row_forced[r]
        for name in SLOT_COLUMNS:
            assert getattr(step, name)[r] == getattr(builder.slots, name)[slot]
        banned = builder.slots.banned[slot] if at[1] + 1 < builder.slots.banned_until[slot] else ()
        assert builder.arrays.banned_of(r) == list(banned)


def check_runs(builder: Builder, step: SimpleNamespace, cells: list[tuple[int, int]]) -> None:
    """Runs tile the tokens in order; each lies in one page, and in one of the kernels' units of it."""
    size = builder.block_tokens
    unit = min(KEY_BLOCK, size)
    assert [run[0] for run in step.runs] == [0, *np.cumsum([run[1] for run in step.runs])[:-1].tolist()]
    assert sum(run[1] for run in step.runs) == step.T
    for first, count, block, offset in step.runs:
        assert count >= 1 and offset // unit == (offset + count - 1) // unit and offset + count <= size
        for i in range(count):
            slot, position = cells[first + i]
            assert (builder.table(slot)[position // size], position % size) == (block, offset + i)


def check_items(builder: Builder, step: SimpleNamespace, cells: list[tuple[int, int]]) -> None:
    """Items tile the tokens; the keys that all tokens of one share are the same cells, and all tokens have their pages."""
    size, rows = builder.block_tokens, 0
    covered = [t for first, count, _, _ in step.items for t in range(first, first + count)]
    assert sorted(covered) == list(range(step.T)), "every token is in exactly one item"
    for first, count, shared, most in step.items:
        tokens = cells[first : first + count]
        assert most == max(position + 1 for _, position in tokens)
        rows = max(rows, count * builder.rep)
        tables = [builder.table(slot) for slot, _ in tokens]
        one_sequence = len({slot for slot, _ in tokens}) == 1
        if one_sequence:  # its keys are all its own: walked as shared, or, a lone token, one by one
            assert shared in (-(-most // KEY_BLOCK), 0 if count == 1 else None)
            assert [p for _, p in tokens] == list(range(tokens[0][1], tokens[0][1] + count))
            continue
        assert len({slot for slot, _ in tokens}) == count, "an item is a chunk of one sequence, or one token of each of several"
        keys = shared * KEY_BLOCK
        for (_, position), table in zip(tokens, tables, strict=True):
            assert keys <= position + 1, "the shared keys are keys of every token"
            assert [(table[j // size], j % size) for j in range(keys)] == [(tables[0][j // size], j % size) for j in range(keys)]
    longest = max(p + 1 for _, p in cells)
    assert rows <= max(ITEM_ROWS if longest <= LONG_KEYS else 16, builder.rep)


def random_request(rng: random.Random, i: int, openings: list[list[int]]) -> RolloutRequest:
    opening = rng.choice(openings)
    prompt = opening[: rng.choice([len(opening), rng.randrange(len(opening))])]
    prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
    forced = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(7))) if rng.random() < 0.3 else ()
    params = SamplingParams(
        n=rng.choice([1, 2, 9]), max_tokens=rng.choice([1, 8, 30]), seed=i, temperature=rng.choice([0.0, 0.5, 1.0]),
        top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 5]), min_tokens=rng.choice([0, 1]),
    )  # fmt: skip
    include = tuple(name for name in ("model_logprobs", "entropy", "prompt_logprobs") if rng.random() < 0.2)
    return RolloutRequest(
        request_id=f"r{i}", prompt_token_ids=tuple(prompt), params=params, forced_token_ids=forced, include=include
    )


@pytest.mark.parametrize("block_tokens", [4, 16, 32, 64])
@pytest.mark.parametrize(("max_batch_tokens", "num_tokens"), [(7, 900), (48, 1100), (400, 3000)])
def test_random_walks_of_a_scheduler(block_tokens: int, max_batch_tokens: int, num_tokens: int) -> None:
    rng = random.Random(block_tokens * 1000 + max_batch_tokens)
    info = make_info(
        block_tokens=block_tokens, num_blocks=num_tokens // block_tokens, max_batch_tokens=max_batch_tokens, max_num_seqs=40,
        max_model_len=250,
    )  # fmt: skip
    builder = Builder(
        block_tokens=block_tokens, max_tokens=max_batch_tokens, slots=40, rep=rng.choice([1, 3, 7]), threads=rng.choice([1, 2, 8])
    )
    shared_items = 0

    def execute(plan: StepPlan) -> None:
        nonlocal shared_items
        step = builder.build(plan)
        check(builder, plan, step)
        several = [first for first, count, shared, _ in step.items if count > 1 and shared > 0]
        shared_items += sum(step.token_slot[first] != step.token_slot[first + 1] for first in several)

    engine = Engine("fake", runner=FakeRunner(info, on_execute=execute), stop_matcher=FakeMatcher)
    openings = [[rng.randrange(VOCAB) for _ in range(length)] for length in (20, 100, 160)]
    for i in range(40):
        engine.add_request(random_request(rng, i, openings))
        for _ in range(rng.randrange(5)):
            engine.step()
    while engine.has_work:
        engine.step()
    assert engine.stats()["finished"] > 80
    if max_batch_tokens > 7:
        assert shared_items > 20, "the walk met no sequences that share keys"


def decode_plan(tables: list[list[int]], lengths: list[int]) -> StepPlan:
    """A plan that decodes one token of each sequence; `lengths` are the keys each has before it."""
    num = len(tables)
    return StepPlan(
        step=0,
        new_slots=[
            SlotInit(slot=i, seed=i, sample_index=i, temperature=1.0 + i, top_p=0.5, top_k=i, min_p=0, banned_ids=(i, 90), banned_until=50)
            for i in range(num)
        ],
        block_updates=[(i, 0, table) for i, table in enumerate(tables)],
        slots=list(range(num)), starts=lengths, counts=[1] * num, token_ids=[10 + i for i in range(num)],
        row_entry=list(range(num)), row_offset=[0] * num, row_slot=list(range(num)), row_forced=[-1] * num,
    )  # fmt: skip


def test_groups_that_lie_apart_are_walked_together() -> None:
    builder = Builder(block_tokens=32, rep=3, threads=1)
    group_a, group_b = [1, 2, 3], [4, 5, 6]
    tables = [[*(group_b if i % 2 else group_a), 10 + i] for i in range(16)]
    plan = decode_plan(tables, [100 + i for i in range(16)])
    step = builder.build(plan)
    check(builder, plan, step)
    assert sorted((count, shared) for _, count, shared, _ in step.items) == [(8, 3), (8, 3)]


def test_only_full_common_blocks_are_shared() -> None:
    builder = Builder(block_tokens=32, threads=1)
    plan = decode_plan([[1, 2, 3, 10 + i] for i in range(16)], [63] * 16)  # the second block is still being written
    step = builder.build(plan)
    check(builder, plan, step)
    assert {shared for _, count, shared, _ in step.items if count > 1} == {1}
    plan = decode_plan([[i, 50, 51] for i in range(16)], [96] * 16)  # equal blocks behind a different one
    step = builder.build(plan)
    check(builder, plan, step)
    assert all(shared == 0 and count == 1 for _, count, shared, _ in step.items)


def test_a_chunk_of_one_token_is_walked_as_a_decode() -> None:
    builder = Builder(block_tokens=4)
    plan = decode_plan([[1, 2, 3], [4, 5, 6]], [0, 0])
    plan.counts, plan.token_ids = [6, 1], [10, 11, 12, 13, 14, 15, 20]
    plan.row_offset = [5, 0]
    step = builder.build(plan)
    check(builder, plan, step)
    assert step.token_slot == [1, 0, 0, 0, 0, 0, 0] and step.hidden_row == [6, 0]


def test_order_never_changes_which_row_is_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    tables = [[rng.randrange(3), rng.randrange(3), 10 + i] for i in range(12)]
    plan = decode_plan(tables, [rng.randrange(64, 90) for _ in range(12)])
    want: Any = None
    same, reverse = (lambda starts, *_: np.arange(len(starts))), (lambda starts, *_: np.arange(len(starts))[::-1])
    for order in (batch._entry_order, same, reverse):
        monkeypatch.setattr(batch, "_entry_order", order)
        builder = Builder(block_tokens=32)
        step = builder.build(plan)
        check(builder, plan, step)
        rows = [(step.token_slot[h], step.ids[h], step.positions[h]) for h in step.hidden_row]
        rows = [(*row, *(getattr(step, name)[r] for name in SLOT_COLUMNS)) for r, row in enumerate(rows)]
        want = want or rows
        assert rows == want


def test_wants_and_bans() -> None:
    builder = Builder(block_tokens=4)
    plan = decode_plan([[1] * 20, [2] * 20, [3] * 20], [48, 49, 40])
    plan.new_slots = [
        SlotInit(
            slot=i, seed=1, sample_index=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, want_model_logprobs=i > 0, want_entropy=i > 1,
            banned_ids=(5, 6) if i != 2 else (), banned_until=50 if i != 2 else 0,
        )
        for i in range(3)
    ]  # fmt: skip
    step = builder.build(plan)
    check(builder, plan, step)
    assert step.want == [0, 1, 3]
    assert [builder.arrays.banned_of(r) for r in range(3)] == [[5, 6], [], []], "the token drawn at 49 is still below 50"


def test_more_bans_than_the_arrays_hold() -> None:
    builder = Builder(block_tokens=4, slots=2)
    plan = decode_plan([[1] * 20], [10])
    plan.new_slots = [replace(plan.new_slots[0], banned_ids=(1,) * 20000)]
    with pytest.raises(ValueError, match="bans 20000 ids"):
        builder.build(plan)
