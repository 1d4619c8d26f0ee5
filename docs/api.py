"""docs/api.md, made from what the server validates with and declares: `/openapi.json` and the table of errors.

    python docs/api.py            print it
    python docs/api.py --write    write docs/api.md

tests/test_api_docs.py keeps the file equal to this.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from rollsync.rollout.errors import RollsyncError, sent_errors
from rollsync.rollout.server.app import BODIES_BYTES, DEFAULT_MAX_BODY_BYTES, openapi
from rollsync.rollout.server.connections import KEEP_ALIVE_S, REFUSAL_S
from rollsync.rollout.server.replies import BODY_BYTES_PER_S, BODY_GRACE_S
from rollsync.rollout.wire import MSGPACK

FILE = Path(__file__).resolve().parent / "api.md"
Schema = dict[str, Any]


def _needing(needs: str) -> str:
    paths = (path for path, methods in openapi("")["paths"].items() if any(found["x-needs"] == needs for found in methods.values()))
    return ", ".join(f"`{path}`" for path in sorted(paths))


INTRO = f"""\
<!-- Made by docs/api.py (`make docs`) from what the server checks and declares. Do not edit. -->
# HTTP API

Start a server (`rollsync serve MODEL`) and send it prompts; ids or text in, ids and logprobs out:

```bash
curl -s http://127.0.0.1:8000/v1/rollouts -H 'Content-Type: application/json' -d '{{
  "prompts": [{{"text": "The sea at night is"}}, {{"token_ids": [9906, 11]}}],
  "n": 2, "sampling_params": {{"max_tokens": 16, "temperature": 0.8, "seed": 1}},
  "include": ["text"]}}'
```

In the tables of replies, "optional" marks what is there only if it was asked for or if it applies.

The same tables are served at `/openapi.json`, as OpenAPI 3.1. `rollsync.RolloutClient` speaks all of it from Python;
`examples/http_client.py` shows the rest of the road.

## Formats

**JSON** (`application/json`, and whatever else is not msgpack). Strict both ways: UTF-8 without a byte order mark; NaN and Infinity are
refused; a float that is not finite leaves as `null` (so a logprob of minus infinity is `null`). An int has no fraction: `1.0` is refused
where an int is asked for. A field that is `null` is as if left out; one that is not in the tables, and a key given twice, are refused.
Bodies come as they are (no Content-Encoding), with a length or in chunks.

**msgpack** (`{MSGPACK}` in Content-Type for the body, in Accept for the reply; without Accept the reply is in the body's
format). The same fields. Columns of numbers, marked with their dtype in the tables below, come as
`{{"dtype": "<f4", "shape": [n], "data": bytes}}`: raw, little-endian, bit-exact, minus infinity included, NaN for "none".
Bodies may send ids that way too (`<i4`, `<i8`, `<u4` or `<u8`), or as plain lists.

