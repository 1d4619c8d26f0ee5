"""What a decoder is, read from `config.json` or a GGUF header, and where a model's files are. Torch-free."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedModel

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
ROPE_KINDS = ("default", "linear", "llama3")
CHECKPOINT_DTYPES = ("bfloat16", "float16", "float32")

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. The names are those of transformers' `rope_parameters`."""

    kind: str = "default"
    """one of ROPE_KINDS"""
    factor: float = 1.0
    """linear and llama3: frequencies are divided by it"""
    low_freq_factor: float = 1.0
    """llama3 only, as are the two below"""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """context of pretraining, in tokens"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, SiLU-gated MLP."""

    family: str
    """"llama", "qwen2", ...: how errors and tables call it; what is computed stands in the fields below"""
    vocab_size: int
    """rows of the embedding; may exceed the tokenizer's vocabulary"""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    """the output head is the embedding matrix"""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of every query and key head, before the rotation (Qwen3, Gemma 3)"""
    windows: tuple[int, ...] = ()
    """per layer, how many keys a token sees, itself included; 0 sees all; empty: all layers see all"""
    max_position_embeddings: int
    """context in tokens"""
    eos_token_ids: tuple[int, ...] = ()
    """ids that end a sample: those of config, generation_config and tokenizer together, ascending"""
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    """of the checkpoint, one of CHECKPOINT_DTYPES"""

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones once."""
        d, per_layer = self.hidden_size, 0
        per_layer += (2 * self.q_rows + 2 * self.kv_rows) * d + 3 * self.intermediate_size * d + 2 * d
        per_layer += self.q_rows + 2 * self.kv_rows if self.qkv_bias else 0
        return self.num_layers * per_layer + d + self.vocab_size * d * (1 if self.tie_word_embeddings else 2)


def load_decoder_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """Read the configuration of a folder holding config.json, or of a .gguf file.

    Raises:
        ConfigError: there is no such folder or file, or no config.json in it.
        UnsupportedModel: something in it is not computed here; the message names all of it, and what is.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from .gguf import GgufFile

        return parse_hf_config(GgufFile(path).hf_config(), where=str(path))
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json: give a Hugging Face model folder or a .gguf file")
    return parse_hf_config(read_json(file), eos_token_ids=read_eos_token_ids(path), where=str(file))


def parse_hf_config(raw: dict[str, Any], *, eos_token_ids: tuple[int, ...] = (), where: str = "config.json") -> DecoderConfig:
    """Turn a config.json dict, in the layout of transformers 4 or 5, into a DecoderConfig.

    A missing dtype means float32, as in transformers.

    Args:
        raw: the parsed file.
        eos_token_ids: ids to add to the file's own.
        where: named in errors.
    """
    names = raw.get("architectures") or []
    name = names[0] if len(names) == 1 else None
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: architecture {', '.join(names) or 'none'} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    family = ARCHITECTURES[name]
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    scaling, theta, rope_problems = _parse_rope(raw)
    problems = [f"{key} is missing" for key in _REQUIRED if raw.get(key) is None] + rope_problems + _refused(raw, name)
    if dtype not in CHECKPOINT_DTYPES:
        problems.append(f"dtype {dtype} (supported: {', '.join(CHECKPOINT_DTYPES)})")
    if not problems:
        problems = _bad_shapes(raw)
    if problems:
        raise UnsupportedModel(f"{where}: {'; '.join(problems)}")
    heads = raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    return DecoderConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate_size=raw["intermediate_size"],
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        max_position_embeddings=raw["max_position_embeddings"],
        eos_token_ids=tuple(sorted({*_as_ids(eos), *eos_token_ids})),
        bos_token_id=raw.get("bos_token_id"),
        dtype=dtype,
    )


def _bad_shapes(raw: dict[str, Any]) -> list[str]:
    """Head counts and sizes that no attention of ours computes."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    problems = []
    if heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        problems.append(f"head_dim {head_dim} is odd; rotary embedding takes it in halves")
    return problems


