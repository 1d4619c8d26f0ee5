"""Reads the pickles in which SGLang's clients send handles of tensors, without unpickling them.

A small machine goes over the opcodes and builds plain data. It imports nothing and calls nothing: what pickle would call stays a note of
the name and the arguments, and only the names of torch's own handles are understood. What comes out holds numbers, strings and bytes.
"""

from __future__ import annotations

import contextlib
import math
import pickletools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest, show

MAX_PICKLE_BYTES = 16 << 20
"""handles of some 40,000 tensors"""
MAX_OPCODES = 1 << 22
"""of all pickles of one call: a small one may be read again and again, from inside another"""
MAX_BYTES = 1 << 48
MAX_DIMS = 8
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""dtypes of tensors, and of buckets of bytes"""

_REDUCTIONS = "torch.multiprocessing.reductions"
_PATCHED = ("sglang.srt.utils.patch_torch", "sglang.srt.patch_torch")
_BUCKETS = ("sglang.srt.weight_sync.tensor_bucket", "sglang.srt.model_executor.model_runner")
_CUDA = {f"{_REDUCTIONS}.rebuild_cuda_tensor", *(f"{module}._rebuild_cuda_tensor_modified" for module in _PATCHED)}
_METADATA = {f"{module}.FlattenedTensorMetadata" for module in _BUCKETS}
_LOCAL = {"sglang.srt.model_executor.model_runner.LocalSerializedTensor", "sglang.srt.utils.common.LocalSerializedTensor"}
_DTYPES = {f"torch.{name}" for name in ("float64", "int8", "int16", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2", *ITEM_BYTES)}
ALLOWED = {
    *(f"{_REDUCTIONS}.{name}" for name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename", "rebuild_storage_empty")),
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.Size", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"),
    *(_CUDA | _METADATA | _LOCAL | _DTYPES),
}
"""everything a pickle may name"""
_MANAGER = re.compile(r"/(?:[\w.+-]+/){1,16}torch-shm-dir-\w{1,16}/manager\.sock")
_SEGMENT = re.compile(r"/torch_[0-9]{1,10}_[0-9]{1,10}_[0-9]{1,10}")


class PickleRefused(BadRequest):
    """A pickle holds what is not taken; the message begins with the field it came in."""

    def __init__(self, words: str, field: str = "serialized_named_tensors") -> None:
        super().__init__(f"{field}: {words}", field=field)
        self.words = words


class OtherName(PickleRefused):
    """It names what is no part of a handle."""


class OtherObject(PickleRefused):
    """It is, as a whole, an object of another kind: an exception, say."""


@contextlib.contextmanager
def refused_in(field: str) -> Iterator[None]:
    """What is refused inside is said of this field."""
    try:
        yield
    except PickleRefused as error:
        raise type(error)(error.words, field) from None


def _refuse(words: str) -> BadRequest:
    return PickleRefused(words)


@dataclass(frozen=True, slots=True)
class Named:
    """A name that pickle would import."""

    path: str


@dataclass(slots=True)
class Called:
    """What pickle would make by calling a name; `state` is what it would then give the object."""

    path: str
    args: tuple[Any, ...]
    state: Any = field(default=None)


def _named(module: Any, name: Any) -> Named:
    path = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else show((module, name))
    if path not in ALLOWED:
        hint = ""
        if path.startswith(("multiprocessing.", f"{_REDUCTIONS}.rebuild_storage_fd")):
            hint = "; CPU tensors come by name: torch.multiprocessing.set_sharing_strategy('file_system')"
        raise OtherName(f"the pickle names {show(path)}, which is no handle of a tensor{hint}")
    return Named(path)


class Budget:
    """What is left to be carried out for one call."""

    def __init__(self, opcodes: int = MAX_OPCODES) -> None:
        self._left = opcodes

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _refuse(f"the pickles of one call must hold at most {MAX_OPCODES} opcodes: send fewer tensors at a time")


class Machine:
    """Carries out the opcodes of one pickle."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The value. BadRequest for all but what handles of tensors are made of."""
        if len(data) > MAX_PICKLE_BYTES:
            raise _refuse(f"a pickle must be at most {MAX_PICKLE_BYTES} bytes, got {len(data)}")
        opcodes = pickletools.genops(data)
        try:
            for opcode, arg, _ in opcodes:
                self._budget.take()
                if opcode.name == "STOP":
                    (value,) = self._stack
                    return value
                self._step(opcode.name, arg)
        except OtherName as error:
            if not self._stack and self._is_object(opcodes):
                raise OtherObject(error.words) from None
            raise
        except BadRequest:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise _refuse(f"the pickle is malformed: {type(error).__name__}: {str(error)[:200]}") from None
        raise _refuse("the pickle has no end")

    def _is_object(self, rest: Iterable[Any]) -> bool:
        """Whether a pickle that begins with a name calls it at its end; a tuple that begins with one does not."""
        last = ""
        with contextlib.suppress(ValueError):
            for opcode, _, _ in rest:
                self._budget.take()
                last = last if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP") else opcode.name
        return last in ("REDUCE", "NEWOBJ", "BUILD")

    def _step(self, name: str, arg: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(_VALUES[name](arg))
        elif name in _TUPLES:
            size = _TUPLES[name]
            stack[len(stack) - size :] = [tuple(self._top(size))]
        elif name in ("PROTO", "FRAME"):
            return
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(self._from_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._from_mark()
            self._last(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self._from_mark()
            if not all(isinstance(key, str) for key in items[::2]):
                raise _refuse("keys in the pickle must be strings")
            self._last(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if name == "MEMOIZE" else arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[arg])
        elif name in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"):
            self._name_or_call(name, arg)
        else:
            raise _refuse(f"the pickle holds {name}, which no handle of a tensor needs")

    def _name_or_call(self, name: str, arg: Any) -> None:
        stack = self._stack
        if name == "GLOBAL":
            stack.append(_named(*arg.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_named(module, attribute))
        elif name == "BUILD":
            state = stack.pop()
            self._last(Called).state = state
        else:
            args, function = stack.pop(), stack.pop()
            if not isinstance(function, Named) or not isinstance(args, tuple):
                raise _refuse("the pickle calls what is no name")
            stack.append(Called(function.path, args))

    def _top(self, size: int) -> list[Any]:
        if size > len(self._stack):
            raise _refuse("the pickle takes more than it gave")
        return self._stack[len(self._stack) - size :]

    def _from_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def _last(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise _refuse(f"the pickle adds to a {type(self._stack[-1]).__name__} as if it were a {kind.__name__}")
        return self._stack[-1]


_VALUES: dict[str, Callable[[Any], Any]] = {
    "EMPTY_LIST": lambda arg: [],
    "EMPTY_DICT": lambda arg: {},
    "EMPTY_TUPLE": lambda arg: (),
    "NONE": lambda arg: None,
    "NEWTRUE": lambda arg: True,
    "NEWFALSE": lambda arg: False,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), lambda arg: arg),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), lambda arg: arg),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), lambda arg: arg),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank was sent: tensors, how they are cut into messages, and the handle of each message's bytes."""

    tensors: list[dict[str, Any]]
    layout: dict[str, Any]
    handles: list[dict[str, Any]]


