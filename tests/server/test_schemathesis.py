"""schemathesis against the real app: no 5xx, and every answer is one that /openapi.json tells of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from jsonschema import Draft202012Validator
from rollsync.rollout.server.app import openapi
from rollsync.rollout.wire import MSGPACK, jsonable

pytest.importorskip("schemathesis")
HERE = Path(__file__).parent
LEFT_OUT = "positive_data_acceptance"
"""a schema cannot say what a vocabulary holds, nor that of three fields exactly one is given"""


def check(server: Any, scratch: Path, *flags: str) -> None:
    """Run schemathesis, and then see that the same engine still answers as it did."""

    def good() -> Any:
        answer = httpx.post(f"{server.url}/v1/rollouts", json={"prompts": [{"text": "abc"}], "request_id": "good", "include": ["text"]})
        return answer.status_code, answer.content, server.engine_pid

    before = good()
    command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{server.url}/openapi.json"]
    command += ["--continue-on-failure", "--exclude-checks", LEFT_OUT, "--request-timeout", "30", "--warnings", "off", *flags]
    paths = os.pathsep.join([str(HERE), *(p for p in (os.environ.get("PYTHONPATH"),) if p)])
    env = {**os.environ, "PYTHONPATH": paths, "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
    done = subprocess.run(command, env=env, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert before[0] == 200 and good() == before, "the same call is answered otherwise after it"


def test_what_it_makes_up_is_answered_as_documented(short: Any, tmp_path: Path) -> None:
    check(short, tmp_path, "--phases", "fuzzing", "--max-examples", "6", "--generation-deterministic")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_much_more_of_it(short: Any, tmp_path: Path, seed: int) -> None:
    database = ["--generation-database", "none", "--seed", str(seed)]
    check(short, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200", "--max-failures", "40", *database)


# Replies that do answer, field by field


def closed(schema: Any) -> Any:
    """The same schema, but a field it does not list is an error."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: closed(v) for k, v in schema.items()}
    return {"additionalProperties": False, **found} if isinstance(schema.get("properties"), dict) else found


def conforms(value: Any, schema: dict[str, Any]) -> None:
    components = closed(openapi("1")["components"])
    Draft202012Validator({**closed(schema), "components": components}).validate(value)


def reply_schema(method: str, path: str, answer: httpx.Response) -> dict[str, Any]:
    kind = answer.headers["content-type"].partition(";")[0]
    found: dict[str, Any] = openapi("1")["paths"][path][method]["responses"][str(answer.status_code)]["content"][kind]["schema"]
    return found


SAMPLING = {"max_tokens": 3, "seed": 4, "top_logprobs": 2}
INCLUDE = ["text", "model_logprobs", "temperature_logprobs", "entropy", "prompt_logprobs"]
ROLLOUT = {"prompts": [{"text": "ab"}, {"token_ids": [999]}], "n": 2, "sampling_params": SAMPLING, "include": INCLUDE}
OPENAI = {"max_tokens": 3, "n": 2, "logprobs": 2, "seed": 3, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "ab"}], **OPENAI, "logprobs": True, "top_logprobs": 2}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/rollouts", ROLLOUT),
    ("/v1/rollouts", {"prompts": [{"token_ids": [999]}]}),
    ("/v1/rollouts", {"prompts": []}),
    ("/v1/engine/abort", {"all": True}),
    ("/v1/engine/abort", {}),
    ("/v1/logprobs", {"items": [{"prompt": {"text": "ab"}, "continuation": {"token_ids": [1, 2]}}], "temperature": 0.5}),
    ("/v1/logprobs", {"items": [{"prompt": {"token_ids": [1]}, "continuation": {"token_ids": [999]}}]}),
    ("/v1/tokenize", {"text": "ab"}),
    ("/v1/tokenize", {"items": [{"text": "ab"}, {"messages": [{"role": "user", "content": "x"}]}]}),
    ("/v1/detokenize", {"token_ids": [65, 66]}),
    ("/v1/detokenize", {"items": [{"token_ids": [65]}, {"token_ids": [999]}]}),
    ("/v1/detokenize", {"items": [{"token_ids": [999]}]}),
    ("/v1/render", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "ab", **OPENAI}),
    ("/v1/completions", {"prompt": [], **OPENAI}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "messages": 3}),
]
STREAMS = [
    *(("/v1/rollouts", {**ROLLOUT, "stream": stream}) for stream in (True, "tokens")),
    ("/v1/completions", {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}, **OPENAI}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
]


@pytest.mark.parametrize("accept", ["application/json", MSGPACK])
def test_what_answers_is_what_the_schema_lists(short: Any, accept: str) -> None:
    with httpx.Client(base_url=short.url, headers={"Accept": accept}) as http:
        gets = [path for path, methods in openapi("1")["paths"].items() if "get" in methods and "{" not in path]
        answers = [("get", path, http.get(path)) for path in gets] + [("post", path, http.post(path, json=body)) for path, body in BODIES]
    for method, path, answer in answers:
        if "text/plain" not in answer.headers["content-type"]:
            value = jsonable(msgpack.unpackb(answer.content)) if "msgpack" in answer.headers["content-type"] else answer.json()
            conforms(value, reply_schema(method, path, answer))


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_events_are_those_the_schema_lists(short: Any, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{short.url}{path}", json=body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(events) >= 4 and (path != "/v1/rollouts" or {e["event"] for e in events} >= {"start", "sample", "error", "done"})
    for event in events:
        conforms(event, reply_schema("post", path, answer))
