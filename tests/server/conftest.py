"""A real server with a fake engine, as the processes a user would have."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from rollsync import EngineConfig, RolloutClient

HERE = Path(__file__).parent
if str(HERE) not in sys.path:  # there are no packages under tests/
    sys.path.append(str(HERE))
FACTORY = "fake_engine:build"


def child_env() -> dict[str, str]:
    paths = [str(HERE), *(p for p in (os.environ.get("PYTHONPATH"),) if p)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    """Wait for `condition`; fail naming it after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s} s: {condition}")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    line: str
    stderr: IO[str]

    def ended(self) -> str:
        """What it had written to stderr when it ended; asks it to."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        self.stderr.seek(0)
        return self.stderr.read()

    @property
    def engine_pid(self) -> int:
        return int(httpx.get(f"{self.url}/v1/engine/status").json()["engine_pid"])

    def running(self) -> int:
        return int(httpx.get(f"{self.url}/v1/engine/status").json()["stats"]["running"])

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def memory(self) -> dict[str, int]:
        """Anonymous MiB of the front and the engine."""
        memory = httpx.get(f"{self.url}/v1/engine/status").json()["memory_bytes"]
        return {name: memory[name]["anonymous"] >> 20 for name in ("front", "engine")}

    def holds(self) -> dict[str, int]:
        """What calls can leave behind: in the front's tables, in the engine, in the operating system."""
        status = httpx.get(f"{self.url}/v1/engine/status").json()
        found = {"calls": status["calls_in_flight"], **{k: status["stats"][k] for k in ("running", "waiting", "free_blocks")}}
        for name, pid in (("front", self.process.pid), ("engine", status["engine_pid"])):
            found[f"{name} files"] = len(os.listdir(f"/proc/{pid}/fd"))
        return found


def spawn(
    *flags: str,
    model: str = "fake",
    factory: str | None = FACTORY,
    first: str = "",
    new_session: bool = False,
    stderr: Any = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """`rollsync serve`; `first` is Python that its front runs before."""
    main = "import sys; from rollsync.rollout.cli import main; sys.exit(main(sys.argv[1:]))"
    how = ["-c", f"{first}\n{main}"] if first else ["-m", "rollsync.rollout.cli"]
    command = [sys.executable, *how, "serve", model, *flags]
    if "--port" not in flags:
        command += ["--port", "0"]
    if factory:
        command += ["--engine-factory", factory]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.Popen(command, env=child_env(), text=True, start_new_session=new_session, **pipes)


@contextlib.contextmanager
def serving(*flags: str, **spawning: Any) -> Iterator[Server]:
    """A server that has said its one line. Its log goes to a file: nobody here would empty a pipe."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below)
    process = spawn(*flags, stderr=log, **spawning)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"listening on (http://\S+)", line)
        if found is None:
            process.wait(5)
            log.seek(0)
            pytest.fail(f"no announcement: {line!r} {log.read()}")
        yield Server(process, found.group(1), line, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
        log.close()


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until


@pytest.fixture(name="alive")
def alive_fixture() -> Callable[[int], bool]:
    return alive


@pytest.fixture(name="spawn")
def spawn_fixture() -> Callable[..., subprocess.Popen[str]]:
    return spawn


@pytest.fixture(name="serving", scope="session")
def serving_fixture() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    return serving


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose id i is byte-level symbol i of 256, with a chat template; for `--tokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture
def fake_engine() -> Callable[[], Any]:
    """A maker of fake engines in this process."""
    spec = importlib.util.spec_from_file_location("fake_engine", HERE / "fake_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_engine"] = module
    spec.loader.exec_module(module)
    return lambda: module.FakeEngine(EngineConfig(model="fake"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """For tests that leave it as it was."""
    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def short(tokenizer_folder: Path) -> Iterator[Server]:
    """One that never waits and has a tokenizer, for tests that leave it as it was."""
    with serving("--tokenizer", str(tokenizer_folder), model="fake-short") as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[RolloutClient]:
    with RolloutClient(server.url) as found:
        yield found
