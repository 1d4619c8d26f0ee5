"""The trainer's side of the guarantee: a stock Hugging Face model of the same checkpoint computes the sampled tokens' logprobs again."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.runner_info import RunnerInfo
    from ..engine.types import RolloutRequest, SampleOutput


class Trainer:
    """A stock model in train mode, under parity.

    Raises:
        ConfigError: transformers is not installed.
    """

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError:
            raise ConfigError("the trainer's cells need transformers: pip install 'rollsync[trainers]'") from None
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=getattr(torch, info.dtype)).train()
        numerics = info.config.numerics
        self._numerics: dict[str, Any] = {"k_shards": numerics.k_shards, "head_dtype": numerics.head_dtype, "kernels": info.kernels}
        self._vocab_limit, self._threads = info.vocab_size, info.threads
        self._gradients: dict[Any, list[Tensor]] = {}

    def differing(
        self, requests: Sequence[RolloutRequest], outputs: dict[str, SampleOutput], *, left: bool | None, checkpointed: bool
    ) -> list[str]:
        """What differs in any bit from `outputs`: "request 3: model_logprobs from token 7 on".

        Args:
            left: padding of all rows together: on the left, or on the right. None: rows one by one.
            checkpointed: activations are dropped and computed again in a backward pass, whose gradients are compared with those of
                one that kept them.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            groups = [list(requests)] if left is not None else [[r] for r in requests]
            return [w for rows in groups for w in self._differing(rows, outputs, bool(left), checkpointed)]
        finally:
            torch.set_num_threads(before)

    def _differing(
        self, rows: Sequence[RolloutRequest], outputs: dict[str, SampleOutput], left: bool, checkpointed: bool
    ) -> list[str]:
        wrong, wanted = [], [outputs[r.request_id] for r in rows]
        for request, output, columns in zip(rows, wanted, self._columns(rows, wanted, left, checkpointed), strict=True):
            for name, values in columns.items():
                want = getattr(output, name)
                at = next((i for i, (a, b) in enumerate(zip(values, want, strict=True)) if _bits(a) != _bits(b)), None)
                if at is not None:
                    wrong.append(f"{request.request_id}: {name} from token {at} on")
        if checkpointed and not self._same_gradients(rows, wanted, left):
            wrong.append(f"{', '.join(r.request_id for r in rows)}: gradients under checkpointing")
        return wrong

    def _columns(
        self, requests: Sequence[RolloutRequest], outputs: Sequence[SampleOutput], left: bool, checkpointed: bool
    ) -> list[dict[str, list[float]]]:
        columns, loss = [], torch.zeros(())
        with self._parity():
            self._model.zero_grad()
            if checkpointed:
                _checkpoint(self._model, True)
            with torch.set_grad_enabled(checkpointed):
                for request, output, logits_TV in zip(requests, outputs, self._logits(requests, outputs, left), strict=True):
                    ids, params = torch.tensor(output.token_ids), request.params
                    found = {
                        "model_logprobs": self._logprobs(logits_TV, ids),
                        "temperature_logprobs": self._logprobs(logits_TV, ids, temperature=params.temperature),
                    }
                    if params.repetition_penalty == 1.0:  # a trainer's logits are not the penalised ones
                        truncation = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
                        found["logprobs"] = self._logprobs(
                            logits_TV, ids, temperature=params.temperature, vocab_limit=self._vocab_limit, **truncation
                        )
                    loss = loss - found["model_logprobs"].sum()
                    columns.append({name: values.tolist() for name, values in found.items()})
            if checkpointed:
                loss.backward()
                _checkpoint(self._model, False)
        return columns

    def _logits(self, requests: Sequence[RolloutRequest], outputs: Sequence[SampleOutput], left: bool) -> list[Tensor]:
        """[output tokens, V] of each request: those that its output was drawn from."""
        rows = [torch.tensor([*r.prompt_token_ids, *o.token_ids]) for r, o in zip(requests, outputs, strict=True)]
        width = max(map(len, rows))
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            at = slice(width - len(row), width) if left else slice(len(row))
            ids[i, at], mask[i, at] = row, 1
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        ends = [width if left else len(row) for row in rows]
        return [logits[i, end - len(o.token_ids) - 1 : end - 1] for i, (end, o) in enumerate(zip(ends, outputs, strict=True))]

    def _same_gradients(self, requests: Sequence[RolloutRequest], outputs: Sequence[SampleOutput], left: bool) -> bool:
        found = [p.grad for p in self._model.parameters()]
        key = (left, tuple(r.request_id for r in requests), tuple(tuple(o.token_ids) for o in outputs))
        if key not in self._gradients:
            self._model.zero_grad()
            with self._parity():
                logits = self._logits(requests, outputs, left)
                losses = [-self._logprobs(z, torch.tensor(o.token_ids)).sum() for z, o in zip(logits, outputs, strict=True)]
                loss = torch.zeros(())
                for one in losses:
                    loss = loss + one
                loss.backward()
            self._gradients[key] = [p.grad for p in self._model.parameters()]
        return all(torch.equal(a, b) for a, b in zip(found, self._gradients[key], strict=True))

    def _logprobs(self, logits_TV: Tensor, ids_T: Tensor, **options: Any) -> Tensor:
        from ...kernels.logprobs import token_logprobs

        return token_logprobs(logits_TV, ids_T, build=self._numerics["kernels"], **options)

    def _parity(self) -> Any:
        from ...trainer_adapters.parity import rollsync_parity

        return rollsync_parity(self._model, **self._numerics)


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _checkpoint(model: Any, on: bool) -> None:
    newer = f"activation_checkpointing_{'enable' if on else 'disable'}"  # of transformers 5.2x
    getattr(model, newer if hasattr(model, newer) else newer.replace("activation", "gradient"))()