def read_parcel(data: bytes, load_format: str | None, rank: int, budget: Budget) -> Parcel:
    """The tensors of one rank's pickle.

    Args:
        budget: shared by the pickles of one call.
        load_format: None: pairs of name and tensor; flattened_bucket: one tensor of bytes and what lies where in it.
    """
    value = Machine(budget).run(data)
    if load_format == "flattened_bucket":
        return _bucket(value)
    if not isinstance(value, list):
        raise _refuse(f"the pickle must hold a list of names and tensors, got {_kind(value)}")
    tensors, handles = [], []
    for pair in value:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _refuse("the pickle's list must hold pairs of a name and a tensor")
        handle = read_handle(_of_rank(pair[1], rank, budget), pair[0])
        tensors.append({"name": pair[0], "dtype": handle["dtype"], "shape": handle["shape"]})
        handles.append(handle)
    return Parcel(tensors, {"kind": "tensors"}, handles)


def _of_rank(value: Any, rank: int, budget: Budget) -> Any:
    """A tensor, or the part of it that was serialised for a rank."""
    if not isinstance(value, Called) or value.path not in _LOCAL:
        return value
    values = value.state.get("values") if isinstance(value.state, dict) else None
    if not isinstance(values, list) or not all(isinstance(v, bytes) for v in values) or rank >= len(values):
        raise _refuse(f"a tensor must be serialised for rank {rank} too")
    return Machine(budget).run(values[rank])


def _bucket(value: Any) -> Parcel:
    if not isinstance(value, dict) or value.keys() != {"flattened_tensor", "metadata"} or not isinstance(value["metadata"], list):
        raise _refuse("a flattened bucket must have flattened_tensor and metadata")
    handle = read_handle(value["flattened_tensor"], "flattened_tensor")
    unit, tensors, end = ITEM_BYTES[handle["dtype"]], [], 0
    for entry in value["metadata"]:
        state = entry.state if isinstance(entry, Called) and entry.path in _METADATA else None
        if not isinstance(state, dict) or not isinstance(state.get("name"), str):
            raise _refuse("metadata must hold FlattenedTensorMetadata")
        name, shape, dtype = state["name"], ints(state.get("shape"), "shape"), dtype_of(state.get("dtype"))
        if unit > 1 and dtype != handle["dtype"]:
            raise _refuse(f"{name} is {dtype}, in a bucket of {handle['dtype']}")
        size = math.prod(shape) * ITEM_BYTES[dtype]
        if state.get("start_idx") != end // unit or state.get("end_idx") != (end + size) // unit:
            raise _refuse(f"{name} must lie in the bucket right behind the tensor before it, without a gap")
        tensors.append({"name": name, "dtype": dtype, "shape": list(shape)})
        end += size
    if end != math.prod(handle["shape"]) * unit or len(handle["shape"]) != 1:
        raise _refuse(f"the bucket must have one dimension of {end // unit} elements, got {handle['shape']}")
    # An empty one is not opened: torch's manager removes its segment with the process that made it.
    return Parcel(tensors, {"kind": "concatenated"}, [handle] if tensors else [])


