"""Large JSON in steps reads and writes what `json` does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.server import encoding
from rollsync.rollout.server.checks import decode_body
from rollsync.rollout.wire import pack_array

SEEDS = (
    '{"prompts": [{"token_ids": [1, 2, -3], "x": {"y": [[], {}, [{"z": "\\u00e9\\ud83d\\ude00"}]]}}, {"text": "a\\n\\"b"}], "n": 1e3}',
    ' [ ] ',
    '{"a":true,"b":null,"c":[[[[[1]]]]], "a2":{}}',
    '"text"',
    "-0.5",
)


def outcome(text: str, in_steps: bool) -> Any:
    try:
        return repr(decode_body(text.encode(errors="replace"), "application/json", in_steps))
    except BadRequest:
        return BadRequest


def test_whatever_json_takes_or_refuses() -> None:
    rng = random.Random(5)
    refused = 0
    for text in (*SEEDS, '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100000, "", "[1,]", '{"a" 1}', "{1: 2}", "[1 2]", "[] x", "{,}"):
        for _ in range(400):
            kind = rng.randrange(4)
            at, changed = rng.randrange(len(text) + 1), text
            if kind == 1:
                changed = text[:at] + rng.choice('[]{},:" 1\n\\') + text[at:]
            elif kind == 2:
                changed = text[:at] + text[at + 1 :]
            elif kind == 3:
                changed = text[:at]
            wanted = outcome(changed, False)
            assert outcome(changed, True) == wanted, changed[:80]
            refused += wanted is BadRequest
            if len(text) > 1000:
                break
    assert 1000 < refused < 5500


VALUES = [
    {"results": [{"samples": [{"ids": pack_array("<i4", [1, 2]), "logprobs": pack_array("<f4", [-float("inf"), 0.1])}]}], "x": []},
    {"table": pack_array("<f4", [[0.5, float("nan")]] * 99), "texts": ["a" * n for n in range(99)]},
    [1, "b" * 999, None, [], {}] * 50,
    {"é": {}, "n": None, "deep": [[[[[[{"a": 0.5}]]]]]], "true": True, "t": (1, "\n")},
    [],
    1.5,
]


@pytest.mark.parametrize("step_bytes", [0, 100, 1000, 1 << 20])
def test_written_in_steps_is_the_same(monkeypatch: pytest.MonkeyPatch, step_bytes: int) -> None:
    monkeypatch.setattr(encoding, "STEP_BYTES", step_bytes)
    for value in VALUES:
        for binary in (False, True):
            assert encoding.encode_in_steps(value, binary) == encoding.encode(value, binary)
    assert encoding.encode_in_steps([float("nan")] * 999, binary=False) == encoding.encode([None] * 999, binary=False)
