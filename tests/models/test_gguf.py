import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollsync.rollout.errors import ConfigError, UnsupportedModel
from rollsync.rollout.models.config import load_decoder_config
from rollsync.rollout.models.dequantize import FORMATS, dequantize
from rollsync.rollout.models.gguf import GgufFile
from rollsync.rollout.models.loader import cached_checkpoint, iter_checkpoint

gguf = pytest.importorskip("gguf", reason="the `gguf` distribution writes the test files and is the reference")

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the rows of q and k."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, family: str, weights: dict[str, torch.Tensor], bpe: dict[str, Any], tied: bool, quantise: bool = False) -> None:
    """A tiny model of conftest as llama.cpp would convert it; matrices in Q8_0 if `quantise`."""
    w = gguf.GGUFWriter(path, family)
    w.add_context_length(128)
    w.add_embedding_length(64)
    w.add_block_count(2)
    w.add_feed_forward_length(96)
    w.add_head_count(8)
    w.add_head_count_kv(4)
    w.add_rope_freq_base(50000.0)
    w.add_layer_norm_rms_eps(1e-5)
    if tied:
        w.add_key_length(16)
        w.add_rope_dimension_count(16)
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm" if family == "llama" else "qwen2")
    w.add_token_list(tokens)
    w.add_token_types([1] * len(tokens))
    w.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    w.add_eos_token_id(2)
    w.add_bos_token_id(1)
    w.add_add_bos_token(False)
    for name, tensor in weights.items():
        if tied and name == "lm_head.weight":
            continue
        stem, kind = name.removeprefix("model.layers.").rsplit(".", 1)
        layer, _, rest = stem.partition(".")
        own = f"blk.{layer}.{HF_TO_GGUF[rest]}.{kind}" if layer.isdigit() else f"{HF_TO_GGUF[stem]}.{kind}"
        if family == "llama" and ("attn_q." in own or "attn_k." in own):
            tensor = permute(tensor, 8 if "attn_q." in own else 4)
        data = tensor.numpy()
        if quantise and data.ndim == 2:
            raw = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(own, gguf.quants.quantize(data, raw), raw_dtype=raw)
        else:
            w.add_tensor(own, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("number", FORMATS)
def test_dequantises_to_the_reference_bits(number: int) -> None:
    fmt = FORMATS[number]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (8, 3 * fmt.bytes), dtype=np.uint8)
    if fmt.elements > 1:  # any bits are valid quants, but keep the half-precision scales finite
        halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(fmt.name, (0,))
        for block in range(3):
            for at in halves:
                scales = rng.normal(size=8).astype(np.float16)
                blocks[:, block * fmt.bytes + at : block * fmt.bytes + at + 2] = scales[:, None].view(np.uint8)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number))
    got = dequantize(blocks, fmt)
    assert got.dtype == np.float32
    assert got.shape == (8, 3 * fmt.elements)
    np.testing.assert_array_equal(got.view(np.uint32), np.ascontiguousarray(want).view(np.uint32))
    assert gguf.GGMLQuantizationType(number).name == fmt.name
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (fmt.elements, fmt.bytes)


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2", "qwen3"])
def test_a_converted_model_reads_back_as_the_original(saved: Any, bpe: Any, tmp_path: Path, name: str) -> None:
    folder, weights = saved[name]
    path = tmp_path / "model.gguf"
    tied = name in ("tied", "qwen3")
    write_gguf(path, "llama" if name == "tied" else name, weights, bpe, tied)
    cfg, original = load_decoder_config(path), load_decoder_config(folder)
    same = ("family", "num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings", "qkv_bias", "qk_norm", "vocab_size", "eos_token_ids")
    for field in same:
        assert getattr(cfg, field) == getattr(original, field), field
    assert (cfg.rope_theta, cfg.rms_norm_eps, cfg.num_token_ids) == (50000.0, 1e-5, 96)  # the tokenizer has more
    tensors = dict(iter_checkpoint(path, "auto", cfg))
    assert sorted(tensors) == sorted(n for n in weights if n != "lm_head.weight" or not tied)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in tensors.items())


