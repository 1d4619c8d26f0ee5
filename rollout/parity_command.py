"""`rollsync parity MODEL`: sample from a server, compute the samples with the stock transformers model, compare every bit."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import __version__
from .client import RolloutClient
from .engine.params import SamplingParams
from .errors import ConfigError, RollsyncError
from .parity_server import OwnServer, prompts
from .results import PromptResult
from .wire import jsonable

PADDINGS = ("right", "left", "packed")
FULL_TOKENS = 20_000
INCLUDE = ("model_logprobs", "temperature_logprobs")
SEEN = ("steps", "cut_prefills", "cached_tokens", "preemptions")
SETTLE_S = 5.0
MUST = {"cut_prefills": "prefills in pieces", "cached_tokens": "cache hits", "preemptions": "preemptions"}
""""--full" is to show these; as the engine's counters call them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a part of the tokens is sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __str__(self) -> str:
        own = asdict(self)
        more = [f"{name} {own[name]:g}" for name, off in (("top_p", 1.0), ("min_p", 0.0), ("top_k", 0)) if own[name] != off]
        return ", ".join([f"T = {self.temperature:g}", *more])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does."""

    dtypes: tuple[str | None, ...]
    """None: the model's own"""
    samplings: tuple[Sampling, ...]
    paddings: tuple[str, ...]
    tokens: int
    """sampled at least, of each dtype"""
    prompts: int
    samples: int
    max_tokens: int
    seed: int
    full: bool


@dataclass(kw_only=True, slots=True)
class Row:
    """One comparison."""

    dtype: str
    sampling: str
    padding: str | None
    """None: the stock model without parity, to show what that is for"""
    found: dict[str, Any]
    """of parity: ParityReport.to_dict; else equal, total and differences"""


