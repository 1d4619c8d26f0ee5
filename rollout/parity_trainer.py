"""The trainer's half of `rollsync parity`: the stock transformers model, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..trainer_adapters.errors import ParityError
from ..trainer_adapters.parity import check
from ..weight_sync.digest import tensor_digest
from .client import RolloutClient
from .engine.config import EngineConfig
from .errors import ConfigError, Forbidden, Unauthorized
from .results import PromptResult, Sample

BATCH_TOKENS = 2048
"""of one forward pass, padding counted"""
SORTED = 96
"""samples that are sorted by length"""
STOCK_TOKENS = 2048
"""that are computed without parity, to show what it is for"""


def by_length(samples: list[tuple[PromptResult, Sample]]) -> list[tuple[PromptResult, Sample]]:
    """The same in runs of like length, as trainers batch them: less padding, but some in every batch."""
    runs = (samples[at : at + SORTED] for at in range(0, len(samples), SORTED))
    return [one for run in runs for one in sorted(run, key=lambda pair: len(pair[0].prompt_token_ids) + len(pair[1].token_ids))]


class Trainer:
    """A stock model, as a trainer on this machine loads it.

    Args:
        model: a folder, a .gguf file or a hub id.
        dtype: bfloat16 or float32.

    Raises:
        ConfigError: there is no transformers, or no such model.
    """

    def __init__(self, model: str, dtype: str) -> None:
        try:
            import transformers as found_transformers
        except ImportError:
            raise ConfigError("rollsync parity computes with transformers: pip install 'rollsync[trainers]'") from None
        from .engine.model_runner import find_model

        transformers: Any = found_transformers
        found = find_model(EngineConfig(model=model))
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(found.path, dtype=getattr(torch, dtype)).eval()
        self.words = f"{type(self.model).__name__} of transformers {transformers.__version__}"

    def check_weights(self, client: RolloutClient) -> bool:
        """Whether the server's weights were seen to be these; False if it does not tell (another key opens its control routes).

        Raises:
            ConfigError: they are others; names the first tensor that differs and both digests.
        """
        try:
            theirs: dict[str, str] = client.digests()["digests"]
        except (Unauthorized, Forbidden):
            return False
        ours = {name: values for name, values in self.model.state_dict().items() if name in theirs}
        if missing := sorted(theirs.keys() - ours.keys()):
            raise ConfigError(f"the server has another model: its {missing[0]} is no tensor of this {type(self.model).__name__}")
        differ = [(name, f"{tensor_digest(values):016x}") for name, values in ours.items()]
        differ = [(name, digest) for name, digest in differ if digest != theirs[name]]
        if differ:
            name, digest = differ[0]
            raise ConfigError(
                f"the server has other weights: {len(differ)} of {len(theirs)} tensors differ; {name} has digest {theirs[name]} there and "
                f"{digest} here"
            )
        return True

    def compare(self, results: Sequence[PromptResult], params: Any, info: dict[str, Any], weights: int, padding: str) -> dict[str, Any]:
        """Compute results under parity: `ParityReport.to_dict`, and "seconds".

        Args:
            params: they were sampled with.
            info: what the server says of its engine.
            weights: their version.

        Raises:
            ConfigError: the two sides differ in what bits depend on.
        """
        numerics, begun = info["config"]["numerics"], time.monotonic()
        singles = by_length([(r, s) for r in results for s in r.samples])
        alone = [replace(r, samples=[s]) for r, s in singles]
        try:
            report = check(
                self.model, alone, params=params, padding=padding, batch_tokens=BATCH_TOKENS, vocab_limit=info["vocab_size"],
                fingerprint=info["fingerprint"], dtype=info["dtype"], weight_version=weights,
                k_shards=numerics["k_shards"], head_dtype=numerics["head_dtype"],
            )  # fmt: skip
        except ParityError as error:
            raise ConfigError(str(error)) from None
        found = report.to_dict()
        if (first := found["first_mismatch"]) is not None:
            result, s = singles[int(first["where"].split()[1].rstrip(","))]
            where = f"prompt {result.prompt_index}, sample {s.index} under seed {s.seed}"
            found["first_mismatch"] = {**first, "where": where, "text": first["text"].replace(first["where"], where)}
        return {**found, "seconds": time.monotonic() - begun}

    @torch.no_grad()
    def compare_stock(self, results: Sequence[PromptResult], temperature: float) -> dict[str, Any]:
        """What the model gives by itself for the first tokens, right-padded: "equal" and "total" tokens, and differences."""
        pairs = [(r.prompt_token_ids, s) for r in results for s in r.samples if s.token_ids]
        equal = total = 0
        differences: list[np.ndarray[Any, Any]] = []
        while pairs and total < STOCK_TOKENS:
            batch, pairs = pairs[:4], pairs[4:]
            for logits, (_, s) in zip(self._logits([[*p, *s.token_ids] for p, s in batch]), batch, strict=True):
                count = len(s.token_ids)
                rows = torch.log_softmax(logits[-count - 1 : -1].float() / temperature, -1)
                ours = rows.gather(1, torch.tensor(s.token_ids)[:, None])[:, 0].numpy()
                theirs = np.array(s.temperature_logprobs, np.float32)
                equal += int((ours == theirs).sum())
                total += count
                differences.append(np.abs(ours.astype(np.float64) - theirs))
        every = np.concatenate(differences)
        return {"equal": equal, "total": total, "max_difference": float(every.max()), "mean_difference": float(every.mean())}

    def _logits(self, sequences: list[list[int]]) -> list[Tensor]:
        width = max(map(len, sequences))
        ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences])
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return [row[: len(s)] for row, s in zip(logits, sequences, strict=True)]