def _parse_rope(raw: dict[str, Any]) -> tuple[RopeScaling, float, list[str]]:
    """(scaling, theta, problems) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        return RopeScaling(), theta, ["rope parameters by layer type (supported: one set for all layers)"]
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    problems = [f"partial_rotary_factor {partial} (supported: 1.0)"] if partial not in (None, 1, 1.0) else []
    if kind not in ROPE_KINDS:
        return RopeScaling(), theta, [*problems, f"rope type {kind!r} (supported: {', '.join(ROPE_KINDS)})"]
    if kind == "default":
        return RopeScaling(), theta, problems
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    problems += [f"rope type {kind!r} without {key}" for key in needed if rope.get(key) is None]
    if problems:
        return RopeScaling(), theta, problems
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(rope["factor"])), theta, []
    scaling = RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings") or 0,
    )
    return scaling, theta, []


def _refused(raw: dict[str, Any], architecture: str) -> list[str]:
    """What this config asks for that is not computed here."""
    problems = []
    if (act := raw.get("hidden_act", "silu")) != "silu":
        problems.append(f"hidden_act {act!r} (supported: silu)")
    if architecture != "Qwen2ForCausalLM" and raw.get("attention_bias"):
        problems.append("attention_bias (supported: no bias, or Qwen2's on q, k and v)")
    if raw.get("mlp_bias"):
        problems.append("mlp_bias (supported: no bias)")
    # MistralConfig reads a missing sliding_window as 4096; Qwen2Config ignores the key unless use_sliding_window.
    window = raw.get("sliding_window", 4096) if architecture == "MistralForCausalLM" else None
    if architecture == "Qwen2ForCausalLM" and raw.get("use_sliding_window"):
        window = raw.get("sliding_window", 4096)
    if window is not None:
        problems.append(f"sliding_window {window} (supported: full attention)")
    elif any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        problems.append("layer_types other than full_attention (supported: full attention)")
    if raw.get("quantization_config"):
        problems.append("quantization_config (supported: unquantised safetensors, or GGUF)")
    return problems


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids a model folder names: config.json, generation_config.json and the tokenizer's eos token."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ids.update(_as_ids(read_json(folder / name).get("eos_token_id")))
    if (folder / "tokenizer_config.json").is_file():
        config = read_json(folder / "tokenizer_config.json")
        eos = config.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        if content is not None and (found := _token_id(folder, config, content)) is not None:
            ids.add(found)
    return tuple(sorted(ids))


def _token_id(folder: Path, tokenizer_config: dict[str, Any], content: str) -> int | None:
    for key, token in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if token.get("content") == content:
            return int(key)
    if not (folder / "tokenizer.json").is_file():
        return None
    data = read_json(folder / "tokenizer.json")
    for token in data.get("added_tokens") or ():
        if token["content"] == content:
            return int(token["id"])
    vocab = data.get("model", {}).get("vocab", {})
    return vocab.get(content) if isinstance(vocab, dict) else None


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or a ConfigError that names it."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(data).__name__}")
    return data


def resolve_model_path(model: str) -> Path:
    """The local folder or .gguf file `model` means.

    Looked for in this order: a folder or file of that path; the hub id in the local Hugging Face cache (its `main`, else its
    newest snapshot); a download, if huggingface_hub is installed and HF_HUB_OFFLINE is not set.

    Raises:
        ConfigError: nothing was found; the message says where it was looked for.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.is_file():
        raise ConfigError(f"model {model} is a file, but not a .gguf: give a folder with config.json, a .gguf file or a hub id")
    looked = [f"the path {path.absolute()}"]
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        cache = _hub_cache() / f"models--{model.replace('/', '--')}"
        if (snapshot := _cached_snapshot(cache)) is not None:
            return snapshot
        looked.append(f"the Hugging Face cache {cache}")
        downloaded, outcome = _download(model)
        if downloaded is not None:
            return downloaded
        looked.append(f"the hub ({outcome})")
    raise ConfigError(f"model {model!r} was not found; looked for {', '.join(looked)}")


def _hub_cache() -> Path:
    """The hub cache by huggingface_hub's own variables and their order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _cached_snapshot(cache: Path) -> Path | None:
    ref = cache / "refs" / "main"
    named = [cache / "snapshots" / ref.read_text().strip()] if ref.is_file() else []
    snapshots = cache / "snapshots"
    newest = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True) if snapshots.is_dir() else []
    return next(
        (folder for folder in (*named, *newest) if any((folder / name).exists() for name in ("config.json", "tokenizer.json"))), None
    )


def _download(model: str) -> tuple[Path | None, str]:
    """(folder, how it went)."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None, "not asked: HF_HUB_OFFLINE is set"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None, "not asked: huggingface_hub is not installed"
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"])), "downloaded"
    except Exception as error:  # any of the hub's and the network's errors means: not available there
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
