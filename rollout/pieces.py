"""The prompts of one call to several servers: cut into calls to each, and put together again."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]

from .errors import BadRequest, RollsyncError
from .results import Call, Frames, PromptResult, RolloutResult, Sample
from .wire import unpack_array


class Work:
    """The prompts of one call, and what has been found so far."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body, self._began = body, time.monotonic()
        self.id = body.get("request_id") or uuid.uuid4().hex
        self.n = body["n"]
        self.todo = list(range(len(body["prompts"])))
        """prompts that no server has"""
        self._found: dict[int, PromptResult] = {}
        self._models: dict[str, None] = {}
        self._fingerprints: dict[str, None] = {}
        self._pieces = 0
        self._count_samples()

    def _count_samples(self) -> None:
        """Equal prompts of one seed count their samples on, as one server would have them, whichever servers they go to."""
        counted: Counter[Any] = Counter()
        params = self._body["sampling_params"]
        for i, prompt in enumerate(self._body["prompts"]):
            if prompt.get("first_sample") is None and (seed := prompt.get("seed", params.get("seed"))) is not None:
                what = {name: prompt.get(name) for name in ("token_ids", "text", "messages", "chat_template_kwargs")}
                key = (msgpack.packb(what, default=repr), seed)
                self._body["prompts"][i] = {**prompt, "first_sample": counted[key]}
                counted[key] += self.n

    def piece(self, prompts: Sequence[int], min_version: int | None) -> Call[None]:
        """A call for some of the prompts."""
        self._pieces += 1
        body = {**self._body, "prompts": [self._body["prompts"][i] for i in prompts], "stream": "samples", "on_unavailable": "refuse"}
        if "request_id" in body:
            body["request_id"] = f"{self.id}#{self._pieces}"
        if "deadline_s" in body:
            body["deadline_s"] = max(0.001, body["deadline_s"] + self._began - time.monotonic())
        if min_version is not None:
            body["min_version"] = min_version
        return Call("POST", "/v1/rollouts", body, lambda _: None)

    def started(self, frames: Frames, prompts: Sequence[int]) -> dict[int, list[int]]:
        """The ids of a piece's prompts."""
        self._models[frames.started["model"]] = self._fingerprints[frames.started["fingerprint"]] = None
        return {prompts[p["prompt_index"]]: list(unpack_array(p["prompt_token_ids"])) for p in frames.started["prompts"]}

    def finish(self, i: int, ids: list[int], samples: list[Sample], error: RollsyncError | None = None) -> None:
        samples = sorted(samples, key=lambda s: s.index)
        self._found[i] = PromptResult(prompt_index=i, prompt_token_ids=ids, samples=samples, error=error)

    def has(self, i: int) -> bool:
        return i in self._found

    def result(self) -> RolloutResult:
        """All of it; raises the first error if no prompt was served, as one server would."""
        results = [found for _, found in sorted(self._found.items())]
        if results and all(r.error is not None for r in results):
            raise next(r.error for r in results if r.error is not None)
        samples = [s for r in results for s in r.samples]
        usage = {
            "prompt_tokens": sum(len(r.prompt_token_ids) for r in results),
            "completion_tokens": sum(len(s.token_ids) for s in samples),
            "cached_tokens": sum(s.cached_tokens for s in samples),
            "samples": len(samples),
        }
        fingerprint = next(iter(self._fingerprints), "") if len(self._fingerprints) == 1 else ""
        return RolloutResult(id=self.id, model=next(iter(self._models), ""), results=results, usage=usage, fingerprint=fingerprint)


def renamed(error: RollsyncError, prompts: Sequence[int]) -> RollsyncError:
    """The same error with the prompt's index in the call, not in the piece that a server had."""

    def rename(text: str) -> str:
        return re.sub(r"\bprompts\[(\d+)\]", lambda m: f"prompts[{prompts[int(m[1])]}]" if int(m[1]) < len(prompts) else m[0], text)

    if not isinstance(error, BadRequest):
        return error
    return type(error)(rename(str(error)), field=None if error.field is None else rename(error.field))
