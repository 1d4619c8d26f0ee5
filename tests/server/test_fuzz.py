"""Bodies that are almost right, in msgpack and JSON: every one is answered, none with a 5xx, and none leaves a trace."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from rollsync.rollout.server.app import openapi
from rollsync.rollout.wire import MSGPACK, pack_array

CALL = {
    "prompts": [
        {"token_ids": pack_array("<i4", [1, 2, 3]), "max_tokens": 3, "seed": 5, "first_sample": 0},
        {"text": "abc", "forced_token_ids": [4, 5]},
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": [1, {"b": None}]}},
        {"token_ids": [7], "continue_from": pack_array("<i8", [8])},
    ],
    "n": 1,
    "sampling_params": {"max_tokens": 4, "temperature": 0.5, "top_k": 3, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True},
    "include": ["text", "model_logprobs", "prompt_logprobs"],
    "group": "g",
    "priority": 1,
    "deadline_s": 20.0,
}
SCALARS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**32,
        2**53 + 1,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        0.0,
        -0.0,
        1.5,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *("", "a", "NaN", "\x00", "\U0010ffff", b"", b"ab", b"\xff\xfe", [], {}, [[]], [None], {"": None}, {b"k": 1}, {"role": 1}),
    *(msgpack.ExtType(5, b"x"), msgpack.ExtType(127, b""), msgpack.Timestamp(1, 2), msgpack.Timestamp(-(2**40), 0)),
)
WIRE_ARRAYS: tuple[Any, ...] = (
    *(
        {"dtype": "<i4", "shape": s, "data": bytes(8)}
        for s in ([3], [-2], [2**62], [2, 1], [2.0], [], 2, None, [True, True], ["2"], [2**64 - 1])
    ),
    *({"dtype": d, "shape": [2], "data": bytes(8)} for d in ("<f4", "<i2", ">i4", "", None, 4, b"<i4", ["<i4"], "<i4" * 99, {})),
    *({"dtype": "<i4", "shape": [2], "data": d} for d in (b"", bytes(7), "12345678", None, [0] * 8, 8)),
    *({"dtype": "<i8", "shape": [1], "data": struct.pack("<q", v)} for v in (-1, 256, 2**31, 2**40, 2**63 - 1, -(2**63))),
    {"dtype": "<u8", "shape": [1], "data": b"\xff" * 8},
    {"dtype": "<i4", "shape": [1], "data": bytes(4), "order": "C"},
)
LYING_LENGTHS = [
    head + tail for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9") for tail in (b"\xff" * 4, b"\x7f" + b"\xff" * 3 + bytes(8))
]
DEEP = [b"\x91" * 500 + b"\x01", b"\x91" * 1000 + b"\x01", b"\x91" * 100_000, b"\x81\xa1a" * 900 + b"\xc0", b"\x81" * 5000]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def mutate(body: Any, rng: random.Random) -> Any:
    """A copy of `body` with up to three places replaced, dropped, doubled or renamed."""
    body = {"": copy.deepcopy(body)}
    for _ in range(rng.choice((1, 1, 2, 3))):
        *way, last = rng.choice([p for p in places(body) if p])
        parent = body
        for key in way:
            parent = parent[key]
        action = rng.random()
        if action < 0.65:
            parent[last] = copy.deepcopy(rng.choice(SCALARS if rng.random() < 0.7 else WIRE_ARRAYS))
        elif action < 0.75 and way:
            del parent[last]
        elif action < 0.85 and isinstance(parent, dict) and way:
            parent[rng.choice(("extra", b"bytes", "n", "prompts", last))] = parent.pop(last)
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[last] = [parent[last]]
    return body[""]


def damage(packed: bytes, rng: random.Random) -> bytes:
    """Random bytes, or `packed` with some of its bytes changed, cut or repeated."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.choice((0, 1, 2, 5, 20, 200)))
    data = bytearray(packed)
    for _ in range(rng.choice((1, 1, 2, 8))):
        i = rng.randrange(len(data) + 1)
        data[i : i + rng.choice((0, 1, 1, 1, 3))] = rng.randbytes(rng.choice((0, 1, 1, 2)))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 and data else data)


def bodies(rng: random.Random) -> Iterator[bytes]:
    """First what is always tried, then mutations without end."""
    yield from LYING_LENGTHS
    yield from DEEP
    inner = [[]]
    for _ in range(400):
        inner = [inner]
    for body in (
        {"n": inner},
        {"prompts": inner},
        {"prompts": [{"messages": inner}]},
        {"prompts": [{"text": "a", "chat_template_kwargs": {"a": inner}}]},
    ):
        yield msgpack.packb(body)
    for array in WIRE_ARRAYS:
        yield msgpack.packb({"prompts": [{"token_ids": array}, {"token_ids": [1]}], "sampling_params": {"max_tokens": 1}})
    while True:
        base = (
            CALL
            if rng.random() < 0.8
            else {"group": "g", "reason": "r", "text": "a", "prompt": [1], "messages": [{"role": "user", "content": "a"}]}
        )
        packed = msgpack.packb(mutate(base, rng))
        yield packed if rng.random() < 0.7 else damage(packed, rng)


