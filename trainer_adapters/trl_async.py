"""TRL's AsyncGRPOTrainer on Rollsync: two arguments, and generation goes on while weights are updated in flight.

    url = "http://127.0.0.1:8000"
    trainer = AsyncGRPOTrainer(
        model=folder, args=args, train_dataset=dataset, processing_class=tokenizer, reward_funcs=reward,
        rollout_worker=rollout_worker(url, args, train_dataset=dataset, processing_class=tokenizer, reward_funcs=reward),
        weight_transfer=weight_transfer(url, model=folder),
    )

`weight_transfer` serves AsyncDistillationTrainer as well.
"""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..rollout.client import RolloutClient
from ..weight_sync.boxes import Box
from ..weight_sync.control import UpdateError
from ..weight_sync.ranks import Alone
from ..weight_sync.sender import SyncReport
from ..weight_sync.sources import TensorMeta, dtype_name
from .group_scores import check_funcs
from .targets import UrlTarget, check_model
from .trl_async_worker import Plan, RolloutWorker
from .trl_params import sampling_params

log = logging.getLogger(__name__)


def rollout_worker(
    target: str | Sequence[str],
    args: Any,
    *,
    train_dataset: Any,
    reward_funcs: Any,
    processing_class: Any,
    reward_weights: Sequence[float] | None = None,
    eos_token_ids: Sequence[int] = (),
    token: str | None = None,
    groups_in_flight: int | None = None,
    buffer: int | None = None,
    first_group: int = 0,
    patience_s: float = 60.0,
    reward_timeout_s: float = 600.0,
    stop_timeout_s: float = 15.0,
) -> RolloutWorker:
    """What to give AsyncGRPOTrainer as `rollout_worker`. Groups are sampled without a pause, also while the servers' weights change.

    Each queued sample is TRL's RolloutSample and says in `weight_versions` which version drew each token; its `model_version` is the
    oldest of them, by which TRL drops what is more than `args.max_staleness` behind. A sample that falls so far behind while it is
    drawn is ended by the server. Logprobs are those each token was drawn with, so that TRL's ratios are right across versions.

    Args:
        target: URL or URLs of servers.
        args: the trainer's AsyncGRPOConfig: sampling, num_generations, max_staleness, queue_maxsize, max_inflight_tasks, seed.
        train_dataset: rows with "prompt" (messages or text); its other columns go to the reward functions. It is read over and over.
        reward_funcs: one or several functions as TRL has them, `async` or not. Sync ones run in threads of this process.
        processing_class: the tokenizer, with the chat template.
        reward_weights: one per function; None: 1 each.
        eos_token_ids: what ends a completion besides the tokenizer's EOS and the ids of the model folder the engine was started with.
        groups_in_flight: None follows max_inflight_tasks.
        buffer: finished samples that may wait for the trainer, at most queue_maxsize but at least one group; then no group begins. None:
            those of one version, so that with what is in flight nothing waits until it is too old.
        first_group: how many groups to pass over, for a run that is resumed: rows and seeds follow from a group's number.
        patience_s: how long all servers may be unable to take prompts before the worker fails.
        reward_timeout_s: for the rewards of one group, which is then passed over; the fourth in a row fails the worker.
        stop_timeout_s: within which `stop()` ends everything.

    Raises:
        BadRequest, ValueError, TypeError: a setting that cannot be served, by name.
    """
    if args.num_generations < 2:
        raise ValueError(f"num_generations must be at least 2 to compare samples, got {args.num_generations}")
    funcs, weights = check_funcs(reward_funcs, reward_weights)
    _check_dataset(train_dataset)
    if getattr(args, "log_completions", False):
        log.warning("log_completions prints nothing here: TRL's own rollout worker does that, and this one stands in its place")
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    ends = tuple(dict.fromkeys(int(i) for i in (tokenizer.eos_token_id, *eos_token_ids) if i is not None))
    settings = types.SimpleNamespace(args=args, processing_class=processing_class, eos_token_ids=ends)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    in_flight = args.max_inflight_tasks if args.max_inflight_tasks > 0 else max(1, args.max_staleness) * per_step
    plan = Plan(
        urls=_urls(target),
        token=token,
        params=dataclasses.replace(sampling_params(settings), ignore_eos=False),
        num_generations=args.num_generations,
        groups_in_flight=max(1, groups_in_flight or in_flight // args.num_generations),
        max_version_lag=args.max_staleness,
        seed=args.seed,
        chat_template_kwargs=dict(args.chat_template_kwargs or {}),
        patience_s=patience_s,
        reward_timeout_s=reward_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )
    room = max(1, buffer or max(per_step * args.weight_sync_steps, args.num_generations))
    room = min(room, args.queue_maxsize) if args.queue_maxsize > 0 else room
    return RolloutWorker(plan, train_dataset, tokenizer, funcs, weights, room, first_group)


def weight_transfer(target: str | Sequence[str], *, model: Any = None, token: str | None = None, **options: Any) -> WeightTransfer:
    """What to give AsyncGRPOTrainer or AsyncDistillationTrainer as `weight_transfer`.

    Args:
        target: URL or URLs of servers.
        model: folder, config or model that the trainer starts from: an engine that computes something else is then refused.
        options: of `UrlTarget`: transport, timeout_s, kv_policy, bucket_bytes, ...
    """
    return WeightTransfer(_urls(target), model, token, options)


class WeightTransfer:
    """Weights as TRL hands them out, (name, tensor) one after another, each sync one transaction per server.

    TRL calls it on rank 0 only. The first sync has version 1, as TRL counts, whatever the servers had before.
    """

    def __init__(self, urls: tuple[str, ...], model: Any, token: str | None, options: dict[str, Any]) -> None:
        self._urls, self._model, self._token, self._options = urls, model, token, options
        self._target: UrlTarget | None = None
        self._metas: list[TensorMeta] | None = None
        self.version = 0
        self.last_sync: SyncReport | None = None
        """seconds, bytes and the engines' words of the last sync"""

    def init_weight_transfer(self) -> None:
        """TargetError, ServerUnreachable: a server is not there, speaks another protocol, or serves another model."""
        self.destroy()
        self._target = self._make()
        facts = self._target.facts()
        if self._model is not None:
            check_model(facts, _configured(self._model))

    def pause(self) -> None:
        """Nothing: the old weights serve on until the new ones are complete, and change between two steps of the engine."""

    def resume(self) -> None:
        """Nothing, see `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Make these weights current on every server.

        Which tensors there are is learned from the first sync, for which all are held at once; on later ones they stream. The iterator
        is read to its end whatever happens, as other ranks take part in it.

        Raises:
            UpdateError, TargetError: no server has them, or (at the first sync) not all have.
        """
        try:
            self._send(iterator)
        finally:
            for _ in iterator:
                pass

    def _send(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        if self._target is None:
            raise UpdateError("init_weight_transfer was not called, or destroy was")
        metas = self._metas
        if metas is None:
            dtype = self._target.facts().dtype
            held = [(name, tensor.detach().cpu()) for name, tensor in iterator]  # a parameter on the CPU is not copied
            metas = [
                TensorMeta(name, dtype if tensor.is_floating_point() else dtype_name(tensor.dtype), tuple(tensor.shape), _whole(tensor))
                for name, tensor in held
            ]
            iterator = iter(held)
            self._target = self._for_names({meta.name for meta in metas})
        self.last_sync = self._target.sync(_Stream(metas, iterator), self.version + 1, Alone())
        self._metas = metas
        self.version += 1

    def _for_names(self, names: set[str]) -> UrlTarget:
        """TRL leaves frozen parameters out: then the engine keeps its own, which must be those the trainer started from."""
        assert self._target is not None
        with RolloutClient(self._urls[0], self._token, self._target_timeout()) as client:
            frozen = sorted(set(client.digests()["digests"]) - names)
        if not frozen:
            return self._target
        shown = ", ".join(frozen[:3]) + (f" and {len(frozen) - 3} more" if len(frozen) > 3 else "")
        log.warning("%s do not come from the trainer: the engine keeps those it was started with", shown)
        self._target.close()
        return self._make(mode="partial")

    def _target_timeout(self) -> float:
        found: float = self._options.get("timeout_s", 60.0)
        return found

    def _make(self, **more: Any) -> UrlTarget:
        return UrlTarget(self._urls, token=self._token, **{**self._options, **more})

    def destroy(self) -> None:
        if self._target is not None:
            self._target.close()
        self._target = self._metas = None
        self.version = 0


class _Stream:
    """One pass over what TRL gives, as a sender's source."""

    def __init__(self, metas: list[TensorMeta], tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._metas, self._tensors = metas, tensors

    def metadata(self) -> list[TensorMeta]:
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for meta in self._metas:
            name, tensor = next(self._tensors, (None, None))
            if tensor is None or name != meta.name or tuple(tensor.shape) != meta.shape:
                came = "nothing" if tensor is None else f"{name} {list(tensor.shape)}"
                raise UpdateError(f"the trainer gave {came} where it gave {meta.name} {list(meta.shape)} at the first sync")
            yield meta.name, tensor.detach()
        if (extra := next(self._tensors, None)) is not None:
            raise UpdateError(f"the trainer gave {extra[0]}, which it did not give at the first sync")


def _whole(tensor: Tensor) -> tuple[Box, ...]:
    return (Box.whole(torch.Size(tensor.shape)),)


def _configured(model: Any) -> Any:
    """Something with the `config` of a model."""
    if hasattr(model, "config"):
        return model
    if isinstance(model, str | Path):
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(model)
    return types.SimpleNamespace(config=model)


def _check_dataset(dataset: Any) -> None:
    """TypeError: it cannot be read over and over."""
    if not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise TypeError(f"train_dataset must be a dataset of rows, got {dataset!r:.100}")
    if iter(dataset) is dataset:
        raise TypeError(f"train_dataset must be readable over and over, got {dataset!r:.100}, which is read once: give a list or a Dataset")


def _urls(target: str | Sequence[str]) -> tuple[str, ...]:
    urls = (target,) if isinstance(target, str) else tuple(target) if isinstance(target, list | tuple) else ()
    if not urls or not all(isinstance(url, str) for url in urls):
        kind = "an engine in this process would stand still while the trainer steps" if hasattr(target, "control") else "it names none"
        raise TypeError(f"target must be the URL or URLs of servers, got {target!r:.100}: {kind}")
    return tuple(url.rstrip("/") for url in urls)
