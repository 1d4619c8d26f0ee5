"""TRL's public hook `rollout_func`, for those who want rollouts of their own; `trl.attach` does more with less.

    trainer = GRPOTrainer(..., rollout_func=rollout_func("http://127.0.0.1:8000"))

TRL corrects no ratios on this path and logs none of its `sampling/*` metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..rollout.errors import describe
from ..weight_sync.ranks import Alone, DistRanks, Ranks
from .errors import TargetError
from .targets import agreed, check_model, target_of
from .trl import RollsyncGeneration
from .trl_runs import watch_runs

Reply = Callable[[Sequence[int], Sequence[int]], Sequence[int] | None]
RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]


class _Apart(RollsyncGeneration):
    """One whose rounds are each rank's own: how many there are depends on its rows."""

    def _in_step(self) -> Ranks:
        return Alone()


def rollout_func(target: Any, *, reply: Reply | None = None, max_turns: int = 8, **options: Any) -> RolloutFunc:
    """A function for GRPOTrainer's `rollout_func`. It sends the weights when the trainer's step has changed, and samples a row per prompt.

    Args:
        target: as `attach` takes it: a URL, several, or an `Engine`; with several ranks, an engine of each rank's own.
        reply: what an environment answers to a turn, as token ids: called with the prompt and all since, after each turn that a row took;
            None or nothing ends the row. Its ids are in the completion with `env_mask` 0, and are not trained on.
        max_turns: of the model, per row.
        options: of `UrlTarget`.

    Returns:
        The function; its `close()` lets go of the servers.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, got {max_turns}")
    held = target_of(target, **options)
    made: dict[int, RollsyncGeneration] = {}
    synced: dict[int, int] = {}

    def generation_of(trainer: Any) -> RollsyncGeneration:
        if made and id(trainer) not in made:
            raise ValueError("this rollout_func belongs to another trainer: make one for each")
        if not made:
            ranks: Ranks = DistRanks() if trainer.accelerator.num_processes > 1 else Alone()
            agreed(ranks, "rollout_func", lambda: check_model(held.facts(), trainer.accelerator.unwrap_model(trainer.model)))
            watch_runs(trainer, held, synced.clear)
            made[id(trainer)] = _Apart(trainer, held, ranks) if reply is not None else RollsyncGeneration(trainer, held, ranks)
        return made[id(trainer)]

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        generation, step = generation_of(trainer), int(trainer.state.global_step)
        if synced.get(id(trainer)) != step or held.version is None:
            generation.sync_weights()
            synced[id(trainer)] = step
        prompt_ids = [_ids(prompt, trainer) for prompt in prompts]
        version = held.version
        with getattr(held, "staying", contextlib.nullcontext)():
            rows = _played(generation, prompt_ids, trainer.max_completion_length, reply, max_turns if reply is not None else 1)
        found: dict[str, Any] = {"prompt_ids": prompt_ids, "completion_ids": [r.ids for r in rows], "logprobs": [r.logprobs for r in rows]}
        if reply is not None:
            found["env_mask"] = [r.mask for r in rows]
        return {**found, "weight_version": [version] * len(rows)}

    rollouts.close = held.close  # type: ignore[attr-defined]
    return rollouts


def _ids(prompt: Any, trainer: Any) -> list[int]:
    """A prompt as TRL tokenizes it."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(prompt, **options, **(getattr(trainer, "chat_template_kwargs", None) or {})))


@dataclass(slots=True)
class _Played:
    """A row's completion so far; what an environment said has logprob 0 and mask 0."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [mask] * len(ids)


def _answer(reply: Reply, prompt: list[int], completion: list[int], vocab_size: int, where: str) -> list[int]:
    """What the environment says; nothing ends the row. TargetError: it failed, or gave what are no token ids."""
    try:
        answer = list(reply(prompt, completion) or ())
    except Exception as error:
        raise TargetError([f"{where} failed: {describe(error)}"]) from error
    if wrong := [i for i in answer if type(i) is not int or not 0 <= i < vocab_size]:
        raise TargetError([f"{where} has {wrong[0]!r}, which is no token id of a vocabulary of {vocab_size}"])
    return answer


def _played(generation: RollsyncGeneration, prompts: list[list[int]], limit: int, reply: Reply | None, max_turns: int) -> list[_Played]:
    """Every row, played to its end; at most `limit` tokens of each."""
    rows = [_Played() for _ in prompts]
    vocab_size = generation.target.facts().vocab_size
    going = list(range(len(prompts)))
    for turn in range(max_turns):
        _, ids, logprobs, _ = generation.generate([prompts[i] + rows[i].ids for i in going])
        for i, new, values in zip(going, ids, logprobs, strict=True):
            rows[i].add(new, [value[0] for value in values], 1)
        if reply is None or turn == max_turns - 1:
            break
        asked, going = [i for i in going if len(rows[i].ids) < limit], []
        for i in asked:
            answer = _answer(reply, prompts[i], rows[i].ids, vocab_size, f"reply of row {i}, turn {turn}")
            if answer and len(rows[i].ids) + len(answer) < limit:
                rows[i].add(answer, [0.0] * len(answer), 0)
                going.append(i)
        if not going:
            break
    return [_Played(row.ids[:limit], row.logprobs[:limit], row.mask[:limit]) for row in rows]
