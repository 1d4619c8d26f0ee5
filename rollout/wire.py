"""What goes over a wire, in one place: arrays as raw bytes, errors as dicts. Plain Python, no numpy.

An array is {"dtype": "<i4", "shape": [n], "data": bytes}, little-endian, so a float32 keeps its bits; a table has "shape": [rows, width].
A sampling mask, whose rows differ in length, is {"vocab_size": V, "tokens": n, "data": bytes} (kernels/sampling_mask.py).
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from ..kernels.sampling_mask import SamplingMask, rows_end
from .errors import BadRequest, RollsyncError, error_classes, show

PROTOCOL_VERSION = 1
MSGPACK = "application/msgpack"

_TYPECODES = {"<i4": "i", "<i8": "q", "<u4": "I", "<u8": "Q", "<f4": "f", "<f8": "d"}

COLUMNS = {
    "token_ids": "<i4",
    "logprobs": "<f4",
    "temperature_logprobs": "<f4",
    "model_logprobs": "<f4",
    "entropy": "<f4",
    "top_token_ids": "<i4",
    "top_logprobs": "<f4",
    "sampling_mask": "mask",
    "prompt_logprobs": "<f4",
}
"""the columns of a sample that travel as arrays, but for the mask; NaN in `prompt_logprobs` stands for null (the first token has none)"""
TABLES = ("top_token_ids", "top_logprobs")
"""those that hold several values per token"""
TOKEN_COLUMNS = tuple(name for name in COLUMNS if name != "prompt_logprobs")
"""those with one row per output token"""


def pack_array(dtype: str, values: Sequence[Any]) -> dict[str, Any]:
    """`values` (numbers, or lists of numbers of one length) as a wire array; None becomes NaN (float dtypes only)."""
    if values and isinstance(values[0], list):
        flat = pack_array(dtype, [v for row in values for v in row])
        return {**flat, "shape": [len(values), len(values[0])]}
    column: array[Any] = array(_TYPECODES[dtype], [math.nan if v is None else v for v in values] if None in values else values)
    if sys.byteorder == "big":
        column.byteswap()
    return {"dtype": dtype, "shape": [len(column)], "data": column.tobytes()}


def is_array(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"dtype", "shape", "data"}


def unpack_array(value: dict[str, Any], name: str = "array") -> list[Any]:
    """The values of a wire array, a table's as lists; NaN becomes None. BadRequest names `name` if it is malformed."""
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    code = _TYPECODES.get(dtype) if isinstance(dtype, str) else None
    if code is None:
        raise BadRequest(f"{name}.dtype must be one of {', '.join(_TYPECODES)}, got {show(dtype)}", field=f"{name}.dtype")
    if not isinstance(data, bytes):
        raise BadRequest(f"{name}.data must be raw bytes, got {type(data).__name__}", field=f"{name}.data")
    column = array(code)
    count = len(data) // column.itemsize
    sizes = shape if isinstance(shape, list) and all(type(n) is int for n in shape) else []
    is_table = len(sizes) == 2 and sizes[0] >= 0 < sizes[1] and sizes[0] * sizes[1] == count
    if not (is_table or sizes == [count]) or len(data) % column.itemsize:
        length = len(data) / column.itemsize
        raise BadRequest(f"{name}.shape must be [{length:g}] for {len(data)} bytes of {dtype}, got {show(shape)}", field=f"{name}.shape")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    values: list[Any] = column.tolist()
    values = [None if v != v else v for v in values] if code in "fd" else values
    return [values[i : i + shape[1]] for i in range(0, count, shape[1])] if is_table else values


def is_mask(value: Any) -> bool:
    """Whether `value` is a sampling mask as bytes."""
    return isinstance(value, dict) and value.keys() == {"vocab_size", "tokens", "data"} and isinstance(value["data"], bytes | bytearray)


def slice_column(value: dict[str, Any], start: int, start_bytes: int | None = None) -> dict[str, Any]:
    """The rows of a well-formed wire array (its first axis) or mask from `start` on; none if it has no more.

    Args:
        start_bytes: where in its data row `start` begins, if known: a mask's rows are else walked through to find it.
    """
    if is_mask(value):
        at = rows_end(value["data"], value["vocab_size"], start) if start_bytes is None else start_bytes
        return {**value, "tokens": max(0, value["tokens"] - start), "data": bytes(value["data"][at:])}
    rows, *rest = value["shape"]
    at = start * (len(value["data"]) // rows if rows else 0)
    return {"dtype": value["dtype"], "shape": [max(0, rows - start), *rest], "data": bytes(value["data"][at:])}


def begin_column(value: dict[str, Any]) -> dict[str, Any]:
    """A copy that `extend_column` may lengthen."""
    copied = {**value, "data": bytearray(value["data"])}
    return copied if is_mask(value) else {**copied, "shape": list(value["shape"])}


def extend_column(column: dict[str, Any], more: dict[str, Any]) -> None:
    """Append the rows of `more`, in place."""
    column["data"] += more["data"]
    if "tokens" in column:
        column["tokens"] += more["tokens"]
    else:
        column["shape"][0] += more["shape"][0]


def jsonable(value: Any) -> Any:
    """Strict JSON: wire arrays and masks as lists; NaN and the infinities as null."""
    if is_mask(value):
        return SamplingMask.from_wire(value).to_json()
    if is_array(value):
        value = unpack_array(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def _encodable(text: str) -> str:
    """`text` with lone surrogates (a caller's unknown key may hold one) written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def error_to_wire(error: BaseException) -> dict[str, Any]:
    """{"code", "message", "field"?} of a named error; any other exception becomes "internal" with its class name."""
    if not isinstance(error, RollsyncError):
        return {"code": "internal", "message": _encodable(f"{type(error).__name__}: {error}")}
    wire = {"code": error.code, "message": _encodable(str(error))}
    field = getattr(error, "field", None)
    if field is not None:
        wire["field"] = _encodable(field)
    return wire


def error_from_wire(wire: dict[str, Any]) -> RollsyncError:
    """The named error `wire` tells of; an unknown code gives a plain RollsyncError with the code in its message."""
    code, message = str(wire.get("code", "internal")), str(wire.get("message", "no message"))
    cls = next((c for c in error_classes() if c.code == code), None)
    if cls is None:
        return RollsyncError(f"{code}: {message}")
    return cls(message, field=wire.get("field")) if issubclass(cls, BadRequest) else cls(message)
