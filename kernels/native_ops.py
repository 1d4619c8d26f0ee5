"""Single ops of a native build on plain CPU tensors: what the trainer's side, tests and the self-test call.

Each is a program of one to three ops, so its bits are the engine's. Shape letters: T rows or query tokens, D width, N outputs of a
linear or query heads, K inputs of a linear or KV heads, H head size, L keys, R logits rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import native_lib as nl
from .kv import KvLayout
from .native_layout import PackedLinear, Pages, Panels, attention_items, round_up
from .reference_sampler import SampleResult, SamplerRows, check_rows
from .spec import effective_shards
from .step import ADJUST, StepArrays, StepLimits, allowed_words
from .weights import DTYPES

MAX_SHARDS = 16
"""partial sums a native linear has room for"""


def _check(name: str, ok: bool, problem: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {problem}")


def check_threads(threads: Any) -> None:
    """Raises ValueError where it is no whole number, or below 1 (which the kernels would divide by, or wait on for ever)."""
    whole = isinstance(threads, int | np.integer) and not isinstance(threads, bool)
    _check("threads", whole and threads >= 1, f"must be a whole number of at least 1, got {threads!r}")


def _check_heads(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> None:
    heads, kv_heads = q_TNH.shape[1], k_LKH.shape[1]
    _check("attention", k_LKH.shape == v_LKH.shape and k_LKH.shape[2] == q_TNH.shape[2], "k and v must both be [L, K, H]")
    _check("attention", q_TNH.dtype == k_LKH.dtype == v_LKH.dtype, "q, k and v must have one dtype")
    _check("attention", heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} KV heads evenly")


class NativeOps:
    """The ops of one native build, on `threads` threads. Inputs are bfloat16 or float32 on the CPU, outputs have their dtype."""

    def __init__(self, library: nl.NativeLibrary, threads: int = 1) -> None:
        check_threads(threads)
        self.library, self.threads = library, int(threads)

    def _run(self, step: nl.Step, *ops: nl.Op) -> None:
        self.library.run((nl.Op * len(ops))(*ops), 0, len(ops), step, self.threads)

    def _op(self, kind: int, dtype: torch.dtype, **fields: Any) -> nl.Op:
        _check("native ops", dtype in DTYPES, f"{dtype} is not bfloat16 or float32")
        code = DTYPES[dtype]
        return nl.Op(**{"kind": kind, "dtype": code, "out_dtype": code, "w": 0, "bias": -1, "w2": -1, "shards": 1, **fields})

    def pack_linear(self, w_NK: Tensor, bias_N: Tensor | None = None, shards: int = 1, gate_up: bool = False) -> PackedLinear:
        """Lay out a weight for `linear`, or with `gate_up` (gate rows, then as many up rows) for `linear_silu_mul`.

        Args:
            w_NK: [N, K].
            bias_N: [N], dtype of `w_NK`; not with `gate_up`.
            shards: the `k_shards` setting for a row-parallel layer, 1 for any other.

        Raises:
            ValueError: shapes or dtypes do not fit, or more than 16 partial sums would be taken.
        """
        _check("pack_linear", w_NK.ndim == 2 and w_NK.dtype in DTYPES, f"{w_NK.dtype} {[*w_NK.shape]} is no bfloat16 or float32 matrix")
        n, k = w_NK.shape
        count = effective_shards(k, shards)
        _check("pack_linear", count <= MAX_SHARDS, f"at most {MAX_SHARDS} partial sums, shards = {shards} takes {count}")
        _check("pack_linear", not gate_up or (n % 2 == 0 and bias_N is None and count == 1), "gate_up takes an even N, no bias, one shard")
        w_NK, code = w_NK.contiguous(), DTYPES[w_NK.dtype]
        data = torch.zeros(self.library.packed_elems(code, n, k, gate_up), dtype=w_NK.dtype)
        self.library.pack(code, data.data_ptr(), w_NK.data_ptr(), k, n, k, gate_up, 0, n, 0, k)
        bias = None
        if bias_N is not None:
            _check("pack_linear", bias_N.shape == (n,) and bias_N.dtype == w_NK.dtype, f"the bias must be [{n}] {w_NK.dtype}")
            bias = torch.zeros(round_up(n, 32))
            bias[:n] = bias_N
        return PackedLinear(data=data, bias=bias, n=n, k=k, shards=count, gate_up=gate_up)

    def unpack_linear(self, packed: PackedLinear) -> Tensor:
        """The weight again, bit for bit: [N, K]."""
        out = torch.empty(packed.n, packed.k, dtype=packed.data.dtype)
        n, k = packed.n, packed.k
        self.library.unpack(DTYPES[out.dtype], packed.data.data_ptr(), out.data_ptr(), k, n, k, packed.gate_up, 0, n, 0, k)
        return out

    def _linear(self, x_TK: Tensor, packed: PackedLinear, epilogue: int, out: Tensor, softcap: float = 0.0) -> None:
        x_TK, panels = x_TK.contiguous(), Panels(x_TK.shape[0], packed.k, x_TK.dtype)
        address = panels.tensor.data_ptr()
        table = (ctypes.c_void_p * 2)(packed.data.data_ptr(), None if packed.bias is None else packed.bias.data_ptr())
        self._run(
            nl.Step(num_tokens=x_TK.shape[0], weights=ctypes.addressof(table)),
            self._op(nl.OP_PANELS, x_TK.dtype, k=packed.k, in_=x_TK.data_ptr(), ld_in=packed.k, out=address),
            self._op(
                nl.OP_LINEAR, x_TK.dtype, bias=-1 if packed.bias is None else 1, n=packed.n, k=packed.k, shards=packed.shards,
                epilogue=epilogue, in_=address, out=out.data_ptr(), ld_out=packed.n, out_dtype=DTYPES[out.dtype], softcap=softcap,
            ),
        )  # fmt: skip

    def linear(self, x_TK: Tensor, packed: PackedLinear, *, residual_TN: Tensor | None = None) -> Tensor:
        """`x W^T + bias`, and with a residual `residual + round(that)`: [T, N].

        Raises:
            ValueError: K, the dtype or the residual's shape differs, or the weight is a gate_up.
        """
        self._check_input("linear", x_TK, packed, False)
        if residual_TN is None:
            out, epilogue = torch.empty(x_TK.shape[0], packed.n, dtype=x_TK.dtype), nl.EP_STORE
        else:
            want = (x_TK.shape[0], packed.n)
            _check("linear", residual_TN.shape == want and residual_TN.dtype == x_TK.dtype, f"the residual must be {[*want]} {x_TK.dtype}")
            out, epilogue = residual_TN.clone(memory_format=torch.contiguous_format), nl.EP_RESIDUAL
        self._linear(x_TK, packed, epilogue, out)
        return out

    def linear_f32(self, x_TK: Tensor, packed: PackedLinear, cap: float = 0.0) -> Tensor:
        """`x W^T + bias` as summed, not rounded to the dtype of `x_TK`; with a cap its softcap: [T, N] float32. Errors as for `linear`."""
        self._check_input("linear_f32", x_TK, packed, False)
        out = torch.empty(x_TK.shape[0], packed.n)
        self._linear(x_TK, packed, nl.EP_STORE, out, cap)
        return out

    def linear_softcap(self, x_TK: Tensor, packed: PackedLinear, cap: float) -> Tensor:
        """`reference.softcap` of `linear`: [T, N]. Errors as for `linear`."""
        self._check_input("linear_softcap", x_TK, packed, False)
        out = torch.empty(x_TK.shape[0], packed.n, dtype=x_TK.dtype)
        self._linear(x_TK, packed, nl.EP_STORE, out, cap)
        return out

    def linear_silu_mul(self, x_TK: Tensor, packed: PackedLinear) -> Tensor:
        """`silu(x Wgate^T) * (x Wup^T)`, N counting both: [T, N / 2]. Errors as for `linear`."""
        return self._gated("linear_silu_mul", x_TK, packed, nl.EP_SILU_MUL)

    def linear_gelu_mul(self, x_TK: Tensor, packed: PackedLinear) -> Tensor:
        """`linear_silu_mul` with GELU in its tanh form in the place of SiLU."""
        return self._gated("linear_gelu_mul", x_TK, packed, nl.EP_GELU_MUL)

    def _gated(self, name: str, x_TK: Tensor, packed: PackedLinear, epilogue: int) -> Tensor:
        self._check_input(name, x_TK, packed, True)
        out = Panels(x_TK.shape[0], packed.n // 2, x_TK.dtype)
        self._linear(x_TK, packed, epilogue, out.tensor)
        return out.rows()

    @staticmethod
    def _check_input(name: str, x_TK: Tensor, packed: PackedLinear, gate_up: bool) -> None:
        _check(name, packed.gate_up == gate_up, f"the weight was packed with gate_up={packed.gate_up}")
        fits = x_TK.ndim == 2 and x_TK.shape[1] == packed.k and x_TK.dtype == packed.data.dtype
        _check(name, fits, f"{x_TK.dtype} {[*x_TK.shape]} does not meet a {packed.data.dtype} weight {[packed.n, packed.k]}")

    def rmsnorm(self, x_TD: Tensor, weight_D: Tensor, eps: float, one_plus: bool = False) -> Tensor:
        """As `reference.rmsnorm`: [T, D].

        Raises:
            ValueError: D or the dtype differs.
        """
        fits = x_TD.ndim == 2 and x_TD.shape[1:] == weight_D.shape and x_TD.dtype == weight_D.dtype
        _check("rmsnorm", fits, f"{x_TD.dtype} {[*x_TD.shape]} does not meet a weight {weight_D.dtype} {[*weight_D.shape]}")
        x_TD, weight_D = x_TD.contiguous(), weight_D.contiguous()
        (num_rows, width) = x_TD.shape
        out = Panels(num_rows, width, x_TD.dtype)
        table = (ctypes.c_void_p * 1)(weight_D.data_ptr())
        op = self._op(
            nl.OP_RMSNORM, x_TD.dtype, k=width, eps=eps, one_plus=one_plus, in_=x_TD.data_ptr(), ld_in=width, out=out.tensor.data_ptr()
        )
        self._run(nl.Step(num_tokens=num_rows, weights=ctypes.addressof(table)), op)
        return out.rows()

    def rope(
        self,
        x_TNH: Tensor,
        cos_TH2: Tensor,
        sin_TH2: Tensor,
        norm_H: Tensor | None = None,
        eps: float = 0.0,
        one_plus: bool = False,
    ) -> Tensor:
        """As `reference.rope`; the tables' row t is that of token t: [T, N, H].

        Args:
            norm_H: [H]; every head first goes through `rmsnorm` with this weight, `eps` and `one_plus`.

        Raises:
            ValueError: the shape or dtype of the tables or of `norm_H` does not fit.
        """
        num_tokens, heads, head_size = x_TNH.shape
        want = (num_tokens, head_size // 2)
        fits = cos_TH2.shape == sin_TH2.shape == want and cos_TH2.dtype == sin_TH2.dtype == x_TNH.dtype
        _check("rope", fits, f"tables must be {[*want]} {x_TNH.dtype}, got {[*cos_TH2.shape]}, {[*sin_TH2.shape]}")
        fits = norm_H is None or (norm_H.shape == (head_size,) and norm_H.dtype == x_TNH.dtype)
        _check("rope", fits, f"the norm's weight must be [{head_size}] {x_TNH.dtype}")
        norm_H = None if norm_H is None else norm_H.contiguous()
        table = (ctypes.c_void_p * 1)(None if norm_H is None else norm_H.data_ptr())
        out, cos_TH2, sin_TH2 = x_TNH.clone(memory_format=torch.contiguous_format), cos_TH2.contiguous(), sin_TH2.contiguous()
        positions = np.arange(num_tokens, dtype=np.int32)
        runs = np.array([(t, min(32, num_tokens - t), 0, 0) for t in range(0, num_tokens, 32)], np.int32).reshape(-1, 4)
        step = nl.Step(
            positions=positions.ctypes.data, block_tokens=32, num_runs=len(runs), runs=runs.ctypes.data, weights=ctypes.addressof(table)
        )
        op = self._op(
            nl.OP_ROPE_STORE, out.dtype, in_=out.data_ptr(), ld_in=heads * head_size, heads=heads, head_dim=head_size,
            cos=cos_TH2.data_ptr(), sin=sin_TH2.data_ptr(), w=-1 if norm_H is None else 0, eps=eps, one_plus=one_plus,
        )  # fmt: skip
        self._run(step, op)
        return out

    def attention(
        self,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        num_keys_T: Tensor,
        scale: float,
        window: int | None = None,
        cap: float = 0.0,
        *,
        first_key_T: Tensor | None = None,
        sequence_T: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        shared_tokens: int = 0,
        block_tokens: int = 32,
        item_tokens: Sequence[int] | None = None,
    ) -> Tensor:
        """Attention of tokens over the keys of their sequences, through temporary pages: [T, N * H].

        Key rows are the `shared_tokens` that open every sequence, then the own keys of each. Token t sees keys
        `first_key_T[t] <= j < num_keys_T[t]` of sequence `sequence_T[t]`, j counted from the sequence's first key, and of them only
        the last `window` if given.

        Args:
            q_TNH: [T, N, H]; keys rotated already, as q.
            k_LKH, v_LKH: [L, K, H], dtype of `q_TNH`; N is a multiple of K.
            window: keys, >= 1.
            cap: scaled scores go through `reference.softcap` with it, if it is not 0.
            num_keys_T, first_key_T, sequence_T: [T] integers; by default from key 0 on, of sequence 0.
            lengths: own keys of each sequence, in order; by default one sequence has them all.
            shared_tokens: a multiple of `block_tokens`.
            block_tokens: page size, a power of two. No bit depends on it.
            item_tokens: how many tokens in a row are walked together, in order. No bit depends on it.

        Raises:
            ValueError: the shapes do not fit, or a token sees no key or more than its sequence has.
        """
        _check_heads(q_TNH, k_LKH, v_LKH)
        (num_tokens, _, head_size), (length, kv_heads, _) = q_TNH.shape, k_LKH.shape
        lengths = [length - shared_tokens] if lengths is None else list(lengths)
        sequences = [0] * num_tokens if sequence_T is None else sequence_T.tolist()
        first = [0] * num_tokens if first_key_T is None else first_key_T.tolist()
        num_keys = num_keys_T.tolist()
        _check("attention", shared_tokens + sum(lengths) == length, f"{shared_tokens} shared and {lengths} own keys are not {length} rows")
        _check("attention", len(num_keys) == len(first) == len(sequences) == num_tokens, f"columns must have {num_tokens} entries")
        _check("attention", all(0 <= s < len(lengths) for s in sequences), f"sequences must be in [0, {len(lengths)})")
        _check("attention", block_tokens > 0 and block_tokens & (block_tokens - 1) == 0, f"block_tokens {block_tokens} is no power of two")
        _check("attention", shared_tokens % block_tokens == 0, f"{shared_tokens} shared keys do not fill blocks of {block_tokens}")
        seen = zip(first, num_keys, sequences, strict=True)
        ok = all(0 <= f < n <= shared_tokens + lengths[s] for f, n, s in seen)
        _check("attention", ok, "each token must see at least one key, and of its own sequence")
        _check("attention", window is None or window > 0, f"window must be at least 1 key, got {window}")
        pages = Pages(shared_tokens, lengths, block_tokens)
        items = attention_items(sequences, num_keys, shared_tokens, item_tokens)
        _check("attention", sum(i[1] for i in items) == num_tokens, f"item_tokens must add up to {num_tokens}")
        arrays = StepArrays(
            StepLimits(tokens=max(num_tokens, len(pages.runs)), rows=0, slots=len(lengths), table_blocks=pages.tables.shape[1], banned=0)
        )
        arrays["tables"][:], arrays["runs"][: len(pages.runs)], arrays["items"][: len(items)] = pages.tables, pages.runs, items or 0
        for name, column in (("num_keys", num_keys), ("first_key", first), ("token_slot", sequences)):
            arrays[name][:num_tokens] = column
        arrays.num_runs, arrays.num_items = len(pages.runs), len(items)
        layout = KvLayout(
            num_blocks=pages.num_blocks, block_tokens=block_tokens, num_layers=1, kv_heads=kv_heads, head_dim=head_size, dtype=q_TNH.dtype
        )
        fields = {"scale": scale, "window": window or 0, "softcap": cap}
        return self._attend(q_TNH.contiguous(), torch.cat([k_LKH, v_LKH], dim=1), arrays, layout, fields)

    def _attend(self, q_TNH: Tensor, kv_L2KH: Tensor, arrays: StepArrays, layout: KvLayout, fields: dict[str, Any]) -> Tensor:
        num_tokens, heads, head_size = q_TNH.shape
        memory, out = self._page_memory(layout), Panels(num_tokens, heads * head_size, q_TNH.dtype)
        step = nl.Step(
            kv=memory.data_ptr(), kv_block_bytes=layout.block_bytes, kv_layer_bytes=layout.layer_bytes, block_tokens=layout.block_tokens,
            num_layers=1, table_stride=arrays["tables"].shape[1], num_runs=arrays.num_runs, num_items=arrays.num_items,
            **{name: arrays[name].ctypes.data for name in ("runs", "items", "num_keys", "first_key", "token_slot", "tables")},
        )  # fmt: skip
        sizes = {"kv_heads": layout.kv_heads, "head_dim": head_size}
        self._run(
            step,
            self._op(nl.OP_ROPE_STORE, q_TNH.dtype, w=-1, in_=kv_L2KH.data_ptr(), ld_in=kv_L2KH[0].numel(), heads=0, **sizes),
            self._op(
                nl.OP_ATTENTION, q_TNH.dtype, in_=q_TNH.data_ptr(), ld_in=heads * head_size, out=out.tensor.data_ptr(),
                heads=heads, **fields, **sizes,
            ),
        )  # fmt: skip
        return out.rows()

    def _page_memory(self, layout: KvLayout) -> Tensor:
        return torch.zeros(layout.nbytes, dtype=torch.uint8)

    def sample(self, logits_RV: Tensor, rows: SamplerRows) -> SampleResult:
        """As `reference.sample`, errors too."""
        check_rows(logits_RV, rows)
        logits_RV = logits_RV.contiguous()
        (num_rows, vocab), offsets = logits_RV.shape, list(accumulate(map(len, rows.banned), initial=0))
        limits = StepLimits(tokens=0, rows=num_rows, slots=num_rows, table_blocks=0, banned=offsets[-1], vocab=rows.vocab_limit)
        arrays = StepArrays(limits)
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "sample_index", "forced"):
            arrays[name][:] = getattr(rows, name)
        arrays["row_position"][:] = rows.position
        arrays["want"][:] = rows.want_model + 2 * rows.want_entropy.astype(np.uint8)
        if rows.want_mask is not None and rows.want_mask.any():
            arrays["want"][:] += 4 * rows.want_mask.astype(np.uint8)
            arrays.reserve_masks()
        arrays["ban_offset"][:] = offsets
        arrays["banned"][: offsets[-1]] = [i for ids in rows.banned for i in ids]
        self._changes(arrays, rows)
        step = nl.Step(num_rows=num_rows, logits=logits_RV.data_ptr(), ld_logits=vocab, piece_rows=num_rows, vocab_limit=rows.vocab_limit)
        for name, column in arrays.columns.items():
            setattr(step, name, column.ctypes.data)
        step.allowed_words, step.mask_words = arrays["allowed"].shape[1], arrays["out_mask"].shape[1]
        self._run(step, self._op(nl.OP_SAMPLE, logits_RV.dtype, n=vocab))
        outputs: dict[str, Any] = {name: arrays["out_" + name] for name in SampleResult.__slots__ if name != "nonfinite"}
        top_n = arrays["top_n"]
        for name, none in (("top_id", -1), ("top_logprob", -np.inf)):
            outputs[name] = outputs[name][:, : top_n.max(initial=0)].copy()
            outputs[name][np.arange(outputs[name].shape[1]) >= top_n[:, None]] = none
        return SampleResult(**outputs, nonfinite=arrays["out_nonfinite"])

    @staticmethod
    def _changes(arrays: StepArrays, rows: SamplerRows) -> None:
        """What rows change about their logits, and what they report beyond one token, as columns."""
        if rows.top_n is not None:
            arrays["top_n"][:] = rows.top_n
        if rows.adjust is not None:
            arrays["adjust_offset"][:] = list(accumulate(map(len, rows.adjust), initial=0))
            arrays.put_adjust(0, np.array([tuple(entry) for entries in rows.adjust for entry in entries], ADJUST))
        for r, ids in enumerate(rows.allowed or ()):
            if ids is not None:
                words = allowed_words(ids)
                arrays.reserve_allowed(len(words))
                arrays["allowed"][r, : len(words)], arrays["allowed_row"][r] = words, r
