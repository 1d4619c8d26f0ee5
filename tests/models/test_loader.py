import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync.rollout.errors import ConfigError
from rollsync.rollout.models.config import DecoderConfig, load_decoder_config
from rollsync.rollout.models.loader import CheckpointError, iter_checkpoint, load_weights
from rollsync.rollout.models.params import hf_shapes, param_specs
from safetensors.torch import load_file, save_file


class Store:
    """Keeps parameters as plain tensors; the first write decides the dtype."""

    def __init__(self, cfg: DecoderConfig, tp_size: int = 1, tp_rank: int = 0) -> None:
        self.params = {name: torch.full(spec.shape, torch.nan) for name, spec in param_specs(cfg, tp_size, tp_rank).items()}
        self.dtypes: set[torch.dtype] = set()

    def write(self, param: str, dst_row: int, dst_col: int, tensor: torch.Tensor) -> None:
        self.dtypes.add(tensor.dtype)
        target = self.params[param][dst_row : dst_row + len(tensor)]
        if tensor.ndim == 2:
            target = target[:, dst_col : dst_col + tensor.shape[1]]
        assert target.shape == tensor.shape
        target.copy_(tensor)


def load(folder: Path, load_format: str = "auto", **kwargs: Any) -> Store:
    cfg = load_decoder_config(folder)
    store = Store(cfg, kwargs.get("tp_size", 1), kwargs.get("tp_rank", 0))
    load_weights(cfg, folder, load_format, store, **{"dtype": torch.float32, **kwargs})
    assert not any(p.isnan().any() for p in store.params.values())
    return store


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2"])
def test_loads_what_transformers_saves(saved: Any, name: str) -> None:
    folder, weights = saved[name]
    assert (folder / "model.safetensors.index.json").exists() == (name == "qwen2")
    params = load(folder).params
    attn = "model.layers.1.self_attn."
    assert torch.equal(params["layers.1.qkv"], torch.cat([weights[f"{attn}{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(params["layers.1.mlp_down"], weights["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(params.get("head", params["embed"]), weights["lm_head.weight"])
    if name == "qwen2":
        assert torch.equal(params["layers.1.qkv_bias"], torch.cat([weights[f"{attn}{p}_proj.bias"] for p in "qkv"]))


def test_casts_to_the_engine_dtype_and_shards(saved: Any) -> None:
    folder, weights = saved["llama"]
    whole = load(folder, dtype=torch.bfloat16)
    ranks = [load(folder, dtype=torch.bfloat16, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert whole.dtypes == {torch.bfloat16}
    down = torch.cat([rank.params["layers.0.mlp_down"] for rank in ranks], dim=1)
    assert torch.equal(down, weights["model.layers.0.mlp.down_proj.weight"].bfloat16().float())
    assert torch.equal(torch.cat([rank.params["head"] for rank in ranks]), whole.params["head"])


def test_iterates_every_tensor_once(saved: Any) -> None:
    for name in ("llama", "tied", "qwen2"):
        folder, weights = saved[name]
        cfg = load_decoder_config(folder)
        seen = list(iter_checkpoint(folder, "safetensors", cfg))
        assert sorted(n for n, _ in seen) == sorted(hf_shapes(cfg))
        assert all(torch.equal(tensor, weights[n]) for n, tensor in seen)


def test_random_weights_repeat_and_differ_by_tensor(saved: Any) -> None:
    cfg = load_decoder_config(saved["qwen2"][0])
    first, second = (dict(iter_checkpoint("nowhere", "random", cfg)) for _ in range(2))
    assert {n: tuple(t.shape) for n, t in first.items()} == hf_shapes(cfg)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert (first["model.layers.0.input_layernorm.weight"] == 1).all()
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
    assert first["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    load(saved["qwen2"][0], "random")


def changed(saved: Any, name: str, tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a saved model with tensors replaced, added or (None) removed."""
    folder = tmp_path / "changed"
    shutil.copytree(saved[name][0], folder)
    tensors = load_file(folder / "model.safetensors")
    for tensor, value in changes.items():
        tensors.pop(tensor, None)
        if value is not None:
            tensors[tensor] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_one_error_names_every_problem_before_anything_is_written(saved: Any, tmp_path: Path) -> None:
    changes = {"model.norm.weight": None, "extra.weight": torch.zeros(3), "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 96)}
    folder = changed(saved, "llama", tmp_path, **changes)
    cfg = load_decoder_config(folder)
    store = Store(cfg)
    with pytest.raises(CheckpointError, match="3 problems") as error:
        load_weights(cfg, folder, "auto", store, dtype=torch.float32)
    for part in ("missing model.norm.weight [64]", "unknown extra.weight [3]", "up_proj.weight is [64, 96], must be [96, 64]"):
        assert part in str(error.value)
    assert not store.dtypes


def test_a_tied_head_may_be_present_if_it_is_the_embedding(saved: Any, tmp_path: Path) -> None:
    embed = saved["tied"][1]["model.embed_tokens.weight"]
    folder = changed(saved, "tied", tmp_path, **{"lm_head.weight": embed.clone(), "rotary_emb.inv_freq": torch.zeros(2)})
    assert "head" not in load(folder).params
    shutil.rmtree(folder)
    folder = changed(saved, "tied", tmp_path, **{"lm_head.weight": embed + 1})
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight"):
        load(folder)


def test_formats_that_do_not_fit_are_named(saved: Any, tmp_path: Path) -> None:
    folder = saved["llama"][0]
    cfg = load_decoder_config(folder)
    with pytest.raises(ConfigError, match=r"gguf needs a \.gguf file"):
        list(iter_checkpoint(folder, "gguf", cfg))
    with pytest.raises(ConfigError, match="auto, safetensors, gguf, random or dummy, got 'pickle'"):
        list(iter_checkpoint(folder, "pickle", cfg))
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        list(iter_checkpoint(tmp_path, "auto", cfg))
    index = tmp_path / "model.safetensors.index.json"
    outside = shutil.copy(folder / "model.safetensors", tmp_path.parent / "outside.safetensors")
    for text, said in (
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"weight_map": ["a"]}', "weight_map must be an object"),
        ('{"weight_map": {}}', "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', "weight_map must be an object"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"shards that are not there: gone\.safetensors"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "only files beside it"),
        (json.dumps({"weight_map": {"a": str(outside)}}), "only files beside it"),
    ):
        index.write_text(text)
        with pytest.raises(ConfigError, match=said):
            list(iter_checkpoint(tmp_path, "auto", cfg))
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    index.unlink()
    with pytest.raises(CheckpointError, match=r"model.norm.weight is I8 \(supported: BF16"):
        list(iter_checkpoint(tmp_path, "auto", cfg))


@pytest.mark.parametrize("size", [0, 7, 300, 20_000])
def test_a_truncated_file_is_named(saved: Any, tmp_path: Path, size: int) -> None:
    folder = changed(saved, "llama", tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(folder)


def test_a_missing_head_says_what_could_be_meant(saved: Any, tmp_path: Path) -> None:
    folder = changed(saved, "llama", tmp_path, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight \[96, 64\] \(if .* tie_word_embeddings: true"):
        load(folder)


def test_progress_ends_at_the_total(saved: Any) -> None:
    calls: list[tuple[int, int]] = []
    load(saved["llama"][0], progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(t.numel() * 4 for t in saved["llama"][1].values())
    assert calls == sorted(calls)
