"""Every number of every route, as /openapi.json lists them: what is out of bounds is refused by name, and harms nobody.

The cases are made from the tables, so a new field or route is tested without a line here.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import RolloutClient
from rollsync.rollout.server.app import openapi
from rollsync.rollout.wire import MSGPACK

jsonschema = pytest.importorskip("jsonschema")
DOCUMENT = openapi("1")
SCHEMAS = DOCUMENT["components"]["schemas"]
ROUTES = [path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {})]
CANDIDATES = (
    math.nan,
    math.inf,
    -math.inf,
    "NaN",
    "Infinity",
    "1",
    "",
    True,
    [],
    {},
    1.5,
    -1,
    0,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
)
Path_ = tuple[str | int, ...]


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """Through references, and past "or null"."""
    while True:
        kinds = [s for s in schema.get("anyOf", ()) if s.get("type") != "null"] if "type" not in schema else []
        if "$ref" in schema:
            schema = SCHEMAS[schema["$ref"].rsplit("/", 1)[1]]
        elif kinds:
            schema = kinds[0]
        else:
            return schema


def kind(schema: dict[str, Any]) -> str:
    found = resolve(schema).get("type", "any")
    return str(next((k for k in found if k != "null"), "any") if isinstance(found, list) else found)


def least(schema: dict[str, Any]) -> Any:
    """The smallest valid value."""
    schema = resolve(schema)
    if schema.get("enum"):
        return schema["enum"][0]
    if kind(schema) == "object":
        needed = [*schema.get("required", ()), *schema.get("anyOf", [{}])[0].get("required", ())]
        return {name: least(schema["properties"][name]) for name in needed}
    if kind(schema) == "array":
        return [least(schema["items"])] * max(1, schema.get("minItems", 0))
    return {"string": "a", "boolean": False}.get(kind(schema), max(1, schema.get("minimum", 1)))


def numbers(schema: dict[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, dict[str, Any]]]:
    """Path and schema of every number in a body; of lists the item 0, of mappings the value of key "1"."""
    schema = resolve(schema)
    if kind(schema) in ("integer", "number") and "enum" not in schema:
        yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from numbers(field, (*path, name))
    inner = schema.get("items", schema.get("additionalProperties"))
    if isinstance(inner, dict):
        yield from numbers(inner, (*path, 1 if kind(schema) == "object" else 0))


def put(body: Any, schema: dict[str, Any], path: Path_, value: Any) -> Any:
    """`body` with `value` at `path`; what is missing on the way is made."""
    if not path:
        return value
    schema, key = resolve(schema), path[0]
    if kind(schema) == "object" and isinstance(key, int):
        return {str(key): put(None, schema["additionalProperties"], path[1:], value)}
    if isinstance(key, int):
        return [put(body[0] if body else least(schema["items"]), schema["items"], path[1:], value)]
    inner = schema["properties"][key]
    one_of = {name for s in schema.get("anyOf", ()) for name in s.get("required", ())}
    rest = {k: v for k, v in body.items() if key not in one_of or k not in one_of}
    return {**rest, key: put(body.get(key, least(inner)), inner, path[1:], value)}


def spelled(path: Path_) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def refused_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Candidates, and both neighbours of the bounds, that the schema rules out; no schema rules out what is not finite."""
    low, high = schema.get("minimum"), schema.get("maximum")
    step = 1 if kind(schema) == "integer" else 1e-3
    edges = [*([] if low is None else [low - step]), *([] if high is None else [high + step])]
    for value in (*CANDIDATES, *edges):
        finite = not isinstance(value, float) or math.isfinite(value)
        if not finite or not jsonschema.Draft202012Validator(schema).is_valid(value):
            yield value


def encodings(body: Any, value: Any, turn: int) -> Iterator[tuple[str, bytes]]:
    """JSON and msgpack by turns; both for what is not finite, which JSON can only write as a number too large."""
    plain = json.dumps(body).encode()
    is_float = isinstance(value, float) and not math.isfinite(value)
    if is_float and math.isinf(value):
        yield "application/json", plain.replace(b"Infinity", b"1e400")
    if is_float or turn % 2:
        with contextlib.suppress(OverflowError):  # more than 64 bits: no msgpack can say it
            yield MSGPACK, msgpack.packb(body)
            return
    yield "application/json", plain


@pytest.fixture(scope="module")
def texts(serving: Any, tokenizer_folder: Path) -> Iterator[Any]:
    with serving("--tokenizer", str(tokenizer_folder)) as server:
        yield server


@pytest.fixture
def neighbour(texts: Any, until: Any) -> Iterator[None]:
    """A call that runs meanwhile, and must come out as if alone: token i is a function of prompt and i."""
    got: list[Any] = []

    def run() -> None:
        with RolloutClient(texts.url) as client:
            got.append(client.rollouts([[5, 6]], request_id="neighbour", sampling_params={"seed": 1}))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: texts.running() >= 1)
    yield
    with RolloutClient(texts.url) as client:
        client.abort(request_id="neighbour")
    thread.join(10)
    sample = got[0].results[0].samples[0]
    assert sample.token_ids == [(11 + 7 * i) % 256 for i in range(len(sample.token_ids))] and len(sample.token_ids) > 20


@pytest.mark.parametrize("route", ROUTES)
def test_numbers_out_of_bounds_are_refused_by_name(texts: Any, neighbour: None, route: str) -> None:
    body_schema = DOCUMENT["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    wrong, count = [], 0
    with httpx.Client(base_url=texts.url, timeout=30) as http:
        for path, schema in numbers(body_schema):
            for turn, value in enumerate(refused_values(schema)):
                for content_type, content in encodings(put(least(body_schema), body_schema, path, value), value, turn):
                    answer = http.post(route, content=content, headers={"Content-Type": content_type, "Accept": "application/json"})
                    error = answer.json().get("error") or {}
                    named, whole = error.get("field") or error.get("param") or "", spelled(path)
                    count += 1
                    if not 400 <= answer.status_code < 500 or not (named == whole or (named and whole.startswith(f"{named}["))):
                        wrong.append((whole, value, content_type, answer.status_code, error))
    assert not wrong, f"{len(wrong)} of {count}: {wrong[:8]}"
    assert count > 0 or not list(numbers(body_schema))
