"""Requests in, plans out, results in, outputs out. Pure bookkeeping: no tensors, no threads, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

from ..errors import describe
from .columns import empty_output
from .outputs import sample_output
from .planner import Chunk, Planner, log
from .runner_info import RunnerInfo
from .sequence import Ending, Request, Sequence
from .types import SampleOutput, StepPlan, StepResult

NONFINITE = "the model's logits held NaN or infinity: the weights or the KV cache are broken"


class Observer(Protocol):
    """Is told of what happens, on the engine's thread: it neither waits nor raises."""

    def finished(self, request: Request, output: SampleOutput) -> None:
        """A sample got its final output."""

    def weights_changed(self) -> None:
        """New weights are current."""


class Scheduler(Planner):
    """Every request added ends in exactly one final output per sample, from `update`, `abort` or `take_instant`."""

    def __init__(self, info: RunnerInfo) -> None:
        super().__init__(info)
        self.requests: dict[str, Request] = {}
        """in flight, by id"""
        self.held: dict[str, Request] = {}
        """those of them that must not begin yet: waiting, and in no queue"""
        self._num_arrived = 0
        self._instant: list[Request] = []
        self.observer: Observer | None = None

    @property
    def has_work(self) -> bool:
        return len(self.requests) > len(self.held)

    def add(self, request: Request, *, hold: bool = False) -> None:
        """Accept a request (checked by the caller). Its samples wait for their first step, or (`hold`) for `release`."""
        request.arrival = self._num_arrived
        pending, instant = request.pending, request.needs_no_step
        first = None if instant or hold else request.next_sequence()  # what may fail comes before what it would leave half done
        self._num_arrived += 1
        self.requests[request.id] = request
        self.num_waiting += pending
        self.counters["prompt_tokens"] += len(request.prompt)
        if hold:
            self.held[request.id] = request
        elif first is None:
            self._instant.append(request)
        else:
            self._enqueue(first)

    def release(self, request: Request) -> None:
        """Let a held request begin, at the place in the queue that it came to."""
        del self.held[request.id]
        if request.needs_no_step:
            self._instant.append(request)
        else:
            self._enqueue(request.next_sequence())

    def abort(self, doomed: Iterable[Request], reason: str) -> list[SampleOutput]:
        """End every unfinished sample of some requests, in whatever state, with what it has so far."""
        whole = {request.id: request for request in doomed}
        return self._abort([seq for r in whole.values() for seq in r.sequences.values()], whole.values(), reason)

    def abort_samples(self, doomed: Iterable[Sequence], reason: str) -> list[SampleOutput]:
        """End single samples. If the one that prefills for others that have not begun is among them, those end too."""
        sequences = list(doomed)
        return self._abort(sequences, {seq.request.id: seq.request for seq in sequences}.values(), reason)

    def _abort(self, sequences: Iterable[Sequence], requests: Iterable[Request], reason: str) -> list[SampleOutput]:
        """End these samples, and those of `requests` that have not begun."""
        end = Ending("abort", abort_reason=reason)
        outputs: list[SampleOutput] = []
        for seq in sequences:
            if seq.slot >= 0:
                self._leave(seq)
            else:
                self.num_waiting -= 1
                self._num_dead += 1
            self._close(seq, end, outputs)
        for request in requests:
            self._close_pending(request, end, outputs)
        self.running = [seq for seq in self.running if seq.slot >= 0]
        if self._num_dead * 2 > len(self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[1].end is None]
            heapq.heapify(self._waiting)
            self._num_dead = 0
        if self._instant:
            self._instant = [request for request in self._instant if request.live]
        self.counters["aborted"] += len(outputs)
        return sorted(outputs, key=lambda output: (output.request_id, output.sample_index))

    def begun(self) -> list[Request]:
        """Requests that run or have tokens."""
        return [r for r in self.requests.values() if any(seq.slot >= 0 or seq.columns.logprobs for seq in r.sequences.values())]

    def lagging(self, version: int) -> list[Sequence]:
        """Samples that no token of this weight version may be added to."""
        asks = [r for r in self.requests.values() if r.spec.max_version_lag is not None]
        return [
            seq for r in asks for seq in r.sequences.values()
            if seq.first_version is not None and version - seq.first_version > (r.spec.max_version_lag or 0)
        ]  # fmt: skip

    def preempt_all(self) -> int:
        """Send every running sequence back to waiting, KV freed. Returns the tokens to be fed again."""
        assert self._flight is None, "between steps only"
        tokens = sum(seq.num_computed for seq in self.running)
        while self.running:
            self._preempt(self.running[-1])
        return tokens

    def new_epoch(self, epoch: int, *, keep_kv: bool = False) -> int:
        """New weights are current: nothing cached before can be hit. Running sequences are computed anew, or (`keep_kv`) go on
        with their KV, later tokens marked `mixed_kv`. Returns the tokens to be fed again."""
        assert self._flight is None, "between steps only"
        self.blocks.set_epoch(epoch)
        tokens = 0 if keep_kv else self.preempt_all()
        for seq in self.running:
            seq.columns.version = -1
        for request in self.requests.values():
            if request.prompt_logprobs is not None:
                request.restart_prompt()
        if self.observer is not None:
            self.observer.weights_changed()
        return tokens

    def take_instant(self) -> list[SampleOutput]:
        """Outputs of requests that were over before they began (max_tokens 0 and nothing to score), or that could not begin."""
        outputs: list[SampleOutput] = []
        instant, self._instant = self._instant, []
        for request in instant:
            assert request.given_end is not None
            self._close_pending(request, request.given_end, outputs)
        faulted, self._faulted = self._faulted, []
        for seq, words in faulted:
            end = Ending("error", error=words)
            self._close(seq, end, outputs)
            self._close_pending(seq.request, end, outputs)
        return outputs

    def update(self, plan: StepPlan, result: StepResult) -> list[SampleOutput]:
        """Take in what a step computed. Returns final outputs, and deltas of requests that stream."""
        flight, chunks = self._flight, self._chunks
        assert flight is not None and plan.step == result.step, "not the result of the plan in flight"
        self._flight = None
        outputs = self.take_instant()
        mask = self.blocks.block_tokens - 1
        bad = {**dict.fromkeys(result.nonfinite, NONFINITE), **dict(result.faults)}
        row = 0
        left = False
        for entry, seq in enumerate(flight):
            if entry in chunks:
                chunk = chunks[entry]
                left |= self._update_chunk(seq, chunk, row, result, bad, outputs)
                row += chunk.num_rows
                continue
            if seq.end is None:
                if row in bad:
                    self._fail(seq, bad[row], outputs)
                else:
                    try:
                        seq.num_computed += 1
                        if not seq.num_computed & mask:
                            self._register(seq)
                        self._draw(seq, row, result, outputs)
                    except Exception as error:  # this sequence's, so it ends alone
                        self._fail(seq, error, outputs)
                left |= seq.end is not None
            row += 1
        if left:
            self.running = [seq for seq in self.running if seq.slot >= 0]
        self.counters["fed_tokens"] += len(plan.token_ids)
        return outputs

    def _update_chunk(
        self, seq: Sequence, chunk: Chunk, row: int, result: StepResult, bad: dict[int, str], outputs: list[SampleOutput]
    ) -> bool:
        """Take in an entry that is not a plain decode. Returns whether some sequence ended."""
        request = seq.request
        if seq.end is not None:
            return False
        first_draw = row + chunk.num_forced
        fault: str | Exception | None = next((bad[r] for r in range(row, first_draw) if r in bad), None) if bad else None
        if fault is None:
            try:
                self._take_chunk(seq, chunk, row, result)
            except Exception as error:
                fault = error
        if fault is not None:
            # What a chunk computes is common to all samples: those not begun would meet the same.
            for broken in (seq, *chunk.children):
                self._fail(broken, fault, outputs)
            self._close_pending(request, Ending("error", error=seq.end.error if seq.end else None), outputs)
            return True
        if chunk.draws:
            drawers = (seq, *chunk.children)
            for row, drawer in enumerate(drawers, first_draw):
                drawer.decoding = True
                if row in bad:
                    self._fail(drawer, bad[row], outputs)
                    continue
                try:
                    self._draw(drawer, row, result, outputs)
                except Exception as error:
                    self._fail(drawer, error, outputs)
            return any(drawer.end is not None for drawer in drawers)
        if request.given_end is not None and seq.num_computed == seq.num_to_feed:
            self._close_pending(request, request.given_end, outputs, like=seq)
            self._finish(seq, request.given_end, outputs)
            return True
        return False

    def _take_chunk(self, seq: Sequence, chunk: Chunk, row: int, result: StepResult) -> None:
        """What a chunk computed for all samples of its request."""
        request = seq.request
        seq.num_computed += chunk.count
        self._register(seq)
        self._score(seq, chunk, row, result)
        if chunk.draws:
            if request.shared_columns is None and request.given and request.spec.params.n > 1:
                request.shared_columns = seq.columns.copy()
            for child in chunk.children:
                child.columns = seq.columns.copy()

    def _score(self, seq: Sequence, chunk: Chunk, row: int, result: StepResult) -> None:
        """Values of prompt and given tokens, from forced rows."""
        prompt_tokens = len(seq.request.prompt)
        if chunk.num_forced and chunk.first_row < prompt_tokens:
            seq.request.scored_prompt(result.version, seq.epoch != self.blocks.epoch)
        for token_index in range(chunk.first_row, chunk.first_row + chunk.num_forced):
            if token_index < prompt_tokens:
                assert seq.request.prompt_logprobs is not None
                seq.request.prompt_logprobs.append(result.model_logprobs[row])
            else:
                self._append_values(seq, row, result)
            row += 1

    def _append_values(self, seq: Sequence, row: int, result: StepResult) -> None:
        columns = seq.columns
        if result.version != columns.version:
            columns.open_span(result.version, seq.epoch != self.blocks.epoch)
        columns.logprobs.append(result.logprobs[row])
        more = seq.request.more_columns
        if more:  # one by one, not by a loop over the names: this is done for every token
            if "temperature_logprobs" in more:
                columns.temperature_logprobs.append(result.temperature_logprobs[row])
            if "model_logprobs" in more:
                columns.model_logprobs.append(result.model_logprobs[row])
            if "entropy" in more:
                columns.entropy.append(result.entropy[row])
            if "top_logprobs" in more:
                columns.top_token_ids.append(result.top_token_ids[row])
                columns.top_logprobs.append(result.top_logprobs[row])
            if "sampling_mask" in more:
                columns.sampling_mask.append(result.sampling_mask[row])

    def _draw(self, seq: Sequence, row: int, result: StepResult, outputs: list[SampleOutput]) -> None:
        """Take a sampled token in; end the sample if it says so."""
        self._append_values(seq, row, result)
        token = result.token_ids[row]
        tokens = seq.tokens
        tokens.append(token)
        request = seq.request
        self.counters["generated_tokens"] += 1
        if token in seq.stop_ids or len(tokens) >= request.max_len or seq.matcher is not None:
            end = request.ending(len(tokens) - len(request.prompt), token, seq.matcher)
            if end is not None:
                self._finish(seq, end, outputs)
                return
        if seq.stream:
            self._emit_delta(seq, outputs)

    def _emit_delta(self, seq: Sequence, outputs: list[SampleOutput]) -> None:
        outputs.append(sample_output(seq, seq.emitted))
        seq.emitted = len(seq.columns.logprobs)

    def _register(self, seq: Sequence) -> None:
        """Make blocks that are full and computed by now findable, unless their KV is of older weights."""
        blocks = self.blocks
        full = seq.num_computed // blocks.block_tokens
        if blocks.prefix_cache and seq.epoch == blocks.epoch and full > seq.num_registered:
            blocks.extend_digests(seq.digests, seq.tokens, full, seq.request.salt)
            self._settle(seq, full)
            for i in range(seq.num_registered, full):
                blocks.register(seq.blocks[i], seq.digests[i])
            seq.num_registered = full

    def _fail(self, seq: Sequence, fault: str | Exception, outputs: list[SampleOutput]) -> None:
        """End one sequence with an error. Broken numbers that it computed are not to be found by others."""
        if fault == NONFINITE:
            self.blocks.forget(seq.blocks)
        if isinstance(fault, Exception):
            log.error("request %r, sample %d failed", seq.request.id, seq.index, exc_info=fault)
            fault = describe(fault)
        self._finish(seq, Ending("error", error=fault), outputs)

    def _finish(self, seq: Sequence, end: Ending, outputs: list[SampleOutput]) -> None:
        self._leave(seq)
        self.counters["finished"] += 1
        self._close(seq, end, outputs)

    def _close(self, seq: Sequence, end: Ending, outputs: list[SampleOutput]) -> None:
        """The one place where a sample gets its final output."""
        request = seq.request
        seq.end = end
        if end.reason == "error":
            seq.trim()
            self.counters["nonfinite" if end.error == NONFINITE else "faults"] += 1
        try:
            output = sample_output(seq)
        except Exception as error:
            log.error("request %r, sample %d: no output", request.id, seq.index, exc_info=error)
            self.counters["faults"] += end.reason != "error"
            ends = {"seed": request.seed, "finish_reason": "error", "error": end.error or describe(error)}
            output = empty_output(request.id, request.spec.first_sample + seq.index, request.columns, **ends)
        outputs.append(output)
        if self.observer is not None:
            self.observer.finished(request, output)
        del request.sequences[seq.index]
        request.live -= 1
        if request.live == 0:
            del self.requests[request.id]
            self.held.pop(request.id, None)

    def _close_pending(self, request: Request, end: Ending, outputs: list[SampleOutput], like: Sequence | None = None) -> None:
        """End the samples that have not begun, with the values of `like` if given."""
        while request.pending:
            seq, own_end = request.next_sequence(), end
            if like is not None:
                try:
                    seq.start()
                    seq.columns = like.columns.copy()
                    seq.cached_tokens = like.cached_tokens
                except Exception as error:
                    own_end = Ending("error", error=describe(error))
            self.num_waiting -= 1
            self._close(seq, own_end, outputs)
