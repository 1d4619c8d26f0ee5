from typing import Any

import pytest
import torch
from rollsync.rollout.models.config import parse_hf_config
from rollsync.rollout.models.layers import rope_tables
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
P, CONTEXT = 1003, 2048


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "theta", "rope"),
    [
        (64, 100000.0, {}),
        (128, 1000000, {}),
        (10, 10000.0, {"rope_type": "default"}),
        (64, 10000.0, {"rope_type": "linear", "factor": 3}),
        (64, 10000.0, {"rope_type": "dynamic", "factor": 1.1}),
        (20, 12345.0, {"rope_type": "dynamic", "factor": 7.3}),
        (64, 500000.0, LLAMA3),
        (128, 500000.0, LLAMA3),
        (64, 500000.0, {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}),
        (128, 1000000.0, YARN),
        (64, 10000, {"rope_type": "yarn", "factor": 8}),
        (64, 10000.0, {**YARN, "factor": None}),
        (64, 10000.0, {**YARN, "attention_factor": 0.8, "beta_fast": 20, "beta_slow": 2.5}),
        (64, 10000.0, {**YARN, "truncate": False, "mscale": 0.707, "mscale_all_dim": 0.9}),
        (64, 10000.0, {**YARN, "mscale": 1.2, "beta_fast": 1e4, "beta_slow": 1e4}),
    ],
)
def test_tables_are_transformers_bits(head_dim: int, theta: float, rope: dict[str, Any], dtype: torch.dtype, old: bool) -> None:
    shape = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim, "max_position_embeddings": CONTEXT}
    if old:
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        rotary: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling or None}
    else:
        rotary = {"rope_parameters": {**rope, "rope_theta": theta}}
    rest = {"vocab_size": 96, "num_hidden_layers": 1, "intermediate_size": 96, "architectures": ["LlamaForCausalLM"]}
    cfg = parse_hf_config({**shape, **rest, **rotary})
    hf = LlamaConfig(**shape, **{key: dict(value) if isinstance(value, dict) else value for key, value in rotary.items()})
    want = LlamaRotaryEmbedding(hf)(torch.zeros(1, dtype=dtype), torch.arange(P)[None])
    tables = rope_tables(cfg, P, dtype)
    for table, reference in zip(tables, want, strict=True):
        assert table.shape == (P, head_dim // 2)
        assert table.is_contiguous()
        assert torch.equal(torch.cat((table, table), dim=-1), reference[0])
    # a decode step asks transformers for one position: the same bits
    alone = LlamaRotaryEmbedding(hf)(torch.zeros(1, dtype=dtype), torch.tensor([[P - 1]]))
    assert torch.equal(tables[0][-1], alone[0][0, 0, : head_dim // 2])
