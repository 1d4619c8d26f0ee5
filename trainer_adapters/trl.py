"""TRL's trainers on Rollsync: after `attach(trainer, target)` a stock GRPOTrainer samples from a server or an engine in this process.

    trainer = GRPOTrainer(...)  # use_vllm stays False
    attach(trainer, "http://127.0.0.1:8000")
    trainer.train()

What TRL calls its vLLM generation is an object with two calls, `sync_weights()` and `generate(...)`. GRPOTrainer, RLOOTrainer and
DistillationTrainer share that place, as do the experimental GOLD, IW-OPD, SDFT and SDPO. vLLM is neither installed nor imported.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ..rollout.engine.params import SamplingParams
from ..rollout.errors import IllegalState
from ..weight_sync.ranks import Alone, DistRanks, Ranks
from ..weight_sync.sources import weights_from
from .errors import TargetError
from .targets import Facts, Target, agreed, check_model, check_rows, derived_seed, target_of
from .trl_params import is_plain, sampling_params, stop_ids
from .trl_parity import check_numerics, score_by_engine
from .trl_runs import watch_runs

log = logging.getLogger(__name__)

ELSEWHERE = {
    "AsyncGRPOTrainer": "it takes rollout_worker= and weight_transfer=, see rollsync.trainer_adapters.trl_async",
    "AsyncDistillationTrainer": "it takes rollout_worker= and weight_transfer=, see rollsync.trainer_adapters.trl_async",
    "OnlineDPOTrainer": "it talks to vLLM's own client, and has no place for another engine",
}


class RollsyncGeneration:
    """What stands in a trainer's `vllm_generation`. Every rank has one.

    Args:
        trainer: read at each call (its model, step and settings), never remembered in parts.
        target: where rollouts come from.
        ranks: of the trainer.
    """

    def __init__(self, trainer: Any, target: Target, ranks: Ranks) -> None:
        self._trainer, self.target, self._ranks = trainer, target, ranks
        self._calls: tuple[Any, int] = (None, 0)
        self._warned = False
        self.parity = contextlib.ExitStack()
        """takes parity off the trainer, where it was put on"""
        self.last_sync: Any = None
        """SyncReport of the last sync: seconds, bytes, version"""
        self.num_syncs = 0

    @property
    def llm(self) -> Any:
        """As much of vLLM's engine as TRL's tool loop looks at: how long a prompt may become."""
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=self.target.facts().max_model_len)))

    def close(self) -> None:
        """Let go of the servers. An engine is its owner's to close."""
        self.target.close()

    def replaced_by(self, other: RollsyncGeneration, *, keep_parity: bool) -> None:
        """The trainer samples by `other` from now on."""
        if keep_parity:
            other.parity.push(self.parity.pop_all().__exit__)
        self.parity.close()
        if self.target is not other.target:
            self.close()

    def sync_next(self) -> None:
        """Have the trainer sync before its next rollout, whatever its step is: that may be one that it has synced at already."""
        trainer = self._trainer
        trainer._last_loaded_step = -1
        if hasattr(trainer.args, "vllm_sync_frequency"):
            trainer.vllm_sync_frequency = trainer.args.vllm_sync_frequency
            trainer._last_vllm_sync_step = -trainer.vllm_sync_frequency

    def sync_weights(self) -> None:
        """Send the trainer's weights, as version `global_step + 1`: 0 is what an engine was started with. A collective."""
        trainer = self._trainer
        dtype = getattr(torch, self.target.facts().dtype)  # what the engine would round to
        weights = weights_from(trainer.model_wrapped, dtype=dtype)  # wrappers come and go between syncs
        self.last_sync = self.target.sync(weights, trainer.state.global_step + 1, self._ranks)
        self.num_syncs += 1

    def generate(self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None) -> tuple[Any, ...]:
        """One completion per prompt. TRL repeats a prompt for each sample of its group, so equal rows are one request here.

        Returns:
            Prompt ids, completion ids, and per token its logprob and its id, each in a list of one. Logprobs are what TRL's scorer
            computes again, `log_softmax(logits / temperature)`, if tokens were drawn from that; with top_p, penalties and the like they
            are those of the distribution drawn from, which TRL does not apply again: its ratios then hold what was cut off.

        Raises:
            TargetError, BadRequest, ServerUnreachable, ...: alone, as they are; with several ranks, a TargetError on all of them. A rank
                of a trainer with tools fails by itself: each goes on with the rows that called one, and nobody knows how often.
        """
        if self.target.version is None:
            self._sync_again()
        with profiler or contextlib.nullcontext():
            found = agreed(self._in_step(), "the rollout", lambda: self._rows(prompts, images))
        ids, logprobs = [ids for ids, _ in found], [[[value] for value in values] for _, values in found]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]

    def _sync_again(self) -> None:
        """Before the first rollout, where a trainer does not see to that; or a colocated engine has dropped its weights since the last."""
        if self.num_syncs and self._in_step().size < self._ranks.size:
            raise IllegalState(
                "the engine drops its weights after each generation, and ranks that generate as often as their tools need cannot "
                'sync together: make the ColocatedEngine with between="keep"'
            )
        self.sync_weights()

    def _in_step(self) -> Ranks:
        """The ranks that call `generate` as often as this one."""
        return Alone() if getattr(self._trainer, "tools", None) else self._ranks

    def _rows(self, prompts: list[list[int]], images: Any) -> list[tuple[list[int], list[float]]]:
        """Ids and logprobs of every row."""
        if images is not None and any(image is not None for image in images):
            raise ValueError("images cannot be served: Rollsync serves text models")
        vocab_size = self.target.facts().vocab_size
        params = sampling_params(self._trainer)
        self.warn_of_ratios(params)
        column = "temperature_logprobs" if is_plain(params) else "logprobs"
        version = self.target.version  # a colocated engine may have dropped its weights afterwards
        rows = self.target.generate(prompts, params, seed=self._next_seed(), include=[column] if column != "logprobs" else [])
        check_rows(rows, len(prompts), vocab_size, column=column, version=version, allow_empty=True)
        found = [(list(row.token_ids), list(getattr(row, column))) for row in rows]
        if empty := [i for i, (ids, _) in enumerate(found) if not ids]:
            log.warning("rows %s came without a token: each is one EOS with logprob 0, so that it weighs next to nothing", empty)
            if not (ends := stop_ids(self._trainer)):
                raise TargetError([f"row {i} has no token, and the trainer knows no EOS to put in its place" for i in empty])
            found = [pair if pair[0] else ([ends[0]], [0.0]) for pair in found]
        return found

    def warn_of_ratios(self, params: SamplingParams) -> None:
        """Once, if TRL corrects by ratios that hold what sampling cut off."""
        corrects = getattr(self._trainer, "vllm_importance_sampling_correction", False)
        if self._warned or is_plain(params) or not corrects:
            return
        self._warned = True
        log.warning(
            "top_p, top_k, min_p, penalties, biases or min_tokens are on: tokens are drawn from a distribution that TRL does not score "
            "by, so that its importance sampling correction takes most of the gradient away, and logprobs differ under parity too: leave "
            "them off, or set vllm_importance_sampling_correction=False"
        )

    def _next_seed(self) -> int:
        """Another one at each call: from the trainer's seed and step, train or eval, the call within these, and the rank."""
        trainer = self._trainer
        when = (trainer.state.global_step, bool(trainer.model.training))
        self._calls = (when, self._calls[1] + 1 if self._calls[0] == when else 0)
        return derived_seed(trainer.args.seed, *when, self._calls[1], self._ranks.rank)


