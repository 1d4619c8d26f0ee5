"""What `rollsync parity` samples from: a server of its own, and prompts that differ in all that serving can."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from types import TracebackType

from .client import RolloutClient
from .errors import ConfigError, EngineDead, RollsyncError

SMALL = ("--max-batch-tokens", "64", "--max-num-seqs", "48", "--num-blocks", "112", "--apply", "in_place")
"""steps that cut prompts into pieces, and a KV pool that has no room for all samples, so that some are preempted"""
START_S = 600.0
"""how long a server may take to load its model"""
_CHILD = """\
import sys
from rollsync.rollout.engine.lifeline import killed_with_parent
killed_with_parent(int(sys.argv.pop(1)))
from rollsync.rollout.cli import main
sys.exit(main(sys.argv[1:]))
"""

RULES = (
    "You answer questions for visitors of a small museum of clocks. The museum has four rooms. The first room shows sundials and water "
    "clocks, the second room shows tower clocks with their weights and pendulums, the third room shows watches, and the last room shows "
    "how a quartz crystal keeps time. Answer in plain words. If you do not know something, say so. Keep to what was asked, and be kind. "
    "A visitor asks: "
)
"""in front of a third of the prompts, which thereby share cached blocks"""
QUESTIONS = (
    "Which room shows the oldest clocks?",
    "How does a pendulum keep time?",
    "Why do water clocks run slow in winter?",
    "Where can I see a pocket watch?",
    "What is a sundial good for at night?",
    "How many rooms are there, and what is in each of them?",
    "Can you explain quartz to a child of six?",
    "Which clock would you take home?",
)
TEXTS = (
    "Once",
    "The sea at night is",
    "1, 1, 2, 3, 5, 8,",
    "def reverse(text):\n    ",
    "Dear Sir or Madam,",
    "The three largest planets are",
    "In a hole under an old oak there lived",
    "To make bread you need flour, water, salt and",
    "Question: What is 17 + 25?\nAnswer:",
    "SELECT name, age FROM visitors WHERE",
    "The train left the station at noon, and when it reached the coast the sun was already low. On the platform stood",
    "He counted the steps again: one, two, three, four, five, six, seven, eight, nine, ten, and then",
    "Water boils at a lower temperature on a mountain, because",
    "My grandmother had a garden with roses, beans, onions, and one tree that never bore fruit. Every spring she said",
    "List of colours: red, green,",
    "Why is the sky blue? Give a short answer, then a long one.",
)


def prompts(client: RolloutClient, count: int, vocab_size: int) -> list[list[int]]:
    """Token ids of so many prompts of many lengths, a third of them with the same long beginning.

    A server without a tokenizer gets random ids.
    """
    texts = [RULES + QUESTIONS[i // 3 % len(QUESTIONS)] if i % 3 == 0 else TEXTS[(i - i // 3 - 1) % len(TEXTS)] for i in range(count)]
    try:
        return client.tokenize(texts)
    except RollsyncError as error:
        if "tokenizer" not in str(error):
            raise
    rng, words = random.Random(1), {}
    for text in [RULES, *QUESTIONS, *TEXTS]:
        words[text] = [rng.randrange(3, vocab_size) for _ in range(max(1, len(text) // 5))]
    return [words[RULES] + words[t.removeprefix(RULES)] if t.startswith(RULES) else words[t] for t in texts]


class OwnServer:
    """`rollsync serve MODEL` as a child that ends with this process, whatever happens to it.

    Raises:
        ConfigError: it refuses to start; with its words.
        EngineDead: it ends otherwise, or does not listen within START_S; likewise.
    """

    def __init__(self, model: str, flags: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the server)
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", model, "--port", "0", *SMALL, *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
        try:
            self.url = self._listens_at(time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise

    def _listens_at(self, deadline: float) -> str:
        out, text = self._process.stdout, b""
        assert out is not None
        while wait([out.fileno()], max(0.0, deadline - time.monotonic())):
            piece = os.read(out.fileno(), 4096)
            text += piece
            if found := re.search(rb"listening on (http://\S+).*\n", text):
                return found.group(1).decode()
            if not piece:
                break
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise EngineDead(f"the server does not listen after {START_S:g} s; {self._last_words() or 'it said nothing'}") from None
        raise (ConfigError if code == 2 else EngineDead)(f"the server did not start: {self._last_words() or f'exit status {code}'}")

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join([line for line in self._log.read().splitlines() if line.strip()][-1:]).removeprefix("error: ")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
