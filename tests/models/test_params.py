import dataclasses
from typing import Any

import pytest
import torch
from rollsync.rollout.errors import ConfigError
from rollsync.rollout.models.config import DecoderConfig
from rollsync.rollout.models.params import UnknownTensor, check_tensors, head_rows, hf_shapes, param_specs, plan

CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=48,
    hidden_size=12,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    intermediate_size=20,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    qkv_bias=True,
    max_position_embeddings=64,
)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True, qkv_bias=False, qk_norm=True, family="qwen3")


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim == 2 else tensor[:, None]


def numbered(cfg: DecoderConfig) -> dict[str, torch.Tensor]:
    """A checkpoint whose every element is a number of its own."""
    first, tensors = 0, {}
    for name, shape in hf_shapes(cfg).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count).reshape(shape)
        first += count
    return tensors


def shard(cfg: DecoderConfig, rank: int, size: int) -> dict[str, torch.Tensor]:
    """One rank's parameters, filled by the plan; every element must be written exactly once."""
    local = {name: torch.full(spec.shape, -1) for name, spec in param_specs(cfg, size, rank).items()}
    for name, source in numbered(cfg).items():
        for w in plan(cfg, name, rank, size):
            target = as_matrix(local[w.param])[w.dst_row : w.dst_row + w.rows, w.dst_col : w.dst_col + w.cols]
            assert target.shape == (w.rows, w.cols)
            assert (target == -1).all()
            target.copy_(as_matrix(source)[w.src_row : w.src_row + w.rows, w.src_col : w.src_col + w.cols])
    for name, tensor in local.items():
        assert (tensor >= 0).all(), name
    return local


