"""A TRL trainer as a worker: it does one GRPO step per job, by whatever it generates with, and tells how long each part took.

First line in: {"model": folder, "options": {...}}; the answer holds "ready". Then each line lets it take one step; the answer holds the
seconds of "generation", "sync" and "train", and the number of tokens. What is not generation or sync is training: rewards, forward
passes, the backward pass and the optimizer.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from .loop import answers_pipe

SIDES = ("rollsync", "rollsync-url", "trl")
"""through attach with an engine in the worker; with a server beside it; stock, which generates by transformers"""


def texts(count: int) -> list[str]:
    """Prompts of about 24 tokens, all of one length: numbers have two digits."""
    pairs = [(10 + (37 * i) % 89, 10 + (53 * i) % 83) for i in range(count)]
    return [f"Tom has {a} marbles and finds {b} more on his way home. How many does he have now?" for a, b in pairs]


class Ended(Exception):
    """No more jobs."""


@contextlib.contextmanager
def target_of(model: str, options: dict[str, Any]) -> Iterator[Any]:
    """An engine in this process, or the address of a server that ends with it."""
    if options["side"] == "rollsync":
        from rollsync import Engine

        with Engine(model, dtype="bfloat16", **options["engine"]) as engine:
            yield engine
        return
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options["engine"].items()]
    command = [sys.executable, "-m", "rollsync.rollout.cli", "serve", model, "--dtype", "bfloat16", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"listening on (http://\S+)", server.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not start")
            yield found[1]
        finally:
            server.terminate()


def new_trainer(model: str, options: dict[str, Any], folder: str, made: list[int]) -> Any:
    """A stock GRPOTrainer that computes in bfloat16, whose completions all have the same length; theirs go to `made`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined, unused-ignore]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        made[:] = map(len, completion_ids)
        return [len(set(ids)) / len(ids) for ids in completion_ids]

    rewards: Any = [reward]
    rows, micro_batch = options["prompts"] * options["samples"], options["micro_batch"]
    to_the_end = {"min_new_tokens": options["tokens"]} if options["side"] == "trl" else {"ignore_eos": True}
    config = GRPOConfig(
        output_dir=folder, max_steps=1_000_000, learning_rate=1e-6, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch, num_generations=options["samples"], max_completion_length=options["tokens"],
        temperature=1.0, generation_kwargs=to_the_end, bf16=True, use_cpu=True, gradient_checkpointing=False, save_strategy="no",
        report_to=[], disable_tqdm=True, logging_steps=1_000_000, mask_truncated_completions=False,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["weights"])), args=config, reward_funcs=rewards,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts(16 * options["prompts"])]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )  # fmt: skip


class Clock:
    """Seconds spent in calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, thing: Any, method: str, name: str) -> None:
        """From now on `thing.method` is timed."""
        call: Callable[..., Any] = getattr(thing, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        setattr(thing, method, timed)


def run(model: str, options: dict[str, Any], answers: Any) -> None:
    """Load, then train a step per line of stdin."""
    import torch
    from transformers import TrainerCallback

    began, clock, made = time.perf_counter(), Clock(), list[int]()
    if options["threads"]:
        torch.set_num_threads(options["threads"])

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            answers.write(json.dumps({"ready": {"threads": torch.get_num_threads()}, "load_s": time.perf_counter() - began}) + "\n")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                raise Ended
            clock.seconds.clear()
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds, sync = time.perf_counter() - self.begin, clock.seconds.get("sync", 0.0)
            turn = clock.seconds["turn"]
            parts = {"generation": turn - sync, "sync": sync, "train": seconds - turn}
            answers.write(json.dumps({"seconds": seconds, **parts, "tokens": sum(made)}) + "\n")

    with contextlib.ExitStack() as stack:
        trainer = new_trainer(model, options, stack.enter_context(tempfile.TemporaryDirectory()), made)
        if options["side"] != "trl":
            from rollsync.trainer_adapters.trl import attach

            clock.watch(attach(trainer, stack.enter_context(target_of(model, options))), "sync_weights", "sync")
        clock.watch(trainer, "_generate_single_turn", "turn")
        trainer.add_callback(Turns())
        with contextlib.suppress(Ended):
            trainer.train()


def main() -> None:
    answers = answers_pipe()
    try:
        setup = json.loads(sys.stdin.readline())
        run(setup["model"], setup["options"], answers)
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
