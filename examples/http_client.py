"""What a trainer asks of the server, over plain HTTP.

    python examples/http_client.py MODEL         starts a server, and ends it
    python examples/http_client.py --url URL     asks one that runs

It samples, streams tokens, scores given tokens, ends a call early, and asks again through OpenAI's client if that is installed.
docs/api.md lists every field.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

PROMPTS = ("The sea at night is", "The first thing a baker does is")
TEMPERATURE = 0.8


@contextmanager
def serving(model: str) -> Iterator[str]:
    """A server on a free port; its address. It ends with the block."""
    command = [sys.executable, "-m", "rollsync.rollout.cli", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"listening on (http://\S+)", process.stdout.readline())
            if found is None:
                sys.exit("the server did not start; its last lines say why")
            yield found[1]
        finally:
            process.terminate()


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """The reply. A refusal names the field that is wrong."""
    answer = http.post(path, json=body)
    if answer.is_error:
        sys.exit(f"{path}: {answer.status_code} {answer.json()['error']['message']}")
    return answer.json()


def sample(http: httpx.Client) -> dict[str, Any]:
    """All samples of all prompts in one call. The first sample, with its prompt's ids."""
    params = {"max_tokens": 16, "temperature": TEMPERATURE, "seed": 1}
    body = {"prompts": [{"text": p} for p in PROMPTS], "n": 3, "sampling_params": params, "include": ["text"]}
    reply = post(http, "/v1/rollouts", body)
    for prompt, result in zip(PROMPTS, reply["results"], strict=True):
        for one in result["samples"]:
            mean = sum(one["logprobs"]) / max(1, len(one["logprobs"]))
            print(f"   {prompt}{one['text']!r}  ({one['finish_reason']}, mean logprob {mean:.3f})")
    print(f"   {reply['usage']}")
    first = reply["results"][0]
    return {"prompt_token_ids": first["prompt_token_ids"], **first["samples"][0]}


def events(http: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    with http.stream("POST", "/v1/rollouts", json={**body, "stream": "tokens"}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def stream(http: httpx.Client) -> None:
    """Tokens as they come; then the whole sample once more, which is what to keep."""
    body = {"prompts": [{"text": PROMPTS[0]}], "sampling_params": {"max_tokens": 16, "seed": 1}, "include": ["text"]}
    parts = 0
    for event in events(http, body):
        if event["event"] == "delta":
            parts += 1
            print("  ", event["sample"]["token_ids"], repr(event["sample"]["text"]))
        elif event["event"] == "sample":
            print(f"   {parts} parts; whole: {event['sample']['text']!r}")
        elif event["event"] == "error":
            sys.exit(event["error"]["message"])


def score(http: httpx.Client, drawn: dict[str, Any]) -> None:
    """Logprobs of given tokens: those drawn before have the same ones again, to the bit."""
    item = {"prompt": {"token_ids": drawn["prompt_token_ids"]}, "continuation": {"token_ids": drawn["token_ids"]}}
    scored = post(http, "/v1/logprobs", {"items": [item], "temperature": TEMPERATURE})["results"][0]
    print(f"   at temperature {TEMPERATURE}, as drawn: {scored['temperature_logprobs'] == drawn['logprobs']}")
    print(f"   at temperature 1: {[round(x, 3) for x in scored['model_logprobs'][:6]]} ...")


def abort(http: httpx.Client) -> None:
    """End a long call from elsewhere. It is answered with what it has."""
    body = {"prompts": [{"text": PROMPTS[1]}], "group": "step-7", "sampling_params": {"ignore_eos": True}, "stream": "tokens"}
    begun = threading.Event()

    def end() -> None:
        begun.wait(60)
        print(f"   abort: {post(http, '/v1/engine/abort', {'group': 'step-7', 'reason': 'new weights'})}")

    other = threading.Thread(target=end, daemon=True)
    other.start()
    for event in events(http, body):
        if event["event"] == "delta":
            begun.set()
        if event["event"] == "sample":
            one = event["sample"]
            print(f"   {one['finish_reason']} ({one['abort_reason']}) after {len(one['token_ids'])} tokens")
    begun.set()
    other.join()


def openai(url: str) -> None:
    """The same server through OpenAI's own client."""
    try:
        from openai import OpenAI
    except ImportError:
        print("   not installed: pip install openai")
        return
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        done = client.completions.create(model=model, prompt=PROMPTS[0], n=2, max_tokens=16, temperature=TEMPERATURE, seed=1, logprobs=0)
        for choice in done.choices:
            print(f"   {PROMPTS[0]}{choice.text!r}  ({choice.finish_reason})")


def run(url: str) -> None:
    with httpx.Client(base_url=url, timeout=httpx.Timeout(600, connect=10), trust_env=False) as http:
        about = http.get("/version").json()
        print(f"{url}: Rollsync {about['version']}, {about['model']}")
        print("1. One call: prompts x samples")
        drawn = sample(http)
        print("2. A stream of tokens")
        stream(http)
        print("3. Logprobs of given tokens")
        score(http, drawn)
        print("4. A call ended early")
        abort(http)
    print("5. OpenAI's client")
    openai(url)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder, a .gguf file, or a hub id, to be served")
    parser.add_argument("--url", help="a server that runs, such as http://127.0.0.1:8000")
    args = parser.parse_args()
    if (args.model is None) == (args.url is None):
        parser.error("give a MODEL, or --url")
    if args.url is not None:
        run(args.url.rstrip("/"))
        return 0
    with serving(args.model) as url:
        run(url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