@pytest.mark.parametrize("cfg", [CONFIG, TIED], ids=["untied-bias", "tied"])
def test_one_rank_holds_the_fused_checkpoint(cfg: DecoderConfig) -> None:
    local, hf = shard(cfg, 0, 1), numbered(cfg)
    for i in range(cfg.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        assert torch.equal(local[f"layers.{i}.qkv"], torch.cat([hf[f"{attn}{p}_proj.weight"] for p in "qkv"]))
        assert torch.equal(local[f"layers.{i}.gate_up"], torch.cat([hf[f"{mlp}{p}_proj.weight"] for p in ("gate", "up")]))
        assert torch.equal(local[f"layers.{i}.attn_out"], hf[f"{attn}o_proj.weight"])
        assert torch.equal(local[f"layers.{i}.mlp_down"], hf[f"{mlp}down_proj.weight"])
        assert torch.equal(local[f"layers.{i}.attn_norm"], hf[f"model.layers.{i}.input_layernorm.weight"])
        assert torch.equal(local[f"layers.{i}.mlp_norm"], hf[f"model.layers.{i}.post_attention_layernorm.weight"])
        if cfg.qkv_bias:
            assert torch.equal(local[f"layers.{i}.qkv_bias"], torch.cat([hf[f"{attn}{p}_proj.bias"] for p in "qkv"]))
    assert torch.equal(local["embed"], hf["model.embed_tokens.weight"])
    assert ("head" in local) != cfg.tie_word_embeddings


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cfg", [CONFIG, TIED], ids=["untied-bias", "tied"])
def test_shards_together_are_the_original(cfg: DecoderConfig, size: int) -> None:
    ranks = [shard(cfg, rank, size) for rank in range(size)]
    hf, d = numbered(cfg), cfg.head_dim
    q, kv, inter = cfg.num_heads // size * d, cfg.num_kv_heads // size * d, cfg.intermediate_size // size

    def gather(param: str, first: int, rows: int) -> torch.Tensor:
        return torch.cat([rank[param][first : first + rows] for rank in ranks])

    for i in range(cfg.num_layers):
        for part, first, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            assert torch.equal(gather(f"layers.{i}.qkv", first, rows), hf[f"model.layers.{i}.self_attn.{part}_proj.weight"])
            if cfg.qkv_bias:
                assert torch.equal(gather(f"layers.{i}.qkv_bias", first, rows), hf[f"model.layers.{i}.self_attn.{part}_proj.bias"])
        for part, first in (("gate", 0), ("up", inter)):
            assert torch.equal(gather(f"layers.{i}.gate_up", first, inter), hf[f"model.layers.{i}.mlp.{part}_proj.weight"])
        for param, name in (("attn_out", "self_attn.o_proj"), ("mlp_down", "mlp.down_proj")):
            columns = torch.cat([rank[f"layers.{i}.{param}"] for rank in ranks], dim=1)
            assert torch.equal(columns, hf[f"model.layers.{i}.{name}.weight"])
    for rank in ranks:
        assert torch.equal(rank["embed"], hf["model.embed_tokens.weight"])
        assert torch.equal(rank["final_norm"], hf["model.norm.weight"])
        for name in ("q_norm", "k_norm") if cfg.qk_norm else ():
            assert torch.equal(rank[f"layers.1.{name}"], hf[f"model.layers.1.self_attn.{name}.weight"])
    spans = [head_rows(cfg, rank, size) for rank in range(size)]
    assert [i for first, rows in spans for i in range(first, first + rows)] == list(range(cfg.vocab_size))
    if not cfg.tie_word_embeddings:
        assert torch.equal(torch.cat([rank["head"] for rank in ranks]), hf["lm_head.weight"])


def test_kinds_say_what_is_sharded() -> None:
    kinds = {name: spec.kind for name, spec in param_specs(CONFIG, 2).items() if not name.startswith("layers.1.")}
    assert {n for n, k in kinds.items() if k == "row"} == {"layers.0.attn_out", "layers.0.mlp_down"}
    assert {n for n, k in kinds.items() if k == "column"} == {"layers.0.qkv", "layers.0.gate_up", "head"}
    assert {n for n, k in kinds.items() if k == "embedding"} == {"embed"}
    assert {n for n, k in kinds.items() if k == "vector"} == {"layers.0.qkv_bias", "layers.0.attn_norm", "layers.0.mlp_norm", "final_norm"}


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.qkv_proj.weight", "embed", "model.layers.0.self_attn.o_proj.bias"])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownTensor) as error:
        plan(CONFIG, name)
    assert isinstance(error.value, KeyError)
    assert name in str(error.value)
    assert "model.layers.{i}.mlp.up_proj.weight" in str(error.value)


def test_a_layer_too_many_is_named() -> None:
    with pytest.raises(UnknownTensor, match="it has 2 layers"):
        plan(CONFIG, "model.layers.2.mlp.up_proj.weight")


def test_accepted_but_stored_nowhere() -> None:
    assert plan(TIED, "lm_head.weight") == ()
    assert plan(CONFIG, "model.layers.0.self_attn.rotary_emb.inv_freq") == ()
    assert len(plan(CONFIG, "lm_head.weight")) == 1


def test_tensor_parallel_sizes_that_do_not_divide_are_refused_by_name() -> None:
    for call in (lambda: param_specs(CONFIG, 8), lambda: plan(CONFIG, "lm_head.weight", 0, 8)):
        with pytest.raises(ConfigError, match=r"size 8 must divide num_kv_heads = 4, intermediate_size = 20"):
            call()
    with pytest.raises(ConfigError, match="rank 2 of size 2"):
        plan(CONFIG, "lm_head.weight", 2, 2)


def test_check_tensors_lists_everything_wrong() -> None:
    shapes: dict[str, Any] = dict(hf_shapes(TIED))
    assert check_tensors(TIED, {**shapes, "lm_head.weight": (48, 12), "rotary_emb.inv_freq": (1,)}) == []
    del shapes["model.norm.weight"]
    shapes["model.layers.0.mlp.up_proj.weight"] = (12, 20)
    shapes["extra"] = (3,)
    shapes["lm_head.weight"] = (12, 48)
    problems = "\n".join(check_tensors(TIED, shapes))
    assert problems.count("\n") == 3
    for part in (
        "missing model.norm.weight [12]",
        "up_proj.weight is [12, 20], must be [20, 12]",
        "unknown extra",
        "lm_head.weight is [12, 48]",
    ):
        assert part in problems