def test_the_cached_folder_is_a_model_transformers_loads(saved: Any, bpe: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", saved["tied"][1], bpe, tied=True, quantise=True)
    calls: list[tuple[int, int]] = []
    folder = cached_checkpoint(path, tmp_path / "cache", progress=lambda done, total: calls.append((done, total)))
    assert folder.parent == tmp_path / "cache"
    assert calls[-1][0] == calls[-1][1] > 0
    assert load_decoder_config(folder) == load_decoder_config(path)
    direct = {name: tensor.bfloat16() for name, tensor in iter_checkpoint(path, "gguf", load_decoder_config(path))}
    cached = dict(iter_checkpoint(folder, "safetensors", load_decoder_config(folder)))
    assert list(direct) and all(torch.equal(cached[name], direct[name]) for name in direct)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    assert torch.equal(model.model.layers[1].self_attn.k_proj.weight, direct["model.layers.1.self_attn.k_proj.weight"])
    assert AutoTokenizer.from_pretrained(folder).decode([70, 71, 72])

    calls.clear()
    assert cached_checkpoint(path, tmp_path / "cache", progress=lambda done, total: calls.append((done, total))) == folder
    assert not calls
    os.utime(path, (1, 1))
    assert cached_checkpoint(path, tmp_path / "cache") != folder
    assert not [f for f in (tmp_path / "cache").iterdir() if f.name.startswith(".")]


def test_a_failed_conversion_leaves_nothing_behind(saved: Any, bpe: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", saved["llama"][1], bpe, tied=False)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_checkpoint(path, tmp_path / "cache", progress=interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_processes_may_convert_at_once(saved: Any, bpe: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", saved["llama"][1], bpe, tied=False)
    folders = []

    def meanwhile(done: int, total: int) -> None:
        if not folders:  # another process finishes while this one is writing
            folders.append(cached_checkpoint(path, tmp_path / "cache"))

    assert cached_checkpoint(path, tmp_path / "cache", progress=meanwhile) == folders[0]
    assert list((tmp_path / "cache").iterdir()) == folders


def test_cache_folder_follows_the_environment(saved: Any, bpe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2", saved["qwen2"][1], bpe, tied=False)
    monkeypatch.setenv("ROLLSYNC_CACHE", str(tmp_path / "elsewhere"))
    assert cached_checkpoint(path).parent == tmp_path / "elsewhere"


def test_what_cannot_be_read_is_named(saved: Any, bpe: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model at all")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        GgufFile(other)
    with pytest.raises(ConfigError, match="is not a file"):
        load_decoder_config(tmp_path / "gone.gguf")
    writer = gguf.GGUFWriter(other, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'mamba' is not supported \(supported: llama, qwen2, qwen3\)"):
        GgufFile(other)
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "llama", saved["llama"][1], bpe, tied=False)
    data = whole.read_bytes()
    for size, message in ((60, "inside its header"), (len(data) - 40, "cut short")):
        other.write_bytes(data[:size])
        with pytest.raises(ConfigError, match=message):
            GgufFile(other)


def test_unsupported_tensor_types_and_roles_are_all_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(2)
    q5_k = gguf.GGMLQuantizationType.Q5_K
    writer.add_tensor("token_embd.weight", np.zeros((2, 176), np.uint8), raw_dtype=q5_k)
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel) as error:
        GgufFile(tmp_path / "m.gguf")
    for part in ("token_embd.weight has type Q5_K", "Q4_K", "rope_freqs.weight has no role"):
        assert part in str(error.value)


def metadata(path: Path, **values: Any) -> GgufFile:
    """A file of a one-tensor llama with metadata of its own: `a__b` for llama.a.b."""
    writer = gguf.GGUFWriter(path, "llama")
    defaults = {"context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "attention__head_count": 2}
    for key, value in {**defaults, "attention__layer_norm_rms_epsilon": 1e-5, **values}.items():
        put = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[type(value)]
        put("llama." + key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"attention__head_count": 0}, r"llama\.attention\.head_count must be a whole number of 1 or more, got 0"),
        ({"attention__head_count": [2, 2]}, r"llama\.attention\.head_count must be a whole number of 1 or more, got \[2, 2\]"),
        ({"context_length": "64"}, r"llama\.context_length must be a whole number of 1 or more, got '64'"),
        ({"rope__freq_base": float("nan")}, r"llama\.rope\.freq_base must be a finite number above 0, got nan"),
        ({"rope__scaling__type": "longrope"}, "rope type 'longrope' .supported: default, linear"),
        ({"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 2.0}, r"llama\.rope\.scaling\.attn_factor"),
        ({"expert_count": 8}, "expert_count 8 .supported: dense"),
        ({"attention__sliding_window": 8}, "attention.sliding_window 8"),
        ({"attention__key_length": 3}, "head_dim must be even"),
    ],
)
def test_metadata_no_model_can_have_is_named(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    metadata(tmp_path / "m.gguf", **values)
    with pytest.raises(ConfigError, match=said):
        load_decoder_config(tmp_path / "m.gguf")


def test_rope_scaling_of_the_metadata(tmp_path: Path) -> None:
    values = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}
    metadata(tmp_path / "m.gguf", **values)
    scaling = load_decoder_config(tmp_path / "m.gguf").rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 16)


def test_a_file_without_its_tensors_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    metadata(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"does not hold the model its metadata describes: missing model\.layers\.0"):
        cached_checkpoint(tmp_path / "m.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_smollm2_equals_the_gguf_package(smollm: Path, smollm_reader: Any) -> None:
    """Real data: a few tensors of every type in the file, by the reference implementation."""
    ours = GgufFile(smollm)
    cfg = load_decoder_config(smollm)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.vocab_size) == (30, 9, 3, 64, 49152)
    assert (cfg.rope_theta, cfg.rms_norm_eps, cfg.tie_word_embeddings, cfg.eos_token_ids) == (100000.0, 1e-5, True, (2,))
    few = [t for t in smollm_reader.tensors if t.name.startswith(("blk.7.", "output_norm"))]
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in few}
    assert len(theirs) == 10
    for name, want in theirs.items():
        hf_name = ours._hf_name(name)
        assert hf_name is not None
        got = torch.from_numpy(ours.read(hf_name))
        if ".attn_q." in name or ".attn_k." in name:
            got = permute(got, 9 if ".attn_q." in name else 3)
        assert torch.equal(got, torch.from_numpy(np.array(want))), name
