"""Trainer processes, cheap to start and to kill: one process imports torch once and forks a trainer per case.

Run as a script it reads cases as JSON lines and answers each with the pid of the trainer; that trainer writes its outcome to the
case's file. `Trainers` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Trainers:
    """Starts trainers. `start` returns at once, `Trainer.outcome` waits."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def start(self, **case: Any) -> Trainer:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._count += 1
        path = self._folder / f"outcome-{self._count}.json"
        self._process.stdin.write(json.dumps({**case, "outcome": str(path)}) + "\n")
        self._process.stdin.flush()
        return Trainer(int(self._process.stdout.readline()), path)

    def close(self) -> None:
        self._process.communicate(timeout=20)


class Trainer:
    def __init__(self, pid: int, path: Path) -> None:
        self.pid, self._path = pid, path

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stopped(self) -> bool:
        """Whether it froze itself."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def outcome(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """{"report"} or {"error"}; {} if it was killed."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self._path.exists():
                found: dict[str, Any] = json.loads(self._path.read_text())
                return found
            if not os.path.exists(f"/proc/{self.pid}"):
                return json.loads(self._path.read_text()) if self._path.exists() else {}
            time.sleep(0.02)
        raise AssertionError(f"trainer {self.pid} did not end within {timeout_s} s")


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One sync, with a fault if the case names one."""
    import torch
    from rollsync.weight_sync.sender import WeightSender
    from rollsync.weight_sync.sources import TensorMeta, TensorSource
    from safetensors.torch import load_file

    tensors = load_file(Path(case["model"]) / "model.safetensors")
    fault, at = case.get("fault"), case.get("at", 5)
    victim = list(tensors)[at]
    options: dict[str, Any] = dict(case.get("options", {}))
    if fault == "unknown name":
        tensors["nobody.weight"] = torch.zeros(4, 4)
    elif fault == "missing name":
        del tensors[victim]
    elif fault == "wrong shape":
        tensors[victim] = tensors[victim][:-1].clone()
    elif fault == "nan":
        tensors[victim] = tensors[victim].clone()
        tensors[victim].view(-1)[0] = float("nan")
    elif fault == "wrong digest":
        options["fill"] = lambda target, values, box, shape: (target.copy_(values), 1)[1]

    class Source(TensorSource):
        def metadata(self) -> list[TensorMeta]:
            metas = super().metadata()
            if fault == "wrong dtype":
                metas = [TensorMeta(m.name, "int8" if m.name == victim else m.dtype, m.shape, m.boxes) for m in metas]
            return metas

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, values in super().__iter__():
                if name == victim:
                    if fault == "raise":
                        raise RuntimeError("the optimizer fell over")
                    if fault == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if fault == "freeze":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    if fault == "ends early":
                        return
                yield name, values

    if case["transport"] == "disk":
        options["folder"] = case["folder"]
    try:
        with WeightSender(case["urls"], Source(tensors), transport=case["transport"], bucket_bytes=3000, **options) as sender:
            return {"report": sender.sync(version=case.get("version")).version}
    except Exception as error:
        return {"error": str(error), "type": type(error).__name__}


def main() -> None:
    import torch
    from rollsync.weight_sync import sender, sources  # noqa: F401 (before the forks)

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        pid = os.fork()
        if pid == 0:
            found = run_case(case)
            written = Path(case["outcome"] + ".part")
            written.write_text(json.dumps(found))
            written.rename(case["outcome"])
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
