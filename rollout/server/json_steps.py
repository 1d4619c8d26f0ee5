"""JSON read in small steps, for bodies of many megabytes worked on in a thread.

`json` reads a whole document in one call that holds the interpreter's lock, so that nothing else runs meanwhile, the event loop
included. Here it does that for one prompt at a time: containers down to `DEPTH` are walked in Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json import JSONDecodeError
from typing import Any

DEPTH = 4
"""{"prompts": [{"token_ids": here"""
_SPACE = re.compile(r"[ \t\n\r]*")


def loads(text: str, object_pairs_hook: Callable[[list[tuple[Any, Any]]], Any], parse_constant: Callable[[str], Any]) -> Any:
    """`json.loads`, with its results and its errors (ValueError, RecursionError)."""
    leaf = json.JSONDecoder(object_pairs_hook=object_pairs_hook, parse_constant=parse_constant).raw_decode

    def skip(at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        return found.end()

    def members(at: int, end: str, member: Callable[[int], tuple[Any, int]]) -> tuple[list[Any], int]:
        """What stands between the bracket before `at` and `end`."""
        found: list[Any] = []
        at = skip(at)
        if text[at : at + 1] == end:
            return found, at + 1
        while True:
            item, at = member(at)
            found.append(item)
            at = skip(at)
            if text[at : at + 1] == end:
                return found, at + 1
            if text[at : at + 1] != ",":
                raise JSONDecodeError("Expecting ',' delimiter", text, at)
            at = skip(at + 1)

    def pair(at: int, depth: int) -> tuple[tuple[Any, Any], int]:
        if text[at : at + 1] != '"':
            raise JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = leaf(text, at)
        at = skip(at)
        if text[at : at + 1] != ":":
            raise JSONDecodeError("Expecting ':' delimiter", text, at)
        item, at = value(skip(at + 1), depth)
        return (key, item), at

    def value(at: int, depth: int) -> tuple[Any, int]:
        bracket = text[at : at + 1]
        if not depth or bracket not in ("[", "{"):
            return leaf(text, at)
        if bracket == "[":
            return members(at + 1, "]", lambda i: value(i, depth - 1))
        pairs, at = members(at + 1, "}", lambda i: pair(i, depth - 1))
        return object_pairs_hook(pairs), at

    found, at = value(skip(0), DEPTH)
    if skip(at) != len(text):
        raise JSONDecodeError("Extra data", text, skip(at))
    return found