def peak_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.fixture
def unharmed(short: Any) -> Iterator[None]:
    """Before and after the test the same call has the same bytes, from the same processes, which have not grown much."""
    body = {**CALL, "request_id": "good"}

    def good() -> Any:
        answer = httpx.post(f"{short.url}/v1/rollouts", content=msgpack.packb(body), headers={"Content-Type": MSGPACK})
        status = httpx.get(f"{short.url}/v1/engine/status").json()
        return answer.status_code, answer.content, status["engine_pid"], status["stats"]["running"], status["calls_in_flight"]

    before, peak = good(), peak_bytes(short.process.pid)
    assert before[0] == 200 and b"error" not in before[1]
    yield
    assert good() == before
    assert peak_bytes(short.process.pid) - peak < 100 << 20, "a few bytes made the front take much memory"


def fuzz(server: Any, rng: random.Random, enough: Callable[[int], bool]) -> int:
    """Post bodies to all routes in turn until `enough` (of the number sent)."""
    routes = [path for path, methods in openapi("1")["paths"].items() if "post" in methods]
    wrong, count = [], 0
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for content in bodies(rng):
            for route in routes if count < 100 * len(routes) else [rng.choice(routes)]:
                answer = http.post(
                    route, content=content, headers={"Content-Type": MSGPACK, "Accept": rng.choice((MSGPACK, "application/json"))}
                )
                count += 1
                if answer.status_code >= 500:
                    wrong.append((route, content[:400], answer.status_code, answer.text[:400]))
                elif answer.status_code >= 400:
                    told = answer.json() if "json" in answer.headers["content-type"] else msgpack.unpackb(answer.content)
                    assert told["error"]["message"], (route, content[:400])
            if enough(count) or len(wrong) > 10:
                break
    assert not wrong, wrong[:5]
    return count


def test_msgpack_that_is_almost_right(short: Any, unharmed: None) -> None:
    assert fuzz(short, random.Random(5), lambda count: count > 1200) > 1200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_much_more_msgpack(short: Any, unharmed: None, seed: int) -> None:
    end = time.monotonic() + 60
    fuzz(short, random.Random(100 + seed), lambda count: time.monotonic() > end)


# JSON

ONE = '{"prompts": [{"token_ids": [1]}], "sampling_params": {"max_tokens": 2}%s}'
JSON_EDGES: list[tuple[bytes, int, str | None]] = [
    (b"", 400, None),
    (b" \n", 400, None),
    (b"\xef\xbb\xbf" + (ONE % "").encode(), 400, None),
    *(((ONE % "").encode(codec), 400, None) for codec in ("utf-16", "utf-16-le", "utf-32-be")),
    ((ONE % "").encode() + b"}", 400, None),
    ((ONE % "").encode() + b" \n", 200, None),
    ((ONE % "").encode()[:-1], 400, None),
    ((ONE % ', "n": 1, "n": 0').encode(), 400, "n"),
    ((ONE % ', "n": 0, "n": 1').encode(), 400, "n"),
    *(
        ((ONE % f', "deadline_s": {v}').encode(), 400, None)
        for v in ("NaN", "Infinity", "-Infinity", "nan", "+1", "01", ".5", "1.", "0x1", "1e")
    ),
    *(((ONE % f', "deadline_s": {v}').encode(), 400, "deadline_s") for v in ("1e400", "-1e400", "-0", "-0.0", '"NaN"', "true", "9" * 400)),
    ((ONE % f', "deadline_s": {"9" * 5000}').encode(), 400, None),
    *(((ONE % f', "priority": {v}').encode(), 400, "priority") for v in ("1.0", "1e1", str(2**53 + 1), str(2**64), '"1"')),
    *(
        ((ONE.replace("[1]", f"[{v}]") % "").encode(), 400, "prompts[0].token_ids[0]")
        for v in (2**53 + 1, 2**63, 2**64, -1, 256, "1.0", "-0.0", "null", '"1"')
    ),
    (b"[" * 100_000, 400, None),
    (b'{"a":' * 100_000, 400, None),
    (b'{"prompts": [{"text": "\\ud800"}]}', 400, "prompts[0].text"),
    (b'{"prompts": [{"text": "\xff"}]}', 400, None),
    (b'{"prompts": [{"text": "a\x00"}]}', 400, None),
    (b'{"prompts": [{"text": "a\\u0000"}], "sampling_params": {"max_tokens": 0}}', 200, None),
    (b'{"\\ud800": 1}', 400, "\\ud800"),
    (b"null", 400, None),
    (b'"prompts"', 400, None),
]