def _kind(value: Any) -> str:
    return value.path if isinstance(value, Called | Named) else type(value).__name__


def ints(value: Any, what: str) -> tuple[int, ...]:
    """Of a tuple, a list or a torch.Size."""
    if isinstance(value, Called) and value.path == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS or not all(type(v) is int and 0 <= v < MAX_BYTES for v in value):
        raise _refuse(f"{what} must be at most {MAX_DIMS} ints >= 0")
    return tuple(value)


def _int(value: Any, what: str) -> int:
    return ints((value,), what)[0]


def dtype_of(value: Any) -> str:
    """The name of a torch.dtype."""
    name = value.path.removeprefix("torch.") if isinstance(value, Named) else ""
    if name not in ITEM_BYTES:
        raise _refuse(f"a tensor's dtype must be one of {', '.join(ITEM_BYTES)}, got {_kind(value)}")
    return name


def _bytes(value: Any, what: str, most: int) -> bytes:
    if not isinstance(value, bytes) or len(value) > most:
        raise _refuse(f"{what} must be at most {most} bytes")
    return value


def read_handle(value: Any, name: str) -> dict[str, Any]:
    """Where a tensor lies, as plain data (see weight_sync/transports/torch_handles.py)."""
    path = value.path if isinstance(value, Called) else ""
    try:
        if path == f"{_REDUCTIONS}.rebuild_tensor":
            handle = _cpu_handle(value.args)
        elif path in _CUDA:
            handle = _cuda_handle(value.args)
        else:
            raise _refuse(f"{name} must be a tensor, got {_kind(value)}")
    except ValueError as error:
        if isinstance(error, BadRequest):
            raise
        raise _refuse(f"{name}: a handle of another version of torch: {error}") from None
    last = handle["offset"] + sum((n - 1) * step for n, step in zip(handle["shape"], handle["stride"], strict=True))
    if 0 not in handle["shape"] and (last + 1) * ITEM_BYTES[handle["dtype"]] > handle["storage_bytes"]:
        raise _refuse(f"{name} reaches beyond its storage")
    return handle


def _view(dtype: Any, offset: Any, shape: Any, stride: Any) -> dict[str, Any]:
    found = {"dtype": dtype_of(dtype), "offset": _int(offset, "storage_offset")}
    shape, stride = ints(shape, "shape"), ints(stride, "stride")
    if len(shape) != len(stride):
        raise _refuse("shape and stride must be of one length")
    return {**found, "shape": list(shape), "stride": list(stride)}


def _cpu_handle(args: Sequence[Any]) -> dict[str, Any]:
    _, storage, (offset, shape, stride, _) = args
    if not isinstance(storage, Called) or storage.path != f"{_REDUCTIONS}.rebuild_typed_storage":
        raise _refuse(f"a tensor's storage must be typed, got {_kind(storage)}")
    raw, dtype = storage.args
    view = _view(dtype, offset, shape, stride)
    if isinstance(raw, Called) and raw.path == f"{_REDUCTIONS}.rebuild_storage_empty":
        return {**view, "kind": "empty", "storage_bytes": 0}
    if not isinstance(raw, Called) or raw.path != f"{_REDUCTIONS}.rebuild_storage_filename":
        raise _refuse(f"a CPU tensor must lie in named shared memory, got {_kind(raw)}")
    _, manager, segment, size = raw.args[:4]
    manager, segment = _bytes(manager, "manager", 400).decode(), _bytes(segment, "segment", 64).decode()
    if not _MANAGER.fullmatch(manager) or ".." in manager or not _SEGMENT.fullmatch(segment):
        raise _refuse(f"shared memory must be torch's own, got {show(manager)} and {show(segment)}")
    return {**view, "kind": "shm", "manager": manager, "segment": segment, "storage_bytes": _int(size, "storage size")}


def _cuda_handle(args: Sequence[Any]) -> dict[str, Any]:
    _, shape, stride, offset, _, dtype, device, handle, size, at, _, counter, counter_at, event, sync = args
    view = _view(dtype, offset, shape, stride)
    if handle is None:
        return {**view, "kind": "empty", "storage_bytes": 0}
    if not (isinstance(device, str) and re.fullmatch(r"[0-9A-Za-z-]{1,64}", device)) and not (type(device) is int and 0 <= device < 1024):
        raise _refuse(f"a device must be a number or a UUID, got {show(device)}")
    return {
        **view,
        "kind": "cuda",
        "device": device,
        "handle": _bytes(handle, "handle", 128),
        "storage_bytes": _int(size, "storage size"),
        "storage_at": _int(at, "storage offset"),
        "counter": _bytes(counter, "counter handle", 400),
        "counter_at": _int(counter_at, "counter offset"),
        "event": _bytes(event, "event handle", 128),
        "event_sync": bool(sync),
    }
