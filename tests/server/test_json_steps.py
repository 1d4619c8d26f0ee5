"""Large JSON in steps reads and writes what `json` does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.server.checks import decode_body
from rollsync.rollout.server.json_steps import dumps
from rollsync.rollout.server.replies import encode
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


@pytest.mark.parametrize(
    "value",
    [
        {"results": [{"samples": [{"ids": pack_array("<i4", [1, 2]), "logprobs": pack_array("<f4", [-float("inf"), 0.1])}]}], "x": []},
        {"é": {}, "n": None, "deep": [[[[[[{"a": float("nan")}]]]]]], "true": True, "t": (1, "\n")},
        [],
        1.5,
    ],
)
def test_written_in_steps_is_the_same(value: Any) -> None:
    assert dumps(value) == encode(value, binary=False)
