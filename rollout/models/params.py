"""The one table between checkpoint names and local parameters: fused rows, tensor-parallel shards, ties. Torch-free.

A checkpoint load and a live weight sync both go through `plan`, so they cannot disagree. Local parameters (D width, V vocabulary,
I MLP width, H query heads, K KV heads, d head size; shapes at tensor-parallel size 1):

    embed [V, D]            final_norm [D]          head [V, D]  (absent when tied: the head is the embedding)
    layers.{i}.attn_norm [D]     layers.{i}.qkv [(H + 2K) d, D] (rows q, k, v)     layers.{i}.qkv_bias [(H + 2K) d] (qwen2)
    layers.{i}.q_norm [d]        layers.{i}.k_norm [d]                             (both of qk_norm models)
    layers.{i}.attn_out [D, H d] layers.{i}.mlp_norm [D]
    layers.{i}.attn_post_norm [D]                    layers.{i}.mlp_post_norm [D]  (both of post_norms models)
    layers.{i}.gate_up [2 I, D] (rows gate, up)      layers.{i}.mlp_down [D, I]

Tensor parallel. Column-parallel parameters (qkv and its bias, gate_up, head) keep a rank's rows: of every fused part its own share,
so a rank's qkv is again rows q, k, v. The head's rows are divided in whole blocks of 32, so the last ranks may have fewer.
Row-parallel ones (attn_out, mlp_down) keep a rank's columns. Norms and the embedding are whole on every rank. A tied model has no
`head`: a rank computes the logits of the rows `head_rows` names of its whole embedding, which are the rows an untied head would hold.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...kernels.spec import K_BLOCK, effective_shards, vocab_rows
from ..errors import ConfigError
from .config import DecoderConfig

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""a buffer that old checkpoints saved; computed from the config here"""


class UnknownTensor(ConfigError, KeyError):
    """A checkpoint or sync name that no local parameter takes."""

    code = "unknown_tensor"

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A local parameter. `shape` is that of one rank."""

    shape: tuple[int, ...]
    kind: str
    """embedding (whole, looked up by row), column (rows sharded), row (columns sharded) or vector (1-D)"""


@dataclass(frozen=True, slots=True)
class Write:
    """Copy `source[src_row : src_row + rows, src_col : src_col + cols]` to (dst_row, dst_col) of a local parameter.

    A vector counts as a column: its writes have cols 1 and columns 0.
    """

    param: str
    dst_row: int
    dst_col: int
    src_row: int
    src_col: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a checkpoint tensor goes at tensor-parallel size 1. `first_row` is its offset in a fused parameter."""

    param: str
    shape: tuple[int, ...]
    kind: str
    first_row: int = 0


@functools.lru_cache(maxsize=16)
def _table(cfg: DecoderConfig) -> dict[str, _Entry]:
    """Every tensor of a full checkpoint, in the order a checkpoint lists them."""
    D, I, q, kv = cfg.hidden_size, cfg.intermediate_size, cfg.q_rows, cfg.kv_rows
    layer = {
        "input_layernorm.weight": _Entry("attn_norm", (D,), "vector"),
        "self_attn.q_proj.weight": _Entry("qkv", (q, D), "column"),
        "self_attn.k_proj.weight": _Entry("qkv", (kv, D), "column", q),
        "self_attn.v_proj.weight": _Entry("qkv", (kv, D), "column", q + kv),
        "self_attn.o_proj.weight": _Entry("attn_out", (D, q), "row"),
        "post_attention_layernorm.weight": _Entry("attn_post_norm" if cfg.post_norms else "mlp_norm", (D,), "vector"),
        "mlp.gate_proj.weight": _Entry("gate_up", (I, D), "column"),
        "mlp.up_proj.weight": _Entry("gate_up", (I, D), "column", I),
        "mlp.down_proj.weight": _Entry("mlp_down", (D, I), "row"),
    }
    if cfg.qkv_bias:
        layer["self_attn.q_proj.bias"] = _Entry("qkv_bias", (q,), "column")
        layer["self_attn.k_proj.bias"] = _Entry("qkv_bias", (kv,), "column", q)
        layer["self_attn.v_proj.bias"] = _Entry("qkv_bias", (kv,), "column", q + kv)
    if cfg.post_norms:  # then what others call post_attention_layernorm has a name that fits
        layer["pre_feedforward_layernorm.weight"] = _Entry("mlp_norm", (D,), "vector")
        layer["post_feedforward_layernorm.weight"] = _Entry("mlp_post_norm", (D,), "vector")
    if cfg.qk_norm:
        layer["self_attn.q_norm.weight"] = _Entry("q_norm", (cfg.head_dim,), "vector")
        layer["self_attn.k_norm.weight"] = _Entry("k_norm", (cfg.head_dim,), "vector")
    table = {EMBED: _Entry("embed", (cfg.vocab_size, D), "embedding")}
    for i in range(cfg.num_layers):
        for suffix, e in layer.items():
            table[f"model.layers.{i}.{suffix}"] = _Entry(f"layers.{i}.{e.param}", e.shape, e.kind, e.first_row)
    table[FINAL_NORM] = _Entry("final_norm", (D,), "vector")
    if not cfg.tie_word_embeddings:
        table[HEAD] = _Entry("head", (cfg.vocab_size, D), "column")
    return table


