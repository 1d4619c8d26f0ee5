import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollsync.rollout.errors import ConfigError, UnsupportedModel
from rollsync.rollout.models.config import load_decoder_config, parse_hf_config, resolve_model_path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}


def test_reads_what_transformers_saves(saved: Any) -> None:
    for name, bias in (("llama", False), ("tied", False), ("qwen2", True)):
        folder, weights = saved[name]
        cfg = load_decoder_config(folder)
        assert (cfg.vocab_size, cfg.hidden_size, cfg.num_layers, cfg.num_heads, cfg.num_kv_heads) == (96, 64, 2, 8, 4)
        assert cfg.head_dim == (16 if name == "tied" else 8)
        assert cfg.tie_word_embeddings == (name == "tied")
        assert (cfg.qkv_bias, cfg.dtype, cfg.eos_token_ids, cfg.bos_token_id) == (bias, "float32", (2,), 1)
        unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
        assert cfg.num_parameters == sum(unique.values())


def test_old_and_new_rope_layouts_mean_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = parse_hf_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = parse_hf_config({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling.kind, old.rope_scaling.original_max_position_embeddings) == (5e5, "llama3", 64)
    assert parse_hf_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling.factor == 2.0
    assert parse_hf_config(LLAMA).rope_theta == 10000.0


def test_defaults_follow_transformers() -> None:
    cfg = parse_hf_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rms_norm_eps, cfg.tie_word_embeddings) == (8, 8, 1e-6, False)
    assert parse_hf_config({**LLAMA, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert parse_hf_config({**LLAMA, "dtype": "float16"}).dtype == "float16"
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert parse_hf_config(mistral).family == "llama"


@pytest.mark.parametrize(
    ("changes", "named", "supported"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel", "LlamaForCausalLM"),
        ({"architectures": None}, "none", "Qwen2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn", "llama3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "layer type", "one set"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "without low_freq_factor", ""),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5", "1.0"),
        ({"attention_bias": True}, "attention_bias", "no bias"),
        ({"mlp_bias": True}, "mlp_bias", "no bias"),
        ({"hidden_act": "gelu"}, "'gelu'", "silu"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window 4096", "full attention"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window 4096", "full attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32}, "sliding_window 32", "full"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "GGUF"),
        ({"torch_dtype": "float64"}, "float64", "bfloat16"),
        ({"hidden_size": None}, "hidden_size is missing", ""),
    ],
)
def test_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], named: str, supported: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        parse_hf_config({**LLAMA, **changes})
    assert named in str(error.value)
    assert supported in str(error.value)


def test_names_every_problem_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"hidden_act.*attention_bias.*mlp_bias"):
        parse_hf_config({**LLAMA, "hidden_act": "relu", "attention_bias": True, "mlp_bias": True})


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    def put(name: str, data: dict[str, Any]) -> None:
        (tmp_path / name).write_text(json.dumps(data))

    put("config.json", {**LLAMA, "eos_token_id": 5})
    assert load_decoder_config(tmp_path).eos_token_ids == (5,)
    put("generation_config.json", {"eos_token_id": [7, 5]})
    put("tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    put("tokenizer.json", {"added_tokens": [{"id": 3, "content": "<end>"}]})
    assert load_decoder_config(tmp_path).eos_token_ids == (3, 5, 7)
    put("tokenizer_config.json", {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}})
    assert load_decoder_config(tmp_path).eos_token_ids == (5, 7, 9)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_decoder_config(tmp_path)


def test_resolves_hub_ids_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repo = tmp_path / "hub" / "models--org--name"
    for commit in ("aaa", "bbb"):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("aaa")
    assert resolve_model_path("org/name") == repo / "snapshots" / "aaa"
    assert resolve_model_path(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError) as error:
        resolve_model_path("org/other")
    assert "models--org--other" in str(error.value)
    assert "HF_HUB_OFFLINE" in str(error.value)
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve_model_path(str(tmp_path / "weights.bin"))


def test_the_front_stays_free_of_torch() -> None:
    code = (
        "import sys\n"
        "from rollsync.rollout.models import config, params, tokenizer, gguf_cache\n"
        "bad = {'torch', 'transformers', 'tokenizers', 'jinja2', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""
