"""A rollout of two turns with a tool between them, by ids: what an agent's trainer needs, and nothing is ever tokenised twice.

    python examples/multi_turn.py MODEL         starts a server, and ends it
    python examples/multi_turn.py --url URL     asks one that runs

The model is asked for a sum and writes what it writes; the "tool" answers with the right number; the model goes on. The second call sends
the ids of everything before it: the server finds their KV in its prefix cache and computes the rest. At the end there is one row of ids
with logprobs and a mask: 1 where the model chose, 0 where the chat's frame or the tool wrote.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollsync import RolloutClient

QUESTION = "What is 17 + 25? Write the sum as CALC(17 + 25) and wait for its result."
TURN_TOKENS = 48


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


@dataclass
class Trajectory:
    """One rollout as a trainer wants it: columns of equal length."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """of the model's tokens, over the whole vocabulary as a trainer has it; 0.0 elsewhere"""
    mask: list[int] = field(default_factory=list)
    """1: drawn from the model, and trained on; 0: given to it"""
    versions: list[int] = field(default_factory=list)
    """of the weights that drew them; -1 elsewhere"""

    def given(self, ids: list[int]) -> None:
        """Ids from outside: the prompt, a tool's answer, the frame between two turns."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.versions += [-1] * len(ids)

    def turn(self, client: RolloutClient, seed: int) -> int:
        """Let the model go on from all ids so far. How many of them were cached."""
        params = {"max_tokens": TURN_TOKENS, "temperature": 1.0, "seed": seed}
        (result,) = client.rollouts([self.ids], sampling_params=params, include=["model_logprobs"]).results
        if result.error is not None:
            raise result.error
        (sample,) = result.samples
        self.ids += sample.token_ids
        self.logprobs += sample.model_logprobs or []
        self.mask += [1] * len(sample.token_ids)
        self.versions += [span["version"] for span in sample.weight_versions for _ in range(span["start"], span["end"])]
        return sample.cached_tokens


def frame(client: RolloutClient, answer: str) -> tuple[list[int], list[int]]:
    """Ids of the first prompt, and of what stands between two turns of the model: the end of its turn, the tool's answer, the next header.

    The second is cut out of a rendered chat, behind a marker in the place of the model's words: those are never tokenised again.
    """
    question = {"role": "user", "content": QUESTION}
    marker = "@@@"
    tool = [question, {"role": "assistant", "content": marker}, {"role": "user", "content": answer}]
    first, both = client.render([[question], tool], {"add_generation_prompt": True})
    behind = both.text.split(marker)[-1]
    (between,) = client.tokenize([behind])
    return first.token_ids, between


def joined(drawn: list[int], between: list[int]) -> list[int]:
    """`between` without the end of turn, if the model has already written that itself."""
    return between[1:] if drawn and between and drawn[-1] == between[0] else between


def roll(client: RolloutClient, seed: int) -> Trajectory:
    """Two turns."""
    prompt, between = frame(client, "CALC(17 + 25) = 42. Now say what the sum is.")
    row = Trajectory()
    row.given(prompt)
    cached = row.turn(client, seed)
    print(f"   turn 1: {len(prompt)} ids of the prompt, {cached} cached; {sum(row.mask)} drawn")
    before = len(row.ids)
    row.given(joined(row.ids[len(prompt) :], between))
    asked = len(row.ids)
    cached = row.turn(client, seed)
    print(f"   turn 2: {asked} ids ({asked - before} of the tool and the frame), {cached} cached; {len(row.ids) - asked} drawn")
    return row


def show(client: RolloutClient, row: Trajectory) -> None:
    """Who wrote what."""
    begin = 0
    for i in range(1, len(row.ids) + 1):
        if i == len(row.ids) or row.mask[i] != row.mask[begin]:
            (text,) = client.detokenize([row.ids[begin:i]], skip_special_tokens=False)
            who = "model" if row.mask[begin] else "given"
            mean = f", mean logprob {sum(row.logprobs[begin:i]) / (i - begin):.3f}" if row.mask[begin] else ""
            print(f"   {who} {begin}-{i}{mean}: {text!r}")
            begin = i


def check(client: RolloutClient, row: Trajectory) -> None:
    """Score the whole row in one pass: the logprobs that came turn by turn are the same bits."""
    start = row.mask.index(1)
    (score,) = client.score([(row.ids[:start], row.ids[start:])])
    if score.error is not None:
        raise score.error
    pairs = [(new, old) for new, old, kept in zip(score.model_logprobs, row.logprobs[start:], row.mask[start:], strict=True) if kept]
    same = sum(new == old for new, old in pairs)
    print(f"   scored in one pass: {same} of {len(pairs)} logprobs of the model's tokens are the same bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a .gguf file, or a hub id; it needs a chat template")
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if (args.model is None) == (args.url is None):
        parser.error("give MODEL or --url")
    if args.url is None:
        with serving(args.model) as url:
            run(url, args.seed)
    else:
        run(args.url, args.seed)


def run(url: str, seed: int) -> Trajectory:
    with RolloutClient(url) as client:
        row = roll(client, seed)
        show(client, row)
        check(client, row)
        return row


if __name__ == "__main__":
    main()
