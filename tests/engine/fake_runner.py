"""A runner without a model: its KV cache holds token ids, its logits are a hash of what a sequence's block table leads to.

Anything wrong with a table, a copy, a stale prefix or a position changes tokens; a write into a block that another table also
reads as its own past is an error at once. `oracle` computes the same from the plain list of tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rollsync.rollout.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from rollsync.rollout.engine.runner_info import RunnerInfo
from rollsync.rollout.engine.types import RolloutRequest, SampleOutput, SlotInit, StepPlan, StepResult

VOCAB, EMBED, EOS = 97, 101, (3, 4)
EMPTY = -1


def make_info(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_model_len: int = 64,
    max_batch_tokens: int = 64,
    max_num_seqs: int = 16,
    max_waiting: int = 65536,
    prefix_cache: bool = True,
    seed: int | None = 0,
    eos: tuple[int, ...] = EOS,
) -> RunnerInfo:
    config = EngineConfig(
        model="fake",
        max_model_len=max_model_len,
        seed=seed,
        cache=CacheConfig(block_tokens=block_tokens, num_blocks=num_blocks, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, max_waiting=max_waiting),
    )
    return RunnerInfo(
        model="fake", num_blocks=num_blocks, block_tokens=block_tokens, max_model_len=max_model_len, vocab_size=VOCAB, embed_size=EMBED,
        eos_token_ids=eos, dtype="float32", kernels="fake", weight_bytes=0, kv_bytes=0, threads=1, config=config,
    )  # fmt: skip


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _unit(*parts: object) -> float:
    """In (-1, 0)."""
    return -((_hash(*parts) >> 12) + 1) / ((1 << 52) + 2)


@dataclass(kw_only=True)
class Row:
    """What the fake model says behind a prefix."""

    token: int
    logprob: float
    temperature: float
    model: float
    entropy: float


def read_row(prefix: list[int], init: SlotInit, forced: int, weights: int) -> Row:
    """The token at position len(prefix): a pure function of weights, prefix, sampling columns and position."""
    position = len(prefix)
    state = _hash(weights, prefix)
    token = forced
    if forced < 0:
        banned = set(init.banned_ids) if position < init.banned_until else set()
        attempt = 0
        while True:
            token = _hash(state, init.seed, init.sample_index, position, attempt) % VOCAB
            if token not in banned:
                break
            attempt += 1
    return Row(
        token=token,
        logprob=_unit("lp", state, token, init.temperature),
        temperature=_unit("tlp", state, token, init.temperature),
        model=_unit("mlp", state, token),
        entropy=_unit("h", state),
    )


@dataclass
class FakeRunner:
    """Executes plans on token ids and checks them."""

    info: RunnerInfo = field(default_factory=make_info)
    version: int = 0
    weights: int = 0
    nonfinite: Callable[[list[int]], bool] = lambda prefix: False
    """whether logits behind a prefix are broken"""
    faults: Callable[[list[int], SlotInit], str | None] = lambda prefix, init: None
    """the words of a fault of a row, given what it reads and its slot"""
    max_rows: int = 256 + 4096
    plans: list[StepPlan] = field(default_factory=list)
    closed: bool = False
    on_execute: Callable[[StepPlan], None] = lambda plan: None

    def __post_init__(self) -> None:
        self.kv = [[EMPTY] * self.info.block_tokens for _ in range(self.info.num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.inits: dict[int, SlotInit] = {}

    def check(self) -> None:
        return None

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def _gather(self, slot: int, length: int) -> list[int]:
        size = self.info.block_tokens
        table = self.tables[slot]
        tokens = [t for block in table[: -(-length // size)] for t in self.kv[block]][:length]
        assert len(tokens) == length and EMPTY not in tokens, f"slot {slot} reads positions nobody wrote"
        return tokens

    def _apply_tables(self, plan: StepPlan) -> None:
        for init in plan.new_slots:
            assert 0 <= init.slot < self.info.config.scheduler.max_num_seqs
            self.inits[init.slot] = init
            self.tables[init.slot] = []
        assert len({init.slot for init in plan.new_slots}) == len(plan.new_slots), "a slot is set up twice in one plan"
        for slot, first, blocks in plan.block_updates:
            table = self.tables[slot]
            assert first <= len(table), "an update leaves a hole in the table"
            table[first : first + len(blocks)] = blocks
        targets = [dst for _, dst in plan.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        read = [self.kv[src].copy() for src, _ in plan.copies]
        for (_, dst), tokens in zip(plan.copies, read, strict=True):
            self.kv[dst] = tokens

    def execute(self, plan: StepPlan) -> StepResult:
        self.on_execute(plan)
        self.plans.append(plan)
        limits = self.info.config.scheduler
        assert 0 < len(plan.token_ids) <= limits.max_batch_tokens and len(plan.slots) <= limits.max_num_seqs
        assert len(set(plan.slots)) == len(plan.slots), "one sequence is fed by two entries"
        assert len(plan.slots) == len(plan.starts) == len(plan.counts) and sum(plan.counts) == len(plan.token_ids) and min(plan.counts) > 0
        self._apply_tables(plan)
        size, offset = self.info.block_tokens, 0
        written: set[tuple[int, int]] = set()
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            for position in range(start, start + count):
                at = (self.tables[slot][position // size], position % size)
                assert at not in written, f"two sequences write position {at} of the pool"
                written.add(at)
                self.kv[at[0]][at[1]] = plan.token_ids[offset]
                offset += 1
            self._check_sharing(plan, slot, start, count)
        return self._rows(plan)

    def _check_sharing(self, plan: StepPlan, slot: int, start: int, count: int) -> None:
        """No other entry of this step may read what this one writes."""
        size = self.info.block_tokens
        mine = set(self.tables[slot][start // size : (start + count - 1) // size + 1])
        for other, first, num in zip(plan.slots, plan.starts, plan.counts, strict=True):
            if other != slot:
                theirs = self.tables[other][: (first + num - 1) // size + 1]
                assert mine.isdisjoint(theirs), f"slot {slot} writes a block that slot {other} reads"

    def _rows(self, plan: StepPlan) -> StepResult:
        rows, bad, faults = [], [], []
        assert len(plan.row_entry) == len(plan.row_offset) == len(plan.row_slot) == len(plan.row_forced)
        assert sum(f >= 0 for f in plan.row_forced) <= 256
        for r, (entry, offset, slot, forced) in enumerate(
            zip(plan.row_entry, plan.row_offset, plan.row_slot, plan.row_forced, strict=True)
        ):
            assert 0 <= offset < plan.counts[entry]
            prefix = self._gather(plan.slots[entry], plan.starts[entry] + offset + 1)
            rows.append(read_row(prefix, self.inits[slot], forced, self.weights))
            if self.nonfinite(prefix):
                bad.append(r)
            if (words := self.faults(prefix, self.inits[slot])) is not None:
                faults.append((r, words))
        return StepResult(
            step=plan.step,
            version=self.version,
            token_ids=[row.token for row in rows],
            logprobs=[row.logprob for row in rows],
            temperature_logprobs=[row.temperature for row in rows],
            model_logprobs=[
                row.model if self.inits[s].want_model_logprobs else math.nan for row, s in zip(rows, plan.row_slot, strict=True)
            ],
            entropy=[row.entropy if self.inits[s].want_entropy else math.nan for row, s in zip(rows, plan.row_slot, strict=True)],
            nonfinite=bad,
            faults=faults,
        )


def oracle(request: RolloutRequest, seed: int, info: RunnerInfo, index: int = 0, weights: int = 0) -> SampleOutput:
    """Sample `index` of a request, from plain lists: no scheduler, no blocks."""
    params, prompt = request.params, list(request.prompt_token_ids)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(info.eos_token_ids))
    limit = min(info.max_model_len, info.num_blocks * info.block_tokens)
    max_len = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
    init = SlotInit(
        slot=0, seed=seed, sample_index=request.first_sample + index, temperature=params.temperature, top_p=1.0, top_k=0, min_p=0.0,
        banned_ids=tuple(stop_ids), banned_until=len(prompt) + params.min_tokens,
    )  # fmt: skip
    given = list(request.continue_from or request.forced_token_ids)
    out = SampleOutput(request_id=request.request_id, sample_index=request.first_sample + index, token_ids=[], logprobs=[], seed=seed)
    columns: dict[str, list[float]] = {name: [] for name in ("temperature", "model", "entropy")}
    tokens = list(prompt)
    out.finish_reason = "length"
    while len(tokens) < max_len:
        forced = given[len(out.token_ids)] if len(out.token_ids) < len(given) else -1
        row = read_row(tokens, init, forced, weights)
        tokens.append(row.token)
        out.token_ids.append(row.token)
        out.logprobs.append(row.logprob)
        for name, column in columns.items():
            column.append(getattr(row, name))
        count = len(out.token_ids)
        if row.token in stop_ids and count > params.min_tokens:
            out.finish_reason, out.stop_reason = "stop", row.token
            break
        found = [s for s in params.stop if "".join(map(chr, out.token_ids)).endswith(s)]
        if found and count >= params.min_tokens:
            out.finish_reason, out.stop_reason = "stop", found[0]
            break
    if "temperature_logprobs" in request.include:
        out.temperature_logprobs = columns["temperature"]
    if "model_logprobs" in request.include:
        out.model_logprobs = columns["model"]
    if "entropy" in request.include:
        out.entropy = columns["entropy"]
    if "prompt_logprobs" in request.include:
        whole = [None, *(read_row(prompt[:j], init, prompt[j], weights).model for j in range(1, len(prompt)))]
        out.prompt_logprobs = whole[request.prompt_logprobs_start :]
    return out


class FakeMatcher:
    """Stop strings over a text in which token id t is chr(t)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.text = stops, ""

    def push(self, token_id: int) -> str | None:
        self.text += chr(token_id)
        return next((s for s in self.stops if self.text.endswith(s)), None)


class FakeTokenizer:
    """Token id t is chr(t)."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"[{m['role'][0]}{m['content']}]" for m in messages))