def attach(trainer: Any, target: Any, *, parity: bool | Mapping[str, Any] = False, **options: Any) -> RollsyncGeneration:
    """Have a TRL trainer sample from `target`, and send its weights there: before the first rollout and whenever they have changed.

    Call it after the trainer is made, on every rank, before `train()`.

    Args:
        trainer: of TRL 1.0 or later, made with `use_vllm=False`: GRPO, RLOO, Distillation, or an experimental one of their kind.
        target: a URL, several URLs, an `Engine`, or what `target_of` takes; with several ranks, an engine of each rank's own.
        parity: have the trainer's model compute the engine's bits, so that `sampling/sampling_logp_difference` is exactly 0. A dict
            says more: `k_shards` and `head_dtype` of the engine, where they are not the default.
        options: of `UrlTarget`, e.g. token, transport, patience_s.

    Raises:
        TypeError: not a trainer that samples this way; it names which way it does.
        ValueError: the trainer was made to sample by another engine, a setting has no meaning here, or its model cannot be sent.
        TargetError: no engine is there, or its model is not the trainer's; what fails on one rank, on all.
    """
    _check_trainer(trainer)
    params = sampling_params(trainer)  # refuses what it cannot pass on
    before = getattr(trainer, "vllm_generation", None)
    before = before if isinstance(before, RollsyncGeneration) else None
    ranks: Ranks = DistRanks() if trainer.accelerator.num_processes > 1 else Alone()
    with contextlib.ExitStack() as undo:  # a trainer that is refused stays as it was
        parity_off = contextlib.ExitStack()
        if parity:
            parity_off.callback(score_by_engine(trainer, **({} if parity is True else parity)))
            undo.callback(parity_off.close)
        generation = RollsyncGeneration(trainer, target_of(target, **options), ranks)
        undo.callback(generation.close)
        agreed(ranks, "attach", lambda: _check_engine(trainer, generation.target.facts(), parity))
        undo.pop_all()
    generation.parity = parity_off
    if before is not None:
        before.replaced_by(generation, keep_parity=bool(parity))
    generation.warn_of_ratios(params)
    trainer.vllm_generation = generation
    trainer.vllm_mode = "colocate"  # looked at for the context length only, which is then the engine's (`llm`), not the model's
    generation.sync_next()
    watch_runs(trainer, generation.target, generation.sync_next)
    trainer.use_vllm = True  # last: only now is there something to sample from
    return generation


