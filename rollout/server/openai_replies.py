"""From samples to OpenAI's replies and chunks.

Logprobs are those of the distribution that a token was drawn from; where the temperature is 0, of the one at temperature 1. A value
that is not finite is null, or left out where a list may be shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import RollsyncError
from ..models.detokenizer import IncrementalDecoder
from ..wire import unpack_array
from .openai_protocol import OpenAIRequest
from .sample_text import SampleText
from .token_names import TokenNames

FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}
"""OpenAI has no word for an aborted sample; "abort" is vLLM's. A sample that ends with "error" fails its whole call."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token with what logprobs say of it."""

    name: str
    raw: bytes
    logprob: float | None
    start: int
    top: list[tuple[str, bytes, float]]
    """likeliest first"""
    id: int
    top_ids: list[int]
    """of `top`"""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def completion_logprobs(tokens: Iterable[Token], offset: int) -> dict[str, Any]:
    """OpenAI's older form: parallel lists. `offset` is where the first token's choice begins in the text."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        top = {name: value for name, _, value in reversed(token.top)}  # of two with one name the likelier stays
        if token.logprob is not None:
            top.setdefault(token.name, token.logprob)
        found["tokens"].append(token.name)
        found["token_logprobs"].append(token.logprob)
        found["top_logprobs"].append(top or None)
        found["text_offset"].append(offset + token.start)
    return found


def chat_logprobs(tokens: Iterable[Token]) -> dict[str, Any]:
    def entry(name: str, raw: bytes, value: float | None) -> dict[str, Any]:
        return {"token": name, "logprob": value, "bytes": list(raw)}

    content = [{**entry(t.name, t.raw, t.logprob), "top_logprobs": [entry(*top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


class Prompt:
    """A prompt as the replies of its choices show it."""

    def __init__(self, ids: tuple[int, ...], text: str | None, first_sample: int) -> None:
        self.ids, self.first_sample = ids, first_sample
        self.text = text
        """as it was sent; None: it came as ids"""
        self.cached_tokens: int | None = None

    def echo(self, tokenizer: Any, skip_special_tokens: bool) -> str:
        if self.text is None:
            self.text = tokenizer.decode(list(self.ids), skip_special_tokens=skip_special_tokens) if tokenizer else ""
        return self.text

    def tokens(self, tokenizer: Any, names: TokenNames, logprobs: list[float | None], skip_special_tokens: bool) -> list[Token]:
        """Its tokens with their logprobs: those of the model, at temperature 1. There are no alternatives to show."""
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens) if tokenizer else None
        found, start = [], 0
        for token, logprob in zip(self.ids, logprobs, strict=True):
            found.append(Token(*names(token), _finite(logprob), start, [], token, []))
            start += len(decoder.push(token)) if decoder else 0
        return found


class Choice:
    """One choice while its tokens come."""

    def __init__(self, request: OpenAIRequest, prompt: Prompt, index: int, text: SampleText | None, names: TokenNames) -> None:
        self.request, self.prompt, self.index = request, prompt, index
        self.begun = False
        self._text, self._names = text, names
        self._taken = 0

    def take(self, sample: dict[str, Any]) -> tuple[str, list[int], list[Token]]:
        """(text, ids, tokens if logprobs are wanted) that are new with a delta, or with the finished sample."""
        ends = sample["finish_reason"] is not None
        skip = self._taken if ends else 0
        ids = unpack_array(sample["token_ids"])[skip:]
        self._taken += len(ids)
        text = "" if self._text is None else self._text.finish(ids, sample["stop_reason"]) if ends else self._text.push(ids)
        tokens = self._tokens(sample, ids, skip) if self.request.logprobs is not None else []
        return text, ids, tokens

    def _tokens(self, sample: dict[str, Any], ids: list[int], skip: int) -> list[Token]:
        logprobs = unpack_array(sample["logprobs"])[skip:]
        tables = [unpack_array(sample[n])[skip:] for n in ("top_token_ids", "top_logprobs") if n in sample]
        tops = zip(*tables, strict=True) if tables else (([], []) for _ in ids)
        starts = self._text.starts[self._taken - len(ids) :] if self._text else [0] * len(ids)
        found = []
        for token, logprob, start, row in zip(ids, logprobs, starts, tops, strict=True):
            top = [(t, v) for t, v in zip(*row, strict=True) if t >= 0 and _finite(v) is not None]
            if self.request.params.temperature == 0:
                logprob = dict(top).get(token, logprob)  # the engine's is 0 by definition
            top = top[: self.request.logprobs]
            shown = [(*self._names(t), v) for t, v in top]
            found.append(Token(*self._names(token), _finite(logprob), start, shown, token, [t for t, _ in top]))
        return found


class Reply:
    """The reply to one call, whole or in chunks.

    Args:
        request: the call.
        prompts: its prompts, in order.
        head: what every reply and chunk says: id, model, system_fingerprint.
        tokenizer: None if no text is wanted.
        eos_ids: the model's.
    """

    def __init__(self, request: OpenAIRequest, prompts: list[Prompt], head: dict[str, Any], tokenizer: Any, eos_ids: Iterable[int]) -> None:
        self.request, self.prompts = request, prompts
        self.completion_tokens = 0
        self._head = {**head, "created": int(time.time())}
        self._tokenizer = tokenizer if request.detokenize else None
        self._names = TokenNames(self._tokenizer, request.tokens_as_ids)
        self._stop_ids = frozenset(request.params.stop_token_ids) | frozenset(() if request.params.ignore_eos else eos_ids)
        self._choices: dict[int, Choice] = {}

    def _choice(self, i: int, sample: dict[str, Any]) -> Choice:
        prompt = self.prompts[i]
        index = i * self.request.params.n + sample["index"] - prompt.first_sample
        if index not in self._choices:
            text = self._new_text() if self._tokenizer else None
            self._choices[index] = Choice(self.request, prompt, index, text, self._names)
        return self._choices[index]

    def _new_text(self) -> SampleText:
        params = self.request.params
        return SampleText(
            self._tokenizer,
            skip_special_tokens=self.request.skip_special_tokens,
            spaces=self.request.spaces_between_special_tokens,
            stop=params.stop,
            stop_ids=self._stop_ids,
            include_stop=params.include_stop_str_in_output,
            with_starts=self.request.logprobs is not None,
        )

    def _end(self, prompt: Prompt, sample: dict[str, Any]) -> dict[str, Any]:
        """The fields of a choice that has ended. Raises the sample's error."""
        if sample["finish_reason"] not in FINISH_REASONS:
            raise RollsyncError(sample.get("error") or "the sample ended with an error")
        self.completion_tokens += sample["token_ids"]["shape"][0]
        cached = sample["cached_tokens"] or 0
        prompt.cached_tokens = cached if prompt.cached_tokens is None else min(prompt.cached_tokens, cached)
        end = {"finish_reason": FINISH_REASONS[sample["finish_reason"]], "stop_reason": sample["stop_reason"]}
        if sample["abort_reason"] is not None:
            end["abort_reason"] = sample["abort_reason"]
        return {**end, "weight_versions": sample["weight_versions"], "seed": sample["seed"]}

    def _logprobs(self, tokens: list[Token], offset: int = 0) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return chat_logprobs(tokens) if self.request.chat else completion_logprobs(tokens, offset)

    def usage(self) -> dict[str, Any]:
        """Tokens of the choices that have ended; a prompt counts once, however many choices it has."""
        prompt_tokens = sum(len(p.ids) for p in self.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(p.cached_tokens or 0 for p in self.prompts)},
        }

    def whole(self, samples: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """The reply. Takes (prompt index, finished sample) in any order; raises a sample's error."""
        build: Callable[[int, dict[str, Any]], dict[str, Any]] = self._chat_choice if self.request.chat else self._completion_choice
        choices = sorted((build(i, sample) for i, sample in samples), key=lambda c: int(c["index"]))
        kind = "chat.completion" if self.request.chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, "usage": self.usage()}
        if self.request.chat and self.request.return_token_ids:
            body["prompt_token_ids"] = list(self.prompts[0].ids)
        if self.request.chat and self.request.prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs(*samples[0])
        return body

    def _chat_choice(self, i: int, sample: dict[str, Any]) -> dict[str, Any]:
        choice = self._choice(i, sample)
        text, ids, tokens = choice.take(sample)
        message = {"role": "assistant", "content": text, "refusal": None}
        found = {"index": choice.index, "message": message, "logprobs": self._logprobs(tokens), **self._end(choice.prompt, sample)}
        return {**found, "token_ids": ids} if self.request.return_token_ids else found

    def _completion_choice(self, i: int, sample: dict[str, Any]) -> dict[str, Any]:
        choice, request = self._choice(i, sample), self.request
        text, ids, tokens = choice.take(sample)
        found: dict[str, Any] = {"index": choice.index, "text": text, **self._end(choice.prompt, sample)}
        found["logprobs"] = self._logprobs(tokens)
        if request.echo:
            before = choice.prompt.echo(self._tokenizer, request.skip_special_tokens)
            found["text"] = before + text
            if request.logprobs is not None:
                given = choice.prompt.tokens(self._tokenizer, self._names, self._given(sample, choice.prompt), request.skip_special_tokens)
                after = completion_logprobs(tokens, len(before))
                found["logprobs"] = {name: values + after[name] for name, values in completion_logprobs(given, 0).items()}
        if request.return_token_ids:
            found["token_ids"], found["prompt_token_ids"] = ids, list(choice.prompt.ids)
        if request.prompt_logprobs:
            found["prompt_logprobs"] = self._prompt_logprobs(i, sample)
        return found

    def _given(self, sample: dict[str, Any], prompt: Prompt) -> list[float | None]:
        """The prompt's logprobs; nulls if the sample was aborted before all were known."""
        return unpack_array(sample["prompt_logprobs"]) if "prompt_logprobs" in sample else [None] * len(prompt.ids)

    def _prompt_logprobs(self, i: int, sample: dict[str, Any]) -> list[dict[str, Any] | None]:
        """vLLM's form: null for a token that has none, else {id: …} with the token alone."""
        ids, values = self.prompts[i].ids, self._given(sample, self.prompts[i])
        return [
            None if _finite(value) is None else {str(t): {"logprob": value, "rank": None, "decoded_token": self._names(t)[0]}}
            for t, value in zip(ids, values, strict=True)
        ]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        usage = {"usage": None} if self.request.include_usage else {}
        return {**self._head, "object": kind, "choices": choices, **usage}

    def chunks(self, i: int, sample: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """What a delta or a finished sample adds to the stream. Raises a sample's error."""
        choice = self._choice(i, sample)
        text, ids, tokens = choice.take(sample)
        end = None if sample["finish_reason"] is None else self._end(choice.prompt, sample)
        if not choice.begun:
            choice.begun = True
            if first := self._first_chunk(choice):
                yield first
        shows_tokens = ids and (self.request.return_token_ids or self.request.logprobs is not None)
        if not (text or shows_tokens or end):
            return
        show: dict[str, Any] = {"index": choice.index}
        if self.request.chat:
            show["delta"] = {"content": text} if text or not end else {}
            show["logprobs"] = self._logprobs(tokens)
        else:
            show["text"] = text
            show["logprobs"] = self._logprobs(tokens)
        if self.request.return_token_ids:
            show["token_ids"] = ids
        yield self.chunk([{**show, **(end or {"finish_reason": None})}])

    def _first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """A chat's role, a completion's prompt."""
        request, prompt = self.request, choice.prompt
        show: dict[str, Any] = {"index": choice.index, "finish_reason": None, "logprobs": None}
        if request.chat:
            first = self.chunk([{**show, "delta": {"role": "assistant", "content": ""}}])
            return {**first, "prompt_token_ids": list(prompt.ids)} if request.return_token_ids else first
        if request.echo:
            show["text"] = prompt.echo(self._tokenizer, request.skip_special_tokens)
        if request.return_token_ids:
            show["prompt_token_ids"], show["token_ids"] = list(prompt.ids), []
        return self.chunk([{"text": "", **show}]) if request.echo or request.return_token_ids else None

    def last_chunk(self) -> dict[str, Any]:
        """The usage, if it was asked for."""
        return {**self.chunk([]), "usage": self.usage()}
