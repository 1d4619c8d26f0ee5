import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync.rollout.errors import ConfigError, UnsupportedModel
from rollsync.rollout.models.config import ARCHITECTURES, load_decoder_config, parse_hf_config, resolve_model_path
from rollsync.rollout.models.layers import rope_tables
from rollsync.rollout.models.params import num_parameters

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
    for name, bias in (("llama", False), ("tied", False), ("qwen2", True), ("qwen3", False)):
        folder, weights = saved[name]
        cfg = load_decoder_config(folder)
        assert (cfg.vocab_size, cfg.hidden_size, cfg.num_layers, cfg.num_heads, cfg.num_kv_heads) == (96, 64, 2, 8, 4)
        assert cfg.head_dim == (16 if name in ("tied", "qwen3") else 8)
        assert cfg.tie_word_embeddings == (name in ("tied", "qwen3"))
        assert (cfg.qkv_bias, cfg.dtype, cfg.eos_token_ids) == (bias, "float32", (2,))
        unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
        assert num_parameters(cfg) == sum(unique.values())


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


QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
GEMMA2, GEMMA3 = ({"architectures": [f"Gemma{i}ForCausalLM"]} for i in (2, 3))
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
SLIDE = ("sliding_attention", "full_attention")
MISTRAL = {"architectures": ["MistralForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "named", "supported"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel", "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "none", "Qwen2ForCausalLM"),
        ({"architectures": []}, "none", "Qwen2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope", "default, linear, dynamic, llama3, yarn"),
        ({"rope_parameters": {"type": "mrope"}}, "mrope", "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "layer type", "one set"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5", "1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5", "1.0"),
        ({"attention_bias": True}, "attention_bias", "no bias"),
        ({"mlp_bias": True}, "mlp_bias", "no bias"),
        ({"hidden_act": "gelu"}, "'gelu'", "silu"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types", "no window"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention", "sliding_attention"),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_types", "window 8 in every layer"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "hidden_activation 'gelu'", "gelu_pytorch_tanh"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention", "causal"),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "'linear' in sliding", "default"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "GGUF"),
        ({"torch_dtype": "float64"}, "float64", "bfloat16"),
    ],
)
def test_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], named: str, supported: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        parse_hf_config({**LLAMA, **changes})
    assert named in str(error.value)
    assert supported in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({key: 0}, f"{key} must be a whole number from 1 to") for key in LLAMA if key != "architectures"),
        *(({key: None}, f"{key} is missing") for key in LLAMA if key not in ("architectures", "num_key_value_heads")),
        ({"hidden_size": -64}, "got -64"),
        ({"hidden_size": 64.0}, "got 64.0"),
        ({"hidden_size": "64"}, "got '64'"),
        ({"hidden_size": True}, "got True"),
        ({"vocab_size": 10**5000}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be a whole number from 1 to 4096"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads 8, got 3"),
        ({"num_key_value_heads": 16}, "num_key_value_heads must be a divisor of num_attention_heads 8, got 16"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": -2}, "head_dim must be a whole number"),
        ({"hidden_size": 60}, "hidden_size must be a multiple of num_attention_heads 8"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0 and at most 1e+30, got nan"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        *(({"rope_theta": theta}, "rope_theta must be a number above 1") for theta in (0, -1e4, "1e4", float("inf"))),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta must be"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type must be a string"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing; rope_scaling.high_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim must be at least 4"),
        ({"rope_scaling": {**YARN, "beta_fast": "a"}}, "beta_fast must be"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5}}, "rope_scaling and rope_parameters say different things"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"torch_dtype": 16}, "torch_dtype must be a string"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id, a list of them or null, got '2'"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be a whole number from 1"),
        ({**GEMMA2, "sliding_window": None}, "sliding_window must be a whole number: some of the layers slide, got None"),
        ({**GEMMA2, "final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta must be absent: here are"),
        ({**GEMMA3, "rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_parameters.full_attention.rope_theta must be"),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types must be one for each of the 2 layers"),
    ],
)
def test_values_no_model_can_have_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hf_config({**LLAMA, **changes}, where="here/config.json")
    assert not isinstance(error.value, UnsupportedModel)
    assert str(error.value).startswith("here/config.json: ")
    assert said in str(error.value)
    assert len(str(error.value)) < 1000


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**64, 10**400, 0.0, -0.5, 1e308, float("nan"), float("inf"), "", "x", "1", [], [None], [1, -1],
    ["sliding_attention"] * 2, {}, {"rope_type": "yarn"}, {"type": None, "factor": None}, {"full_attention": {}}, {"": [[]]},
]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_value_of_any_key_raises_anything_else(architecture: str) -> None:
    """Each key of a config that uses all of them, with each odd value: a model or a ConfigError."""
    whole = {
        **LLAMA, "architectures": [architecture], "head_dim": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1,
        "layer_types": None, "eos_token_id": [2], "torch_dtype": "float32", "dtype": None, "rope_theta": 1e4, "partial_rotary_factor": None,
        "original_max_position_embeddings": None, "quantization_config": None, "rope_scaling": None, "hidden_activation": None,
        "query_pre_attn_scalar": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window_pattern": 2,
        "rope_local_base_freq": 1e4, "use_bidirectional_attention": None,
    }  # fmt: skip
    parse_hf_config(whole)
    rotary: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    more = ("type", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale")
    tried = [{**whole, key: value} for key in (*whole, "rope_parameters") for value in ODD]
    tried += [{**whole, "rope_parameters": {**rotary, key: value}} for key in (*rotary, *more) for value in ODD]
    accepted = 0
    for raw in tried:
        try:
            cfg = parse_hf_config(raw)
        except ConfigError:
            continue
        accepted += 1
        assert rope_tables(cfg, 4, torch.float32)[0].isfinite().all(), raw
    assert 100 < accepted < len(tried) / 2


def test_names_every_problem_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"hidden_act.*attention_bias.*mlp_bias"):
        parse_hf_config({**LLAMA, "hidden_act": "relu", "attention_bias": True, "mlp_bias": True})


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**MISTRAL, "sliding_window": None}, ()),
        ({**MISTRAL, "sliding_window": 8}, (8,) * 4),
        ({**MISTRAL, "sliding_window": 128}, ()),
        ({**MISTRAL, "max_position_embeddings": 8192}, (4096,) * 4),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, (8,) * 4),
        ({**QWEN2, "sliding_window": 8}, ()),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8}, ()),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (0, 0, 0, 8)),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8,) * 4),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 8, "layer_types": [*SLIDE, *SLIDE]}, (8, 0, 8, 0)),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        ({**GEMMA2, "sliding_window": 8}, (8, 0, 8, 0)),
        ({**GEMMA3, "sliding_window": 8}, (8, 8, 8, 8)),
        ({**GEMMA3, "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, 0, 8)),
        ({**GEMMA3, "sliding_window": 4096, "layer_types": [*SLIDE, *SLIDE]}, (128, 0, 128, 0)),
    ],
)
def test_windows_follow_the_rule_of_the_family(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_hf_config({**LLAMA, "num_hidden_layers": 4, **changes}).windows == windows


def test_gemma_3_has_two_thetas() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse_hf_config({**LLAMA, **GEMMA3, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear})
    both = {"full_attention": {**linear, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    new = parse_hf_config({**LLAMA, **GEMMA3, "rope_parameters": both})
    assert old == new
    assert (old.rope_theta, old.rope_scaling.factor, old.local_rope_theta) == (5e5, 8.0, 2e4)
    bare = parse_hf_config({**LLAMA, **GEMMA3})
    assert (bare.rope_theta, bare.rope_scaling.kind, bare.local_rope_theta) == (1e6, "default", 1e4)
    second = parse_hf_config({**LLAMA, **GEMMA2})
    assert (second.rope_theta, second.local_rope_theta) == (1e4, 0.0)


def put(folder: Path, name: str, data: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(data))


def test_eos_is_the_union_of_all_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "config.json", {**LLAMA, "eos_token_id": 5})
    assert load_decoder_config(tmp_path).eos_token_ids == (5,)
    put(tmp_path, "generation_config.json", {"eos_token_id": [7, 5]})
    put(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    put(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 3, "content": "<end>"}], "model": {"vocab": {"a": 0, "<old>": 4}}})
    assert load_decoder_config(tmp_path).eos_token_ids == (3, 5, 7)
    put(tmp_path, "tokenizer_config.json", {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}})
    assert load_decoder_config(tmp_path).eos_token_ids == (5, 7, 9)
    put(tmp_path, "tokenizer_config.json", {"eos_token": None})
    put(tmp_path, "special_tokens_map.json", {"eos_token": "<old>"})
    assert load_decoder_config(tmp_path).eos_token_ids == (4, 5, 7)
    put(tmp_path, "generation_config.json", {"eos_token_id": None})
    put(tmp_path, "config.json", {**LLAMA, "eos_token_id": [-1, 96, 1 << 40]})
    assert not caplog.records
    assert load_decoder_config(tmp_path).eos_token_ids == (4,)
    assert "EOS ids beyond the model's 96 embedding rows are ignored: -1, 96, 1099511627776" in caplog.text


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("generation_config.json", {"eos_token_id": "</s>"}, "generation_config.json: eos_token_id must be a token id"),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "generation_config.json: eos_token_id must be a token id"),
        ("tokenizer_config.json", {"eos_token": 2}, "tokenizer_config.json: eos_token must be a string"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "tokenizer_config.json: added_tokens_decoder must"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["a"]}, "tokenizer_config.json: added_tokens_decoder must"),
        ("tokenizer.json", {"model": {"vocab": {}}}, "tokenizer.json: model.vocab and added_tokens must"),
        ("tokenizer.json", {"model": {"vocab": {"a": "0"}}}, "tokenizer.json: model.vocab and added_tokens must"),
        ("tokenizer.json", {"added_tokens": [{"content": "a"}]}, "tokenizer.json: model.vocab and added_tokens are not"),
    ],
)
def test_damaged_tokenizer_files_are_named(tmp_path: Path, name: str, data: dict[str, Any], said: str) -> None:
    put(tmp_path, "config.json", LLAMA)
    put(tmp_path, "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    put(tmp_path, name, data)
    with pytest.raises(ConfigError) as error:
        load_decoder_config(tmp_path)
    assert said in str(error.value)


def test_the_ids_a_tokenizer_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    put(model, "config.json", LLAMA)
    assert load_decoder_config(model).num_token_ids == 0
    with pytest.raises(ConfigError, match=r"other holds no tokenizer\.json"):
        load_decoder_config(model, other)
    put(other, "tokenizer.json", {"model": {"vocab": [["a", -1.0], ["b", -2.5]]}, "added_tokens": None})
    assert load_decoder_config(model, other).num_token_ids == 2
    put(other, "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 40}}, "added_tokens": [{"id": 41, "content": "<a>"}]})
    assert load_decoder_config(model, other).num_token_ids == 42
    put(other, "tokenizer_config.json", {"added_tokens_decoder": {"60": {"content": "<b>"}}})
    assert load_decoder_config(model, other).num_token_ids == 61
    assert not caplog.records
    put(other, "tokenizer_config.json", {"added_tokens_decoder": {"200": {"content": "<b>"}}})
    assert load_decoder_config(model, other).num_token_ids == 96
    assert "96 rows, but the tokenizer knows 201 ids" in caplog.text


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