@dataclass(kw_only=True, slots=True)
class Report:
    """All of a run."""

    model: str
    url: str | None
    rows: list[Row] = field(default_factory=list)
    served: list[dict[str, Any]] = field(default_factory=list)
    """by dtype: what the server is and did"""

    @property
    def all_equal(self) -> bool:
        compared = [row.found["all_equal"] for row in self.rows if row.padding is not None]
        return bool(compared) and all(compared)


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises ConfigError for flags that do not go together."""
    own = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p)
    for name, low in (("prompts", 1), ("samples", 1), ("max_tokens", 1), ("tokens", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if own.temperature == 0:
        raise ConfigError("--temperature 0 is greedy: every logprob of it is 0, so there is nothing to compare")
    common = {"prompts": args.prompts, "samples": args.samples, "max_tokens": args.max_tokens, "seed": args.seed, "full": args.full}
    if not args.full:
        return Plan(dtypes=(args.dtype,), samplings=(own,), paddings=(args.padding,), tokens=args.tokens or 1, **common)
    if args.url is not None:
        raise ConfigError("--full needs servers of its own, in both dtypes: leave --url out")
    two = (Sampling(), Sampling(temperature=0.7, top_p=0.95))
    dtypes = (args.dtype,) if args.dtype else ("float32", "bfloat16")
    return Plan(dtypes=dtypes, samplings=two, paddings=("right", "left"), tokens=args.tokens or FULL_TOKENS, **common)


def sample(client: RolloutClient, vocab_size: int, sampling: Sampling, tokens: int, plan: Plan) -> tuple[list[PromptResult], int]:
    """Results that hold at least so many sampled tokens in all, and how many they are."""
    ids = prompts(client, plan.prompts, vocab_size)
    results: list[PromptResult] = []
    samples, per_sample, done, seed = plan.samples, 0.0, 0, plan.seed
    while done < tokens:
        if done:
            samples = min(plan.samples, math.ceil((tokens - done) / (plan.prompts * per_sample)))
        params = SamplingParams(n=samples, max_tokens=plan.max_tokens, seed=seed, **asdict(sampling))
        new = client.rollouts(ids, sampling_params=params, include=INCLUDE, on_unavailable="refuse").results
        for result in new:
            if result.error is not None:
                raise result.error
            if bad := next((s for s in result.samples if s.finish_reason not in ("stop", "length")), None):
                raise RollsyncError(f"the server ended a sample by {bad.finish_reason}: {bad.error or bad.abort_reason}")
        results += new
        done, seed = sum(len(s.token_ids) for r in results for s in r.samples), seed + 1
        per_sample = done / sum(len(r.samples) for r in results)
    return results, done


def _say(words: str) -> None:
    """What goes on, for who waits."""
    print(words, file=sys.stderr, flush=True)


def run_dtype(args: argparse.Namespace, plan: Plan, dtype: str | None, report: Report) -> None:
    """Sample from a server of our own, or the one at `--url`, and compare."""
    from .parity_trainer import Trainer

    with ExitStack() as stack:
        url = args.url
        if url is None:
            url = stack.enter_context(OwnServer(args.model, ("--dtype", dtype) if dtype else ())).url
        client = stack.enter_context(RolloutClient(url, api_key=args.api_key))
        version, before = client.version()["version"], client.status()
        info = before["info"]
        check_server(url, info, version, dtype or info["dtype"])
        trainer = Trainer(args.model, info["dtype"])
        weights_known = trainer.check_weights(client)
        each = -(-plan.tokens // len(plan.samplings))
        _say(f"{info['dtype']}: sampling")
        found = [sample(client, info["vocab_size"], sampling, each, plan) for sampling in plan.samplings]
        count = sum(len(r.samples) for results, _ in found for r in results)
        after = settled_stats(client, before["stats"]["finished"] + count)
    did = {name: after[name] - before["stats"].get(name, 0) for name in SEEN}
    lengths = [len(r.prompt_token_ids) for results, _ in found for r in results]
    served = {name: info[name] for name in ("dtype", "fingerprint", "kernels", "device", "threads")}
    served |= {"trainer": trainer.words, "weights_compared": weights_known, "prompt_tokens": [min(lengths), max(lengths)]}
    report.served.append({**served, "sampled_tokens": sum(done for _, done in found), **did})
    missing = [words for name, words in MUST.items() if not did[name]]
    if plan.full and missing:
        raise ConfigError(f"there were no {' and no '.join(missing)}, so nothing is shown of them: raise --samples or --max-tokens")
    for sampling, (results, _) in zip(plan.samplings, found, strict=True):
        params = SamplingParams(**asdict(sampling))
        for padding in plan.paddings:
            _say(f"{info['dtype']}, {sampling}: {padding}, computed by transformers under parity")
            compared = trainer.compare(results, params, info, before["weights"]["version"], padding)
            report.rows.append(Row(dtype=info["dtype"], sampling=str(sampling), padding=padding, found=compared))
        stock = trainer.compare_stock(results, sampling.temperature)
        report.rows.append(Row(dtype=info["dtype"], sampling=str(sampling), padding=None, found=stock))


def settled_stats(client: RolloutClient, finished: int) -> dict[str, Any]:
    """The engine's counters, once they count so many finished samples: they are published a few times a second."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats: dict[str, Any] = client.status()["stats"]
        if stats["finished"] >= finished or time.monotonic() > deadline:
            return stats
        time.sleep(0.05)


def check_server(where: str, info: dict[str, Any], version: str, dtype: str) -> None:
    """Refuse a server that no trainer here can agree with, before anything is sampled.

    Raises:
        ConfigError: its version, dtype, device or numerics are other ones; names both.
    """
    server = f"the server at {where}"
    if version != __version__:
        raise ConfigError(f"{server} is rollsync {version}, and this is {__version__}")
    if info["dtype"] != dtype:
        raise ConfigError(f"{server} computes in {info['dtype']}, and the trainer in {dtype}: --dtype chooses the trainer's")
    if info["device"] != "cpu":
        raise ConfigError(f"{server} computes on {info['device']}, and a trainer on the CPU has other bits")
    from .engine.devices import check_build, choose_kernels

    numerics = info["config"]["numerics"]
    mine = check_build(choose_kernels(None), numerics["k_shards"], numerics["head_dtype"])
    if info["fingerprint"] != mine:
        raise ConfigError(f"{server} has the numerics fingerprint {info['fingerprint']}, and this machine {mine}")


