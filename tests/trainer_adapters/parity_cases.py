"""Tiny models whose sums cancel, rollouts of a real engine on them, and the same sequences as a trainer lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rollsync.kernels.native_lib import available_builds, load_build
from rollsync.kernels.native_ops import NativeOps
from rollsync.kernels.reference import sample as reference_sample
from rollsync.kernels.reference_sampler import SamplerRows
from torch import Tensor

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("llama", {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0}),
    "gemma3": ("gemma3", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
}
LENGTHS = (5, 33, 70, 12)
NEW_TOKENS = 20


def load(folder: str, dtype: Any, **options: Any) -> Any:
    """The stock model, as it comes."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an engine sampled: one sequence per prompt, and the model's logprobs of its sampled tokens."""

    folder: str
    dtype: torch.dtype
    prompts: list[list[int]]
    samples: list[list[int]]
    model_logprobs: list[list[float]]
    outputs: list[Any]

    @property
    def sequences(self) -> list[list[int]]:
        return [p + s for p, s in zip(self.prompts, self.samples, strict=True)]

    def model(self, **options: Any) -> Any:
        return load(self.folder, **{"dtype": self.dtype, **options})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences laid out for a forward pass. `rows[i]`: the flat places of the logits that give sequence i's sampled tokens."""

    inputs: dict[str, Tensor]
    rows: list[slice]


def lay_out(case: Case, how: str) -> Batch:
    """`how`: right or left padded, or packed into one row."""
    sequences = case.sequences
    if how == "packed":
        ends = np.cumsum([len(s) for s in sequences]).tolist()
        starts = [0, *ends[:-1]]
        positions = torch.cat([torch.arange(len(s)) for s in sequences])
        inputs = {"input_ids": torch.tensor([[i for s in sequences for i in s]]), "position_ids": positions[None]}
    else:
        width = max(map(len, sequences)) + 3
        ids, mask = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width, dtype=torch.long)
        starts = []
        for i, s in enumerate(sequences):
            first = 0 if how == "right" else width - len(s)
            ids[i, first : first + len(s)], mask[i, first : first + len(s)] = torch.tensor(s), 1
            starts.append(i * width + first)
        inputs = {"input_ids": ids, "attention_mask": mask}
    rows = [slice(a + len(p) - 1, a + len(s) - 1) for a, p, s in zip(starts, case.prompts, sequences, strict=True)]
    return Batch(inputs=inputs, rows=rows)


def model_logprobs(logits_RV: Tensor, ids: list[int]) -> np.ndarray[Any, Any]:
    """What the engine says of given tokens under these logits, [R] float32."""
    n = len(ids)
    zeros, ones = np.zeros(n), np.ones(n)
    columns = SamplerRows(
        temperature=ones, top_p=ones, top_k=zeros.astype(np.int64), min_p=zeros.astype(np.float32), seed=zeros.astype(np.uint64),
        sample_index=zeros.astype(np.uint32), position=zeros.astype(np.uint32), forced=np.array(ids), want_model=ones.astype(np.bool_),
        want_entropy=zeros.astype(np.bool_), banned=[[]] * n, vocab_limit=logits_RV.shape[1],
    )  # fmt: skip
    builds = available_builds()
    sample = NativeOps(load_build(builds[0])).sample if builds else reference_sample
    return sample(logits_RV.detach().contiguous(), columns).model_logprob


def equal_tokens(case: Case, batch: Batch, logits: Tensor) -> tuple[int, int]:
    """(equal in every bit, all) of the sampled tokens' logprobs: of these logits against the engine's."""
    flat, equal = logits.flatten(0, -2), 0
    for rows, ids, want in zip(batch.rows, case.samples, case.model_logprobs, strict=True):
        got = model_logprobs(flat[rows], ids)
        equal += int((got.view(np.int32) == np.array(want, np.float32).view(np.int32)).sum())
    return equal, sum(map(len, case.samples))
