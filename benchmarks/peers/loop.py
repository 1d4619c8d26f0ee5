"""The worker's side of the conversation: a line of JSON in, a line of JSON out, one engine that stays loaded.

First line in: {"model": folder, "options": {…}}; the answer holds "ready". Then jobs: {"op": "generate", "prompts": [[ids]],
"n", "max_tokens", "seed", "cold", "prime"}; the answer holds "seconds", "tokens", "logprobs". Standard library only: this
runs in the rival's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

Job = dict[str, Any]


class Side(Protocol):
    """One engine, loaded."""

    facts: dict[str, Any]
    """versions and settings, for the report"""
    ops: dict[str, Callable[[Job], dict[str, Any]]]
    """further operations by name"""

    def forget(self) -> None:
        """Empty the prefix cache."""

    def generate(self, job: Job) -> Any:
        """Sample; on return ids and logprobs are at hand in Python."""

    def count(self, outputs: Any) -> tuple[int, int]:
        """(new tokens, logprobs) in what `generate` returned."""

    def extra(self) -> dict[str, Any]:
        """More about the last `generate`, for the report."""


def _generate(side: Side, job: Job) -> dict[str, Any]:
    if job.get("cold"):
        side.forget()
    if job.get("prime"):
        side.generate({**job, "n": 1, "max_tokens": 1})
    began = time.perf_counter()
    outputs = side.generate(job)
    seconds = time.perf_counter() - began
    tokens, logprobs = side.count(outputs)
    return {"seconds": seconds, "tokens": tokens, "logprobs": logprobs, **side.extra()}


def answers_pipe() -> TextIO:
    """The pipe to the parent; whatever else is printed goes to stderr from now on."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipe


def serve(load: Callable[[str, dict[str, Any]], Side]) -> None:
    """Load once, then answer until stdin ends. An exception is told to the parent and ends the worker."""
    answers = answers_pipe()
    try:
        setup = json.loads(sys.stdin.readline())
        began = time.perf_counter()
        side = load(setup["model"], setup.get("options", {}))
        answers.write(json.dumps({"ready": side.facts, "load_s": time.perf_counter() - began}) + "\n")
        for line in sys.stdin:
            job = json.loads(line)
            op = job.get("op", "generate")
            answer = _generate(side, job) if op == "generate" else side.ops[op](job)
            answers.write(json.dumps(answer) + "\n")
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        sys.exit(1)
