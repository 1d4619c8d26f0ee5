"""A server keeps sampling while a trainer process changes its weights ten times.

    python examples/live_update.py FOLDER

FOLDER is a model's, with safetensors (`make live` takes the demo's). The trainer is a second process: each of its "steps" adds a little
noise to the weights and hands them over in shared memory (`WeightSender`). Every sample says which of its tokens came from which version.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 10


def train(url: str, folder: str) -> None:
    """The trainer process: ten steps, each a transaction into the live server."""
    import torch
    from rollsync.rollout.engine.weight_digest import fast_fill
    from rollsync.weight_sync.sender import WeightSender
    from rollsync.weight_sync.sources import TensorSource
    from safetensors.torch import load_file

    weights = {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}
    generator = torch.Generator().manual_seed(0)
    with WeightSender(url, TensorSource(weights), transport="ipc", kv_policy="recompute", fill=fast_fill()) as sender:
        for step in range(1, STEPS + 1):
            time.sleep(1.0)  # the training step
            for tensor in weights.values():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 1e-4)
            report = sender.sync(version=step)
            print(f"   trainer: version {report.version}, {report.nbytes >> 20} MiB in {report.seconds['total']:.2f} s", flush=True)


def sample(url: str, trainer: subprocess.Popen[str]) -> None:
    """Rollouts one after another for as long as the trainer runs; prints the versions of each sample's tokens."""
    from rollsync import RolloutClient

    with RolloutClient(url) as client:
        number = 0
        while trainer.poll() is None or number == 0:
            number += 1
            params = {"max_tokens": 96, "seed": number, "ignore_eos": True}
            result = client.rollouts(["The sea at night is", "Once there was a"], n=4, sampling_params=params)
            samples = [s for r in result.results for s in r.samples]
            spans = {", ".join(f"{v['start']}-{v['end']}: v{v['version']}" for v in s.weight_versions) for s in samples}
            print(f"rollout {number}: {len(samples)} samples, tokens by version: {' | '.join(sorted(spans))}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("model", metavar="FOLDER")
    parser.add_argument("--train", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not any(Path(args.model).glob("*.safetensors")):
        parser.error(f"FOLDER must hold a model as safetensors files, got {args.model}")
    if args.train:
        train(args.train, args.model)
        return 0
    serve = [sys.executable, "-m", "rollsync.rollout.cli", "serve", args.model, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"listening on (http://\S+)", server.stdout.readline())
            if found is None:
                log.seek(0)
                print(f"the server did not start:\n{log.read()}", file=sys.stderr)
                return 1
            with subprocess.Popen([sys.executable, __file__, args.model, "--train", found[1]], text=True) as trainer:
                sample(found[1], trainer)
            return trainer.returncode
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