**Sampling masks** (`"include": ["sampling_mask"]`) tell of every output token which ids it could be drawn from: those that truncation,
`allowed_token_ids` and `min_tokens` left; at temperature 0 the likeliest. In JSON `{{"vocab_size": V, "tokens": [...]}}`: only ids below V
can be drawn at all, and a token has `null` (all of them), a list of ids, `{{"not": [ids]}}` (all but these) or `{{"bits": base64}}` (id i
is bit i % 32 of the little-endian 32-bit word i // 32), whichever is smallest: never more than a bit for each id there is, and `null` where
nothing restricts the draw. In msgpack `{{"vocab_size": V, "tokens": n, "data": bytes}}`, `data` being little-endian int32 words: of each
token a head and what follows it: 0 (all), k > 0 (k ids), -k (k ids that are left out) or -2^31 (the bits). A sample's deltas join by
joining their tokens, or their data. `rollsync.SamplingMask.from_wire` reads both; `token_logprobs` of `rollsync.kernels.logprobs` gives a
trainer's logits the same support ([python.md](python.md)).

**Streams** (`"stream": true`). Server-sent events, `event: NAME` and `data: JSON`; or, with Accept `{MSGPACK}`, frames: a
32-bit little-endian length and that many bytes of msgpack. The status is 200 once the stream has begun: what fails later is an event.

## Keys, tokens, limits

With `--api-key`, every route needs `Authorization: Bearer KEY`, but for what probes ask: {_needing("open")}.
With `--control-token`, what changes the engine ({_needing("control")}) needs that token instead, which opens all other routes as well.
A server that other machines can reach refuses to start unless control is guarded, by that token, by `--control-port` (a listener of its
own, on 127.0.0.1 unless `--control-host` says otherwise, for all routes; the other then refuses those of control), or by
`--control-allow CIDR`: callers from such a network need no token, unless a web page sends them. Every call of a control route leaves one
line of JSON on stderr: time, route, peer, owner, update, version, status, milliseconds; never a token or a body. On loopback, Host and
Origin must name this machine, so that no web page can reach the server. Keys and tokens may be given as `@FILE` or `env:NAME`.

A body holds at most {DEFAULT_MAX_BODY_BYTES >> 20} MiB (`--max-body-bytes`), and may take {BODY_GRACE_S:g} s and one more for every
{BODY_BYTES_PER_S >> 10} KiB of it. All that are being read hold {BODIES_BYTES >> 30} GiB at most (or four times the limit of one, if
that is more), or the next is answered 503 with Retry-After.

A connection that sends no complete headers for {KEEP_ALIVE_S} s is closed. With as many connections as
the process has files for (`ulimit -n`), further calls are answered 503 with Retry-After, but for the routes that need no key; a
connection that has never sent complete headers is then closed after {REFUSAL_S:g} s, so that silent ones hold up nobody for long. A caller
that hangs up frees its work.
"""


ERRORS = """\
## Errors

Every refusal is `{"error": {"code", "message", "field"}}` in the reply's format. `field`, where there is one, is the path of what is
wrong, such as `prompts[1].token_ids[0]`. The message says what came, what is allowed and what to do. Every route may answer 401, 403
and 500; what else it may answer is said with the route.
"""
EVERYWHERE = ("401", "403", "500")


def error_table() -> str:
    """Code, status and meaning of every error of errors.py that a server sends."""
    rows = ["| code | status | meaning |", "| --- | --- | --- |"]
    for cls in sent_errors():
        internal = cls is RollsyncError
        meaning = "A fault of the server's; the message names it." if internal else " ".join((inspect.getdoc(cls) or "").split())
        rows.append(f"| `{cls.code}` | {cls.status} | {meaning} |")
    return "\n".join(rows)


# Schemas in words


def _number(value: float) -> str:
    """Powers of two and long numbers as people write them."""
    if isinstance(value, int) and abs(value) > 65536:
        for offset, words in ((0, ""), (1, " - 1")):
            whole = abs(value) + offset
            if whole & (whole - 1) == 0:
                return f"{'-' if value < 0 else ''}2^{whole.bit_length() - 1}{words}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        above = f"> {_number(schema['exclusiveMinimum'])}"
        return f" {above}" + (f", at most {_number(high)}" if high is not None else "")
    if low is not None and high is not None:
        return f" in [{_number(low)}, {_number(high)}]"
    if low is not None:
        return f" >= {_number(low)}"
    return f" <= {_number(high)}" if high is not None else ""


def _name(schema: Schema) -> str | None:
    target = schema.get("$ref")
    return str(target).split("/")[3] if target and target.count("/") == 3 else None


def words(schema: Schema) -> str:
    """A schema as a person would say it; null is left to the introduction."""
    name = _name(schema)
    if name == "Error":
        return "[error](#errors)"
    if name is not None:
        return f"[{name}](#{name.lower()})"
    if "$ref" in schema:
        return "[error](#errors)"
    for key in ("anyOf", "oneOf"):
        if key in schema and "type" not in schema:
            return " or ".join(w for s in schema[key] if (w := words(s)) != "null")
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(words({**schema, "type": k}) for k in kind if k != "null")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{v}`" for v in schema["enum"] if v is not None)
    if kind == "array":
        many = {k: schema[v] for k, v in (("minimum", "minItems"), ("maximum", "maxItems")) if v in schema}
        length = f" ({_range(many).strip()} items)" if "maximum" in many or many.get("minimum", 0) > 1 else ""
        dtype = f" `{schema['x-msgpack-array']}`" if "x-msgpack-array" in schema else ""
        return f"{'non-empty ' if many.get('minimum') == 1 else ''}list of {words(schema.get('items', {}))}{length}{dtype}"
    if kind == "object" and "properties" in schema:
        return "{" + ", ".join(f"`{k}`" for k in schema["properties"]) + "}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {words(schema['additionalProperties'])}"
    long = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    return {"integer": "int", "null": "null"}.get(kind, kind) + _range(schema) + long


def _cell(text: str) -> str:
    """One line of a table, with the words of the wire instead of Python's."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split()).replace("|", "\\|").replace("**", "^"))


def table(schema: Schema) -> str:
    """The fields of an object, one a row."""
    required = schema.get("required", ())
    is_body = schema.get("additionalProperties") is False
    columns = ["field", "type", *(["default"] if is_body else []), "meaning"]
    rows = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, field in schema["properties"].items():
        kind, doc = _cell(words(field)), _cell(field.get("description", ""))
        if is_body:
            default = "required" if name in required else f"`{_shown(field['default'])}`" if "default" in field else ""
            rows.append(f"| `{name}` | {kind} | {default} | {doc} |")
        else:
            rows.append(f"| `{name}` | {kind}{'' if name in required else ', optional'} | {doc} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


# Routes


def named(schema: Any) -> list[str]:
    """Components that a schema names, in the order of reading."""
    if isinstance(schema, dict):
        name = _name(schema)
        return [name] if name else [n for v in schema.values() for n in named(v)]
    return [n for v in schema for n in named(v)] if isinstance(schema, list) else []


class Writer:
    """Chapters of routes; each component is written once, after the first route that needs it."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._paths = found["paths"]
        self._schemas = found["components"]["schemas"]
        self._written = {"Error"}

    def component(self, name: str) -> list[str]:
        if name in self._written:
            return []
        self._written.add(name)
        schema = self._schemas[name]
        if "properties" not in schema:
            parts = [f"#### {name}", f"{words(schema)}. {schema.get('description', '')}".rstrip()]
        else:
            parts = [f"#### {name}", *([schema["description"]] if schema.get("description") else []), table(schema)]
        for inner in named(schema):
            parts += self.component(inner)
        return parts

    def operation(self, method: str, path: str, found: Schema) -> list[str]:
        parts = [f"### {method.upper()} {path}", " ".join(s for s in (found["summary"], found.get("description", "")) if s)]
        if found.get("parameters"):
            rows = [f"| `{p['name']}` | {p['in']} | {words(p['schema'])} | {_cell(p['description'])} |" for p in found["parameters"]]
            parts.append("\n".join(["| parameter | in | type | meaning |", "| --- | --- | --- | --- |", *rows]))
        body = found.get("requestBody", {}).get("content", {})
        lines, needed = [], []
        for kind, schema in self._kinds(body):
            lines.append(f"Body: {words(schema)} ({kind})")
            needed.append(schema)
        refusals, answers = [], dict[str, tuple[list[str], str]]()
        for status, response in found["responses"].items():
            kinds = self._kinds(response.get("content", {}))
            if kinds and all(_name(s) == "Error" for _, s in kinds):
                refusals += [status] if status not in EVERYWHERE else []
                continue
            for kind, schema in kinds:
                said = f"{words(schema)} ({kind})"
                answers.setdefault(said, ([], said))[0].append(status)
                needed.append(schema)
            if not kinds:
                answers[status] = ([status], response["description"])
        lines += [f"{', '.join(statuses)}: {said}" for statuses, said in answers.values()]
        if refusals:
            lines.append(f"[Errors](#errors): {', '.join(refusals)}")
        parts.append("\n".join(f"- {line}" for line in lines))
        for schema in needed:
            for name in named(schema):
                parts += self.component(name)
        return parts

    @staticmethod
    def _kinds(content: dict[str, Any]) -> list[tuple[str, Schema]]:
        """(content types, schema), types of one schema together."""
        grouped: dict[str, tuple[list[str], Schema]] = {}
        for kind, media in content.items():
            grouped.setdefault(str(media["schema"]), ([], media["schema"]))[0].append(f"`{kind}`")
        return [(", ".join(kinds), schema) for kinds, schema in grouped.values()]

    def chapters(self) -> str:
        by_tag: dict[str, list[str]] = {}
        for path, methods in self._paths.items():
            for method, found in methods.items():
                by_tag.setdefault(found["tags"][0], []).extend(self.operation(method, path, found))
        return "\n\n".join("\n\n".join([f"## {tag}", *parts]) for tag, parts in by_tag.items())


def render() -> str:
    """The whole of docs/api.md."""
    found = openapi("")
    return "\n".join([INTRO, ERRORS, error_table(), "", Writer(found).chapters(), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/api.md")
    if parser.parse_args().write:
        FILE.write_text(render())
    else:
        print(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
