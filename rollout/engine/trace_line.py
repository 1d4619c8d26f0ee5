"""One finished sample as one line of JSON. docs/replay.md describes the fields; `rollout/trace.py` reads them back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...kernels.sampling_mask import SamplingMask
from ..wire import is_array, is_mask, unpack_array
from .config import EngineConfig
from .params import SamplingParams
from .runner_info import RunnerInfo
from .sequence import PromptVersions, Request
from .types import RolloutRequest

FORMAT = 1
"""of a line; a reader refuses newer ones"""
OPENING = b'{"rollsync_trace":'
"""how every line begins"""
PIECE = 4096
"""values written in one go: the interpreter is held for no longer"""
OPTIONS = {"tokenizer": str, "load_format": str, "sample_padding": bool}
"""fields of EngineConfig, and their kinds, that say what a model is; in a line where they differ from their defaults. A trace may come from
anybody, so it says nothing else of the engine that replays it"""
NOT_JSON = {"inf": '"inf"', "-inf": '"-inf"', "-0": "-0.0"}
"""what formatting writes and JSON has no number for, or would read as another"""


def weights_digest(digests: Mapping[str, str]) -> str:
    """One digest of all weights, from those of the tensors by name (`Control.digests`, or /v1/weights/digests): 16 hexadecimal digits."""
    text = "".join(f"{name}={digests[name]}\n" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Every field, those at their defaults too: a line says all there is to its sample, whatever a later version's defaults are."""
    found = {f.name: getattr(params, f.name) for f in fields(params)}
    return {**found, "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()}}


def _floats(values: list[float | None], nothing: str) -> str:
    """Float32 values with nine digits, which give their bits back; what JSON has no number for as a string."""
    text = ",".join([nothing if v is None else f"{v:.9g}" for v in values])
    if "inf" in text or ",-0," in f",{text},":
        text = ",".join(NOT_JSON.get(word, word) for word in text.split(","))
    return text


def _list(values: list[Any], nothing: str | None) -> str:
    pieces = (values[at : at + PIECE] for at in range(0, len(values), PIECE))
    return f"[{','.join(','.join(map(str, piece)) if nothing is None else _floats(piece, nothing) for piece in pieces)}]"


def array_to_json(value: dict[str, Any], nothing: str = '"nan"') -> str:
    """A wire array as JSON text, with `nothing` for a NaN."""
    rows = unpack_array(value)
    nan = nothing if value["dtype"][1] == "f" else None
    return f"[{','.join(_list(row, nan) for row in rows)}]" if len(value["shape"]) == 2 else _list(rows, nan)


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def weight_versions(output: Mapping[str, Any], prompt_versions: PromptVersions) -> list[int]:
    """Of all weights that the values of a line depend on: its tokens', and its prompt's if it holds those.

    Args:
        output: a final one as `output_to_wire` gives it.
        prompt_versions: see `Request`.
    """
    versions = {span["version"] for span in output["weight_versions"]}
    if output.get("prompt_logprobs") is not None:
        versions |= {version for version, _ in prompt_versions}
    return sorted(versions)


class LineMaker:
    """Writes the lines of one engine. What the samples of a request share is written out once."""

    def __init__(self, info: RunnerInfo, version: str) -> None:
        numerics = info.config.numerics
        facts = {
            "rollsync_trace": FORMAT,
            "rollsync": version,
            "model": {"name": info.model, "digest": info.model_digest},
            "dtype": info.dtype,
            "fingerprint": info.fingerprint,
            "k_shards": numerics.k_shards,
            "head_dtype": numerics.head_dtype,
            "device": info.device,
            "kernels": info.kernels,
        }
        defaults = {f.name: f.default for f in fields(EngineConfig)}
        options = {name: getattr(info.config, name) for name in OPTIONS}
        if options := {name: value for name, value in options.items() if value != defaults[name]}:
            facts["options"] = options
        self._facts = _dump(facts)[:-1]
        self._spec: RolloutRequest | None = None
        """the last one; not its Request, which may lead to the engine and keep it alive"""
        self._shared = ""

    def line(
        self, request: Request, output: Mapping[str, Any], digests: Mapping[int, str], prompt_versions: PromptVersions = ()
    ) -> bytes:
        """A line, its end included.

        Args:
            output: a final one as `output_to_wire` gives it.
            prompt_versions: of the request, as they were when the sample ended.
            digests: of the weights, by version; one that is not known is null in the line.
        """
        if request.spec is not self._spec:
            self._spec, self._shared = request.spec, self._of_request(request)
        own: list[str] = [f'"seed":{request.seed}', f'"sample_index":{output["sample_index"]}']
        own.append(f'"weights":{_dump({str(v): digests.get(v) for v in weight_versions(output, prompt_versions)})}')
        if output.get("prompt_logprobs") is not None and any(mixed for _, mixed in prompt_versions):
            own.append('"prompt_mixed_kv":true')
        for name, value in output.items():
            if is_array(value):
                own.append(f'"{name}":{array_to_json(value, *(("null",) if name == "prompt_logprobs" else ()))}')
            elif is_mask(value):
                rows = ",".join(map(_dump, SamplingMask.from_wire(value).json_rows()))
                own.append(f'"{name}":{{"vocab_size":{value["vocab_size"]},"tokens":[{rows}]}}')
            elif name not in ("request_id", "sample_index", "seed"):
                own.append(f'"{name}":{_dump(value)}')
        return f"{self._facts},{self._shared},{','.join(own)}}}\n".encode()

    @staticmethod
    def _of_request(request: Request) -> str:
        spec = request.spec
        shared: dict[str, Any] = {"request_id": spec.request_id}
        shared |= {name: value for name in ("group", "session") if (value := getattr(spec, name)) is not None}
        shared |= {"params": params_to_json(spec.params), "max_len": request.max_len, "include": spec.include}
        for name in ("prompt_logprobs_start", "continue_from", "forced_token_ids", "score_only"):
            if value := getattr(spec, name):
                shared[name] = value
        return f'{_dump(shared)[1:-1]},"prompt_token_ids":{_list(list(spec.prompt_token_ids), None)}'