def test_json_that_is_almost_right(short: Any, unharmed: None) -> None:
    with httpx.Client(base_url=short.url, timeout=30) as http:
        for content, status, field in JSON_EDGES:
            answer = http.post("/v1/rollouts", content=content, headers={"Content-Type": "application/json"})
            told = json.loads(answer.content, parse_constant=lambda word: pytest.fail(f"{word} in a reply"))
            assert (answer.status_code, told.get("error", {}).get("field")) == (status, field), (content[:200], answer.text[:300])


AROUND: list[Any] = [
    *({name: "HERE"} for name in ("n", "prompts", "include", "sampling_params", "stream", "unknown")),
    *({"prompts": [{"token_ids": [1]}], "sampling_params": {name: "HERE"}} for name in ("temperature", "seed", "stop", "stop_token_ids")),
    *({"prompts": [{"token_ids": [1]}], "sampling_params": {name: "HERE"}} for name in ("logit_bias", "allowed_token_ids", "ignore_eos")),
    *({"prompts": [{name: "HERE"}]} for name in ("token_ids", "text", "messages")),
    {"prompts": [{"token_ids": {"dtype": "HERE", "shape": [1], "data": "x"}}]},
    {"prompts": [{"token_ids": {"dtype": "<i4", "shape": "HERE", "data": "x"}}]},
    {"prompts": [{"messages": [{"role": "user", "content": "HERE"}]}], "sampling_params": {"temperature": -1}},
]


@pytest.mark.parametrize("binary", [False, True])
def test_depths_around_what_python_can_recurse(short: Any, unharmed: None, binary: bool) -> None:
    """Read in one frame, shown in an error message in a deeper one: wherever the limit is met, it is a 400."""
    with httpx.Client(base_url=short.url, timeout=30) as http:
        for depth in range(900, 1010, 10):
            nested = b"\x91" * depth + b"\xc0" if binary else b"[" * depth + b"]" * depth
            for body in AROUND:
                pack, hole = (msgpack.packb, msgpack.packb("HERE")) if binary else (lambda v: json.dumps(v).encode(), b'"HERE"')
                content = pack(body).replace(hole, nested)
                answer = http.post("/v1/rollouts", content=content, headers={"Content-Type": MSGPACK if binary else "application/json"})
                assert answer.status_code == 400, (depth, body, answer.content)


def chunks(content: bytes) -> Iterator[bytes]:
    for i in range(len(content)):
        yield content[i : i + 1]


def test_how_a_body_is_sent(short: Any, unharmed: None) -> None:
    """By content type, compressed, in chunks, twice as long as it says, by other methods."""
    whole, json_type = (ONE % "").encode(), {"Content-Type": "application/json"}
    packed = msgpack.packb(json.loads(whole))
    with httpx.Client(base_url=short.url, timeout=30) as http:
        for kind, content, status in (
            ("application/json; charset=utf-8", whole, 200),
            ("application/vnd.msgpack", packed, 200),
            ("application/x-msgpack", packed, 200),
            ("application/json", packed, 400),
            (MSGPACK, whole, 400),
            ("application/x-www-form-urlencoded", whole, 200),  # what curl -d sends
            ("text/plain", b"prompts=1", 400),
            ("multipart/form-data; boundary=x", b"--x--", 400),
            ("\x7f;;=,", b"", 400),
        ):
            answer = http.post("/v1/rollouts", content=content, headers={"Content-Type": kind, "Accept": "application/json"})
            assert answer.status_code == status and answer.json(), (kind, answer.text)
        assert http.post("/v1/rollouts", content=chunks(whole), headers=json_type).status_code == 200
        for coding in ("gzip", "br", "deflate, gzip", "nonsense"):
            answer = http.post("/v1/rollouts", content=gzip.compress(whole), headers={**json_type, "Content-Encoding": coding})
            assert answer.status_code == 400 and "Content-Encoding" in answer.json()["error"]["message"]
        assert http.post("/v1/rollouts", content=whole, headers={**json_type, "Content-Encoding": "identity"}).status_code == 200
        for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "NONSENSE"):
            answer = http.request(method, "/v1/rollouts")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST"), method
        for path in ("/v1/rollout", "/v1//rollouts", "/v1/rollouts/../../etc", "/%00", "/%ff", "/" + "a" * 5000):
            assert http.post(path, content=whole).status_code == 404, path