def _check_trainer(trainer: Any) -> None:
    kinds = [kind.__name__ for kind in type(trainer).__mro__]
    if found := [kind for kind in kinds if kind in ELSEWHERE]:
        raise TypeError(f"attach does not take {kinds[0]}: {ELSEWHERE[found[0]]}")
    if lacking := [name for name in ("use_vllm", "accelerator", "state", "args", "model") if not hasattr(trainer, name)]:
        raise TypeError(f"attach takes a TRL trainer that can sample by an engine, got {kinds[0]} without {', '.join(lacking)}")
    if trainer.use_vllm and not isinstance(getattr(trainer, "vllm_generation", None), RollsyncGeneration):
        raise ValueError("the trainer was made with use_vllm=True and samples from vLLM: make it with use_vllm=False, then attach")
    if getattr(trainer.args, "vllm_structured_outputs_regex", None) is not None:
        raise ValueError("vllm_structured_outputs_regex cannot be served: output is not constrained")
    modes = ("token_truncate", "token_mask")
    if getattr(trainer, "loss_type", None) == "vespo" and getattr(trainer, "vllm_importance_sampling_mode", modes[0]) not in modes:
        raise ValueError(f"loss_type vespo needs vllm_importance_sampling_mode to be {' or '.join(modes)}")


def _check_engine(trainer: Any, facts: Facts, parity: bool | Mapping[str, Any]) -> None:
    """TargetError: the engine's model is another one. UnsupportedModel: the trainer's cannot be sent. ParityError: bits cannot be equal."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    check_model(facts, model)
    weights_from(model)
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    trained_in = mixed or next(model.parameters()).dtype
    if parity:
        check_numerics(model, facts.fingerprint, facts.dtype, trained_in)
    elif (name := str(trained_in).removeprefix("torch.")) != facts.dtype:
        log.warning("the engine computes in %s and the trainer in %s: their logprobs differ by as much as that", facts.dtype, name)
