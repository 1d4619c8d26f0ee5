from typing import Any

import pytest
import torch
from rollsync.rollout.models.config import parse_hf_config
from rollsync.rollout.models.layers import rope_tables
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "rope"),
    [
        (64, {"rope_theta": 100000.0}),
        (128, {"rope_theta": 1000000}),
        (10, {"rope_theta": 10000.0}),
        (64, {"rope_theta": 10000.0, "rope_type": "linear", "factor": 3.0}),
        (64, {"rope_theta": 500000.0, **LLAMA3}),
        (128, {"rope_theta": 500000.0, **LLAMA3}),
    ],
)
def test_tables_are_transformers_bits(head_dim: int, rope: dict[str, Any], dtype: torch.dtype) -> None:
    P = 1003
    hf = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=2048, rope_parameters=dict(rope)
    )
    cfg = parse_hf_config({**hf.to_dict(), "architectures": ["LlamaForCausalLM"]})
    want = LlamaRotaryEmbedding(hf)(torch.zeros(1, dtype=dtype), torch.arange(P)[None])
    for table, reference in zip(rope_tables(cfg, P, dtype), want, strict=True):
        assert table.shape == (P, head_dim // 2)
        assert table.is_contiguous()
        assert torch.equal(torch.cat((table, table), dim=-1), reference[0])
    # a decode step asks transformers for one position: the same bits
    alone = LlamaRotaryEmbedding(hf)(torch.zeros(1, dtype=dtype), torch.tensor([[P - 1]]))
    assert torch.equal(rope_tables(cfg, P, dtype)[0][-1], alone[0][0, 0, : head_dim // 2])
