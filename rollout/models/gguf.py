"""Reading GGUF files: metadata, tensors as float32 in Hugging Face names and layout, and the config they imply. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, UnsupportedModel
from .dequantize import BlockFormat, Floats, block_format, dequantize

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
NORMAL_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, UNUSED_TOKEN = 1, 3, 4, 5
"""values of `tokenizer.ggml.token_type`"""
_ROPE_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")
_CHUNK_ELEMENTS = 1 << 20

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file."""

    name: str
    """Hugging Face name"""
    shape: tuple[int, ...]
    """row-major, as in a Hugging Face checkpoint (the file lists dimensions in reverse)"""
    format: BlockFormat
    offset: int
    """of its first byte in the file"""
    permuted_heads: int = 0
    """heads whose rows llama.cpp stores interleaved for its rotary layout; 0: rows are in order"""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.format.elements * self.format.bytes


class _Cursor:
    """Little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.position
        self.position += length
        return self.data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if item in (_STRING, _ARRAY):
                return [self.value(item) for _ in range(count)]
            if item not in _SCALARS:
                raise ConfigError(f"GGUF metadata has an array of unknown type {item}")
            dtype = np.dtype("?" if item == 7 else _SCALARS[item])
            start = self.position
            self.position += dtype.itemsize * count
            return np.frombuffer(self.data[start : self.position], dtype).tolist()
        if kind not in _SCALARS:
            raise ConfigError(f"GGUF metadata has a value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """A GGUF file opened by mmap; `tensors` and every reading method use Hugging Face names.

    Raises:
        ConfigError: not a readable GGUF file.
        UnsupportedModel: its architecture, a tensor's type or a tensor's role is not supported; the message names all of them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"{self.path} is not a file: give a .gguf file")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{self.path} is not a GGUF file (it does not begin with 'GGUF')")
            self._mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except ConfigError:
            raise
        except (struct.error, IndexError) as error:
            raise ConfigError(f"{self.path} ends inside its header: the file is cut short or damaged") from error
        except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{self.path} has a damaged header: {error}") from error
        self._bytes = np.frombuffer(self._mmap, np.uint8)

    def _read_header(self) -> None:
        cursor = _Cursor(self._mmap)
        cursor.position = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ConfigError(f"{self.path} is GGUF version {version} (supported: 2 and 3, little-endian)")
        num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        self.architecture: str = self.metadata.get("general.architecture", "none")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path}: architecture {self.architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
            )
        infos = []
        for _ in range(num_tensors):
            name, ndim = cursor.string(), cursor.scalar("<I")
            dims = [cursor.scalar("<Q") for _ in range(ndim)]
            infos.append((name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        problems = []
        for name, shape, ggml_type, offset in infos:
            hf_name = self._hf_name(name)
            try:
                fmt = block_format(ggml_type, name)
            except UnsupportedModel as error:
                problems.append(str(error))
                continue
            if hf_name is None:
                problems.append(f"GGUF tensor {name} has no role in a {self.architecture} model computed here")
                continue
            if not shape or shape[-1] % fmt.elements:
                problems.append(f"GGUF tensor {name} of shape {list(shape)} is not made of {fmt.name} blocks of {fmt.elements}")
                continue
            tensor = GgufTensor(hf_name, shape, fmt, start + offset, self._permuted_heads(name))
            if tensor.offset + tensor.nbytes > len(self._mmap):
                raise ConfigError(f"{self.path} ends inside tensor {name}: the file is cut short")
            self.tensors[hf_name] = tensor
        if problems:
            raise UnsupportedModel(f"{self.path}: {'; '.join(problems)}")

    def _hf_name(self, name: str) -> str | None:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in _LAYER_NAMES:
            return None
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"

    def _permuted_heads(self, name: str) -> int:
        """llama.cpp's converter interleaves the halves of q and k heads for architecture llama, and for no other."""
        if self.architecture != "llama" or not name.startswith("blk."):
            return 0
        heads = self.count("attention.head_count")
        if ".attn_q." in name:
            return heads
        return self.count("attention.head_count_kv", heads) if ".attn_k." in name else 0

    def get(self, key: str, *default: Any) -> Any:
        """Metadata `<architecture>.<key>`; ConfigError if it is missing and no default is given."""
        full = f"{self.architecture}.{key}"
        if full not in self.metadata and not default:
            raise ConfigError(f"{self.path} has no metadata {full}")
        return self.metadata.get(full, *default)

    def count(self, key: str, *default: int) -> int:
        """Metadata `<architecture>.<key>`, a whole number of 1 or more."""
        value = self.get(key, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {self.architecture}.{key} must be a whole number of 1 or more, got {value!r:.80}")
        return value

    def number(self, key: str, *default: float) -> float:
        """Metadata `<architecture>.<key>`, a finite number above 0, as the shortest decimal that is this float32."""
        value = self.get(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self.path}: {self.architecture}.{key} must be a finite number above 0, got {value!r:.80}")
        return _shortest(value)

    def row_blocks(self, hf_name: str) -> Iterator[Floats]:
        """A tensor's rows in order as [rows, columns] float32 pieces of about 4 MB (a vector is one row)."""
        tensor = self.tensors[hf_name]
        columns = tensor.shape[-1]
        rows = int(np.prod(tensor.shape)) // columns
        row_bytes = columns // tensor.format.elements * tensor.format.bytes
        data = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.permuted_heads and len(tensor.shape) == 1:
            yield _unpermute(dequantize(data.reshape(1, -1), tensor.format).T, columns // tensor.permuted_heads).T
            return
        unit = rows // tensor.permuted_heads if tensor.permuted_heads else 1
        step = max(1, _CHUNK_ELEMENTS // (columns * unit)) * unit
        data = data.reshape(rows, row_bytes)
        for first in range(0, rows, step):
            block = dequantize(data[first : first + step], tensor.format)
            yield _unpermute(block, unit) if tensor.permuted_heads else block

    def read(self, hf_name: str) -> Floats:
        """A whole tensor, float32, in its Hugging Face shape and row order."""
        tensor = self.tensors[hf_name]
        out = np.empty((int(np.prod(tensor.shape)) // tensor.shape[-1], tensor.shape[-1]), np.float32)
        first = 0
        for block in self.row_blocks(hf_name):
            out[first : first + len(block)] = block
            first += len(block)
        return out.reshape(tensor.shape)

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence and end-of-turn ids of the metadata, ascending."""
        ids = [self.token_id("eos"), self.token_id("eot")]
        return tuple(sorted({i for i in ids if i is not None}))

    def token_id(self, name: str) -> int | None:
        """Id of a special token: "bos", "eos", "eot", "unknown" or "padding"."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{self.path}: {key} must be a token id, got {value!r:.80}")
        return value

    def num_token_ids(self) -> int:
        """Largest id of a token that is not marked unused, + 1; 0 if the file has no tokenizer."""
        tokens = self.metadata.get("tokenizer.ggml.tokens") or []
        types = self.metadata.get("tokenizer.ggml.token_type") or [NORMAL_TOKEN] * len(tokens)
        if not isinstance(tokens, list) or not isinstance(types, list):
            raise ConfigError(f"{self.path}: tokenizer.ggml.tokens and tokenizer.ggml.token_type must be lists")
        return max((i + 1 for i, kind in enumerate(types[: len(tokens)]) if kind != UNUSED_TOKEN), default=0)

    def hf_config(self) -> dict[str, Any]:
        """The config.json this file implies (dtype bfloat16, what a dequantised copy is stored in)."""
        heads, hidden = self.count("attention.head_count"), self.count("embedding_length")
        head_dim = self.count("attention.key_length", max(hidden // heads, 1))
        problems = []
        if (rotary := self.get("rope.dimension_count", head_dim)) != head_dim:
            problems.append(f"rope.dimension_count {rotary} differs from the head size {head_dim}")
        if self.get("expert_count", 0):
            problems.append(f"expert_count {self.get('expert_count')} (supported: dense models)")
        if (window := self.get("attention.sliding_window", None)) is not None:
            problems.append(f"attention.sliding_window {window} (supported: full attention)")
        scaling = f"{self.architecture}.rope.scaling."
        if extra := [key for key in self.metadata if key.startswith(scaling) and key.removeprefix(scaling) not in _ROPE_SCALING_KEYS]:
            problems.append(f"{', '.join(extra)} (supported: {scaling}{{{', '.join(_ROPE_SCALING_KEYS)}}})")
        if "model.embed_tokens.weight" not in self.tensors:
            problems.append("no tensor token_embd.weight")
        if problems:
            raise UnsupportedModel(f"{self.path}: {'; '.join(problems)}")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.tensors["model.embed_tokens.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.count("feed_forward_length"),
            "num_hidden_layers": self.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        if (kind := self.get("rope.scaling.type", "none")) != "none":
            config["rope_scaling"] = {"rope_type": kind, "factor": self.number("rope.scaling.factor", 1.0)}
            if kind == "yarn" and self.get("rope.scaling.original_context_length", None) is not None:
                config["rope_scaling"]["original_max_position_embeddings"] = self.count("rope.scaling.original_context_length")
        for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
            if (value := self.token_id(name)) is not None:
                config[key] = value
        if eos := self.eos_token_ids():
            config["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
        return config


def _unpermute(rows: Floats, head_rows: int) -> Floats:
    """Undo llama.cpp's row order (pairs next to each other) in each head: [heads * head_rows, columns]."""
    pairs = rows.reshape(-1, head_rows // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 for 9.999999747378752e-06. The float32 stays the same."""
    return float(str(np.float32(value)))