def in_words(report: Report) -> str:
    """The report for a reader."""
    lines = [report.model + (f" against {report.url}" if report.url else "")]
    for served in report.served:
        low, high = served["prompt_tokens"]
        lines += [
            f"{served['dtype']}: {served['kernels']} kernels, {served['threads']} threads, numerics {served['fingerprint']}; "
            f"trainer: {served['trainer']}",
            f"  {served['sampled_tokens']:,} tokens sampled in {served['steps']:,} steps, after prompts of {low} to {high} tokens; "
            f"{served['cut_prefills']:,} prefills cut",
            f"  by the end of a step, {served['cached_tokens']:,} prompt tokens from the cache, {served['preemptions']:,} preemptions",
        ]
        if not served["weights_compared"]:
            lines.append("  (its control routes need another key, so the digests of its weights were not compared)")
    lines += ["", f"{'':<42}{'equal':>18}{'max difference':>17}{'mean':>10}"]
    for row in report.rows:
        f = row.found
        what = f"{row.dtype}, {row.sampling}, {row.padding}" if row.padding else "    the same model without parity"
        columns = list(f["columns"].values()) if row.padding else [f]
        highest, mean = max(c["max_difference"] for c in columns), max(c["mean_difference"] for c in columns)
        equal = f"{f['equal']:,} of {f['total']:,}"
        lines.append(f"{what:<42}{equal:>18}{highest:>17.3g}{mean:>10.2g}")
    first = next((row.found["first_mismatch"] for row in report.rows if row.found.get("first_mismatch")), None)
    if first:
        lines += ["", f"first difference: {first['text']}"]
    return "\n".join([*lines, "", "every bit is equal" if report.all_equal else "NOT equal"])


def run(args: argparse.Namespace) -> int:
    """The exit status: 0 if all is equal, 1 if not.

    Raises:
        ConfigError: the flags, the model or the server cannot be used, or failed, or no parity can be claimed between them.
    """
    plan = plan_of(args)
    report = Report(model=args.model, url=args.url)
    try:
        for dtype in plan.dtypes:
            run_dtype(args, plan, dtype, report)
    except RollsyncError as error:  # whatever it is, it does not say that bits differ
        raise ConfigError(str(error)) from error
    print(json.dumps(jsonable({"all_equal": report.all_equal, **asdict(report)})) if args.json else in_words(report))
    return 0 if report.all_equal else 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `rollsync parity`."""
    parser.add_argument("model", metavar="MODEL", help="the trainer's: a folder, a .gguf file, or a hub id")
    text = "a server to sample from (default: one of its own on MODEL, with small steps and a small KV pool)"
    parser.add_argument("--url", metavar="URL", help=text)
    parser.add_argument("--api-key", metavar="KEY", help="what that server asks for")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of server and trainer (default: the server's, or the model's)")
    parser.add_argument("--prompts", metavar="N", type=int, default=24, help="different prompts (default: 24)")
    parser.add_argument("--samples", metavar="N", type=int, default=4, help="samples of each in one call (default: 4)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=96, help="of a sample (default: 96)")
    parser.add_argument("--tokens", metavar="N", type=int, help="sample until there are so many tokens of each dtype (default: one call)")
    parser.add_argument("--temperature", metavar="X", type=float, default=1.0, help="default: 1")
    parser.add_argument("--top-p", metavar="X", type=float, default=1.0, help="default: 1")
    parser.add_argument("--top-k", metavar="N", type=int, default=0, help="default: all")
    parser.add_argument("--min-p", metavar="X", type=float, default=0.0, help="default: 0")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the first call (default: 0)")
    parser.add_argument("--padding", choices=PADDINGS, default="right", help="how the trainer's batches are laid out (default: right)")
    text = f"both dtypes, T = 1 and T = 0.7 with top_p 0.95, right- and left-padded; {FULL_TOKENS:,} tokens (or --tokens) of each dtype"
    parser.add_argument("--full", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