def check_tp(cfg: DecoderConfig, tp_size: int, tp_rank: int = 0, k_shards: int | None = None) -> None:
    """Raise ConfigError, naming every dimension, unless `tp_size` ranks can share this model.

    With `k_shards` (the engine's setting) also unless each can hold whole shards of every row-parallel layer's sum.
    """
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ConfigError(f"tensor parallel rank must be in [0, size), got rank {tp_rank} of size {tp_size}")
    names = ("num_kv_heads", "num_heads", "intermediate_size")
    bad = [f"{name} = {getattr(cfg, name)}" for name in names if getattr(cfg, name) % tp_size]
    if k_shards is not None:
        for name, width in (("num_heads * head_dim", cfg.q_rows), ("intermediate_size", cfg.intermediate_size)):
            shards = effective_shards(width, k_shards)
            if shards % tp_size:
                bad.append(f"the {shards} partial sums over {name} = {width} (k_shards = {k_shards}, each of whole blocks of {K_BLOCK})")
    if bad:
        raise ConfigError(f"tensor parallel size {tp_size} must divide {', '.join(bad)}")


def param_specs(cfg: DecoderConfig, tp_size: int = 1, tp_rank: int = 0) -> dict[str, ParamSpec]:
    """Local parameters of one rank by name. All ranks hold the same shapes, but for the head's rows.

    Raises:
        ConfigError: `tp_size` does not divide the model.
    """
    check_tp(cfg, tp_size, tp_rank)
    rows: dict[str, int] = {}
    entries: dict[str, _Entry] = {}
    for entry in _table(cfg).values():
        rows[entry.param] = rows.get(entry.param, 0) + entry.shape[0]
        entries[entry.param] = entry
    specs = {}
    for name, entry in entries.items():
        shape = (rows[name], *entry.shape[1:])
        if name == "head":
            shape = (vocab_rows(cfg.vocab_size, tp_rank, tp_size)[1], shape[1])
        elif entry.kind == "column":
            shape = (shape[0] // tp_size, *shape[1:])
        elif entry.kind == "row":
            shape = (shape[0], shape[1] // tp_size)
        specs[name] = ParamSpec(shape, "vector" if len(shape) == 1 else entry.kind)
    return specs


def head_rows(cfg: DecoderConfig, tp_rank: int = 0, tp_size: int = 1) -> tuple[int, int]:
    """(first vocabulary id, number of ids) whose logits a rank computes, tied or not."""
    check_tp(cfg, tp_size, tp_rank)
    return vocab_rows(cfg.vocab_size, tp_rank, tp_size)


def plan(cfg: DecoderConfig, hf_name: str, tp_rank: int = 0, tp_size: int = 1) -> tuple[Write, ...]:
    """What rank `tp_rank` copies from the checkpoint tensor `hf_name`, and where to.

    Empty for what is accepted but stored nowhere: `lm_head.weight` of a tied model, and rotary buffers.

    Raises:
        UnknownTensor: no local parameter takes this name.
        ConfigError: `tp_size` does not divide the model.
    """
    check_tp(cfg, tp_size, tp_rank)
    if is_ignored(cfg, hf_name):
        return ()
    entry = _table(cfg).get(hf_name)
    if entry is None:
        raise UnknownTensor(f"tensor {hf_name!r} is not part of this model ({_why_unknown(cfg, hf_name)})")
    rows, cols = entry.shape[0], entry.shape[1] if len(entry.shape) == 2 else 1
    src_row = src_col = 0
    if hf_name == HEAD:
        src_row, rows = vocab_rows(cfg.vocab_size, tp_rank, tp_size)
    elif entry.kind == "column":
        rows //= tp_size
        src_row = tp_rank * rows
    elif entry.kind == "row":
        cols //= tp_size
        src_col = tp_rank * cols
    first_row = entry.first_row // tp_size  # parts before it are sharded alike
    return (Write(entry.param, first_row, 0, src_row, src_col, rows, cols),)


def _why_unknown(cfg: DecoderConfig, hf_name: str) -> str:
    match = _LAYER.fullmatch(hf_name)
    if match and int(match[1]) >= cfg.num_layers:
        return f"it has {cfg.num_layers} layers"
    first = [name for name in _table(cfg) if _LAYER.match(name) is None or name.startswith("model.layers.0.")]
    known = [name.replace("model.layers.0.", "model.layers.{i}.") for name in first]
    return f"known: {', '.join(known)}"


def is_buffer(hf_name: str) -> bool:
    """Whether this is a buffer that no model here loads, whatever its dtype."""
    return hf_name.endswith(_IGNORED_SUFFIX)


def is_ignored(cfg: DecoderConfig, hf_name: str) -> bool:
    """Whether a checkpoint may hold this tensor though it is stored nowhere."""
    return is_buffer(hf_name) or (hf_name == HEAD and cfg.tie_word_embeddings)


def hf_shapes(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a full checkpoint must hold, in checkpoint order.

    A tied model may also hold `lm_head.weight` (see `tied_name`), and any model rotary buffers.
    """
    return {name: entry.shape for name, entry in _table(cfg).items()}


def num_parameters(cfg: DecoderConfig) -> int:
    """Elements of all weights, tied ones once."""
    return sum(math.prod(shape) for shape in hf_shapes(cfg).values())


def tied_name(cfg: DecoderConfig, hf_name: str) -> str | None:
    """The tensor that `hf_name` must equal if it is present at all: the embedding, for a tied model's head."""
    return EMBED if hf_name == HEAD and cfg.tie_word_embeddings else None


def check_tensors(cfg: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Everything wrong with a set of checkpoint tensors: missing, unknown, of another shape. Empty if it is complete."""
    wanted = hf_shapes(cfg)
    problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in shapes]
    for name, shape in shapes.items():
        expected = wanted.get(tied_name(cfg, name) or name)
        if expected is None:
            if not is_ignored(cfg, name):
                problems.append(f"unknown {name} {list(shape)}")
        elif tuple(shape) != expected:
            problems.append(f"{name} is {list(shape)}, must be {list(expected)}")
    return problems
