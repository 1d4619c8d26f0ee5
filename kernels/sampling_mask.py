"""Which ids a token could be drawn from, for every token of a sample. Plain Python: clients read it too.

A row is int32 words, a head and what follows it, in the smallest of four forms:

    0                every id below `vocab_size`
    n > 0            n ids, ascending: those and no others
    -n < 0           n ids, ascending: all but those
    -2**31           ceil(vocab_size / 32) words of bits: id i is bit i % 32 of word i // 32

Rows follow each other without gaps, so pieces of a sample are joined by joining their words.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from struct import unpack_from
from typing import Any, overload

ALL, BITS = 0, -(1 << 31)


def bit_words(vocab_size: int) -> int:
    """Words of a row of bits; no row has more words behind its head than these."""
    return -(-vocab_size // 32)


def row_words(head: int, vocab_size: int) -> int:
    """Words that follow a head."""
    return bit_words(vocab_size) if head == BITS else abs(head)


def rows_end(data: bytes | bytearray, vocab_size: int, rows: int) -> int:
    """Bytes of the first rows of sound words, little-endian; of all there are if these are fewer."""
    at = 0
    for _ in range(rows):
        if at >= len(data):
            break
        (head,) = unpack_from("<i", data, at)
        at += 4 + 4 * row_words(head, vocab_size)
    return at


def _bits(ids: Iterable[int], vocab_size: int) -> list[int]:
    words = [0] * bit_words(vocab_size)
    for i in ids:
        words[i // 32] |= 1 << i % 32
    return [w - (1 << 32) if w >> 31 else w for w in words]


def _bit_ids(words: Iterable[int]) -> list[int]:
    return [32 * k + b for k, word in enumerate(words) for b in range(32) if word >> b & 1]


def encode_row(ids: Iterable[int] | None, vocab_size: int) -> list[int]:
    """One row's words. None stands for every id.

    Raises:
        ValueError: no id, or one that is not in [0, vocab_size).
    """
    if ids is None:
        return [ALL]
    kept = sorted(set(ids))
    if not kept or kept[0] < 0 or kept[-1] >= vocab_size:
        raise ValueError(f"a token's ids must be some of [0, {vocab_size}), got {kept[:1]} to {kept[-1:]}")
    words, rest = bit_words(vocab_size), vocab_size - len(kept)
    if rest == 0:
        return [ALL]
    if min(len(kept), rest) > words:
        return [BITS, *_bits(kept, vocab_size)]
    if len(kept) <= rest:
        return [len(kept), *kept]
    found = set(kept)
    return [-rest, *(i for i in range(vocab_size) if i not in found)]


def _little(words: array[int]) -> bytes:
    if sys.byteorder == "big":
        words = array("i", words)
        words.byteswap()
    return words.tobytes()


def _from_little(data: bytes | bytearray | memoryview) -> array[int]:
    if len(data) % 4:
        raise ValueError(f"sampling mask: {len(data)} bytes are no int32 words")
    words: array[int] = array("i")
    words.frombytes(bytes(data))
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _row_of_json(row: Any, vocab_size: int, token: int) -> list[int]:
    """Words of one token as `SamplingMask.to_json` has it; they are not checked further."""
    if row is None:
        return [ALL]
    if isinstance(row, list) and row and all(type(i) is int and 0 <= i < vocab_size for i in row):
        return [len(row), *row]
    if isinstance(row, dict) and len(row) == 1:
        kind, given = next(iter(row.items()))
        if kind == "not" and isinstance(given, list) and given and all(type(i) is int and 0 <= i < vocab_size for i in given):
            return [-len(given), *given]
        if kind == "bits" and isinstance(given, str):
            words = _from_little(base64.b64decode(given, validate=True))
            if len(words) == bit_words(vocab_size):
                return [BITS, *words]
    raise ValueError(f'sampling mask: token {token} must be null, a list of ids in [0, {vocab_size}), {{"not": ids}} or {{"bits": base64}}')


class SamplingMask:
    """The ids each token of a sample could be drawn from: as a sequence, per token a list of ids, ascending, or None for every id.

    `SamplingMask.of(vocab_size, rows)` makes one of lists, `from_wire` of a reply; `join` puts several one behind the other, and
    `all(tokens, vocab_size)` leaves some tokens everything: together they make the mask of a trainer's batch, its prompts included.

    Args:
        vocab_size: ids that can be drawn at all are those below it. (A sample that ended before it began may have 0, and no token.)
        words: rows as the module's text has them: int32, or their little-endian bytes.

    Raises:
        ValueError: the words are no such rows; names the first token that is wrong.
    """

    __slots__ = ("_starts", "_words", "vocab_size")

    def __init__(self, vocab_size: int, words: array[int] | bytes | Iterable[int] = ()) -> None:
        if vocab_size < 0:
            raise ValueError(f"sampling mask: vocab_size must be at least 0, got {vocab_size}")
        self.vocab_size = vocab_size
        if isinstance(words, bytes | bytearray | memoryview):
            found = _from_little(words)
        else:
            found = words if isinstance(words, array) and words.typecode == "i" else array("i", words)
        self._words = found
        self._starts = array("q", [0])
        at = 0
        if len(found) and vocab_size == 0:
            raise ValueError("sampling mask: vocab_size is 0, but there are tokens")
        while at < len(found):
            head, at = found[at], at + 1
            end = at + row_words(head, vocab_size)
            self._check(len(self._starts) - 1, head, found[at:end], end - at)
            self._starts.append(end)
            at = end

    def _check(self, token: int, head: int, rest: array[int], want: int) -> None:
        problem = None
        if len(rest) != want:
            problem = f"ends {want - len(rest)} words early"
        elif head == BITS:
            tail = self.vocab_size % 32
            if not any(rest):
                problem = "keeps no id"
            elif tail and rest[-1] >> tail != 0:
                problem = f"has an id outside [0, {self.vocab_size})"
        elif head != ALL:
            if rest[0] < 0 or rest[-1] >= self.vocab_size:
                problem = f"has an id outside [0, {self.vocab_size})"
            elif any(a >= b for a, b in pairwise(rest)):
                problem = "has ids that do not ascend"
            elif -head >= self.vocab_size:
                problem = "keeps no id"
        if problem:
            raise ValueError(f"sampling mask: token {token} {problem}")

    @classmethod
    def of(cls, vocab_size: int, rows: Iterable[Iterable[int] | None]) -> SamplingMask:
        """From lists of ids, None for every id."""
        return cls(vocab_size, array("i", [word for ids in rows for word in encode_row(ids, vocab_size)]))

    @classmethod
    def of_rows(cls, vocab_size: int, rows: Iterable[bytes]) -> SamplingMask:
        """From the words of each row, little-endian, as the engine has them: they are not checked."""
        mask, parts = cls(vocab_size), list(rows)
        mask._words.frombytes(b"".join(parts))
        if sys.byteorder == "big":
            mask._words.byteswap()
        mask._starts.extend(accumulate(len(part) // 4 for part in parts))
        return mask

    @classmethod
    def from_wire(cls, value: Any) -> SamplingMask:
        """From a reply: of msgpack ({"vocab_size", "tokens": number, "data": bytes}) or of JSON ({"vocab_size", "tokens": rows}).

        Raises:
            ValueError: it is neither, or its rows are not sound.
        """
        if isinstance(value, dict) and type(value.get("vocab_size")) is int and value["vocab_size"] >= 0:
            tokens, data = value.get("tokens"), value.get("data")
            if isinstance(tokens, list) and data is None:
                rows = (_row_of_json(row, value["vocab_size"], token) for token, row in enumerate(tokens))
                return cls(value["vocab_size"], [word for row in rows for word in row])
            if type(tokens) is int and isinstance(data, bytes | bytearray):
                mask = cls(value["vocab_size"], data)
                if len(mask) != tokens:
                    raise ValueError(f"sampling mask: {tokens} tokens, but rows of {len(mask)}")
                return mask
        raise ValueError("sampling mask: not the object that a reply holds, with vocab_size, tokens and, as bytes, data")

    def to_wire(self) -> dict[str, Any]:
        """For msgpack; `from_wire` is its inverse."""
        return {"vocab_size": self.vocab_size, "tokens": len(self), "data": self.to_bytes()}

    def to_json(self) -> dict[str, Any]:
        """For JSON: per token null (every id), a list of ids, {"not": ids} or {"bits": base64 of the words}."""
        return {"vocab_size": self.vocab_size, "tokens": list(self.json_rows())}

    def json_rows(self) -> Iterator[Any]:
        """The tokens of `to_json`, one after another."""
        for token in range(len(self)):
            head, *rest = self.row(token)
            if head == BITS:
                yield {"bits": base64.b64encode(_little(self.row(token)[1:])).decode()}
            elif head < ALL:
                yield {"not": rest}
            else:
                yield rest if head else None

    @property
    def words(self) -> array[int]:
        """All rows, one behind the other. Not to be written to."""
        return self._words

    def to_bytes(self) -> bytes:
        """`words`, little-endian."""
        return _little(self._words)

    def row(self, token: int) -> array[int]:
        """The words of one token's row, head first."""
        return self._words[self._starts[token] : self._starts[token + 1]]

    def count(self, token: int) -> int:
        """How many ids the token could be drawn from."""
        head = self._words[self._starts[token]]
        if head == BITS:
            return sum((word & 0xFFFFFFFF).bit_count() for word in self.row(token)[1:])
        return head if head > 0 else self.vocab_size + head

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> list[int] | None: ...
    @overload
    def __getitem__(self, at: slice) -> SamplingMask: ...
    def __getitem__(self, at: int | slice) -> list[int] | SamplingMask | None:
        if isinstance(at, slice):
            first, last, step = at.indices(len(self))
            if step != 1:
                raise ValueError("a sampling mask is cut in steps of 1")
            return self._cut(self._words[self._starts[first] : self._starts[max(first, last)]])
        token = at + len(self) if at < 0 else at
        if not 0 <= token < len(self):
            raise IndexError(f"token {at} of {len(self)}")
        head, *rest = self.row(token)
        if head == ALL:
            return None
        if head == BITS:
            return _bit_ids(rest)
        if head > 0:
            return rest
        out = set(rest)
        return [i for i in range(self.vocab_size) if i not in out]

    def __iter__(self) -> Iterator[list[int] | None]:
        return (self[i] for i in range(len(self)))

    def _cut(self, words: array[int]) -> SamplingMask:
        return SamplingMask(self.vocab_size, words)

    def __add__(self, other: SamplingMask) -> SamplingMask:
        return SamplingMask.join([self, other])

    @classmethod
    def join(cls, masks: Iterable[SamplingMask]) -> SamplingMask:
        """Several, one behind the other: for the rows of a trainer's batch."""
        parts = list(masks)
        if not parts:
            raise ValueError("sampling mask: nothing to join")
        sizes = {m.vocab_size for m in parts if len(m)} or {parts[0].vocab_size}
        if len(sizes) > 1:
            raise ValueError(f"sampling masks of {', '.join(map(str, sorted(sizes)))} ids do not join")
        joined = cls(sizes.pop())
        joined._words = array("i", b"".join(m._words.tobytes() for m in parts))
        offsets = accumulate((len(m._words) for m in parts[:-1]), initial=0)
        joined._starts = array("q", [0, *(o + s for o, m in zip(offsets, parts, strict=True) for s in m._starts[1:])])
        return joined

    @classmethod
    def all(cls, tokens: int, vocab_size: int) -> SamplingMask:
        """A mask that leaves every token everything: for the positions of a batch that no sample drew, its prompts'."""
        return cls(vocab_size, array("i", [ALL]) * tokens)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, SamplingMask) and self.vocab_size == other.vocab_size and self._words == other._words

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SamplingMask({len(self)} tokens, {len(self._words)} words, {self.vocab_size} ids)"
