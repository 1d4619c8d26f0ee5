"""Whatever goes wrong in an update, on either side: the old weights are served bit for bit (or, in place, a refusal says why not), the
next update works without a restart, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rollsync import Engine, RolloutClient, RolloutRequest, SamplingParams
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from safetensors.torch import load_file, save_file
from trainers import Trainers

OPTIONS = {"block_tokens": 16, "num_blocks": 256, "max_model_len": 512, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))
TRANSPORTS = ("http", "ipc", "collective", "disk")
SLOW = pytest.mark.slow
SOME = [pytest.param(t, marks=[] if t in ("ipc", "collective") else SLOW) for t in TRANSPORTS]
QUICK = (("ipc", "staged"), ("collective", "staged"), ("ipc", "in_place"))
WAYS = [pytest.param(t, a, marks=[] if (t, a) in QUICK else SLOW) for a in ("staged", "in_place") for t in TRANSPORTS]
BEFORE_A_BYTE = ("unknown name", "missing name", "wrong shape", "wrong dtype")
"""faults that a manifest already shows"""
REFUSED = {
    "unknown name": "nobody.weight",
    "missing name": "is missing",
    "wrong shape": "must be",
    "wrong dtype": "dtype must be one of",
    "nan": "1 values are not finite",
    "wrong digest": "the sender says 0000000000000001",
    "raise": "the optimizer fell over",
    "ends early": "the source ended before",
}
"""what the trainer hears of each fault that it lives to hear of"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One model, two sets of weights."""
    root = tmp_path_factory.mktemp("models")
    folders = [Path(write_model(root / f"m{i}", "llama", max_position_embeddings=512)) for i in range(2)]
    first = load_file(folders[0] / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    new = {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in first.items()}
    save_file(new, folders[1] / "model.safetensors")
    return [str(folder) for folder in folders]


@pytest.fixture(scope="module")
def expected(models: list[str]) -> list[tuple[list[int], list[float]]]:
    """What a fresh engine of each samples."""
    found = []
    for model in models:
        with Engine(model, **OPTIONS) as engine:
            engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=SamplingParams(seed=1, max_tokens=9)))
            outputs = []
            while engine.has_work:
                outputs += engine.step()
        found.append((outputs[-1].token_ids, outputs[-1].logprobs))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the disk transport writes and engines read."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(serving: Any, models: list[str], root: Path) -> Iterator[Any]:
    with serving(*FLAGS, "--weights-root", str(root), model=models[0], factory=None) as found:
        found.root = root
        yield found


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    made = Trainers(tmp_path_factory.mktemp("outcomes"))
    yield made
    made.close()


def sample(server: Any) -> tuple[list[int], list[float]]:
    with RolloutClient(server.url) as client:
        found = client.rollouts([PROMPT], sampling_params={"seed": 1, "max_tokens": 9}).results[0].samples[0]
    return list(found.token_ids), list(found.logprobs)


def state(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/weights", timeout=0.5 * 20).json()
    return found


def holds(server: Any) -> dict[str, Any]:
    """What a failed update could leave behind."""
    status = httpx.get(f"{server.url}/v1/engine/status").json()
    found: dict[str, Any] = {"shm": sorted(os.listdir("/dev/shm"))}
    for name, pid in (("front", server.process.pid), ("engine", status["engine_pid"])):
        # (groups outlive an update; each store of one holds /dev/null in reserve)
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if os.path.islink(f"/proc/{pid}/fd/{fd}")]
        found[name] = sorted(link for link in links if not link.startswith(("socket:", "anon_inode", "pipe:", "/dev/null")))
        found[f"{name} maps"] = Path(f"/proc/{pid}/maps").read_text().count("memfd")
    return found


def sync(server: Any, trainers: Trainers, model: str, transport: str, **case: Any) -> dict[str, Any]:
    return trainers.start(urls=server.url, model=model, transport=transport, folder=str(server.root / "step"), **case).outcome()


@pytest.fixture
def clean(server: Any, trainers: Trainers, models: list[str], expected: Any, until: Any) -> Iterator[None]:
    """Before: the first weights. After: the next update works, and nothing is left."""
    if sample(server) != expected[0]:
        assert "report" in sync(server, trainers, models[0], "ipc")
    before = holds(server)
    yield
    until(lambda: state(server)["weights"]["update"] is None, 20)
    for model, want in ((models[1], expected[1]), (models[0], expected[0])):
        outcome = sync(server, trainers, model, "ipc")
        assert "report" in outcome, outcome
        assert sample(server) == want
    try:
        until(lambda: holds(server) == before, 10)
    finally:
        assert holds(server) == before


def check_old_weights(server: Any, expected: Any, apply: str, touched: bool) -> None:
    found = state(server)["weights"]
    if apply == "staged" or not touched:
        assert found["valid"] and sample(server) == expected[0]
    else:
        assert "torn" in found["reason"]
        refused = httpx.post(f"{server.url}/v1/engine/resume", json={})
        reply = httpx.post(f"{server.url}/v1/rollouts", json={"prompts": [{"token_ids": PROMPT}], "on_unavailable": "refuse"}, timeout=30)
        assert reply.status_code == 409 and "torn" in reply.text, (refused.text, reply.text)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("transport", "apply"), WAYS)
def test_a_fault_of_the_trainer(server: Any, trainers: Trainers, models: list[str], expected: Any, transport: str, apply: str) -> None:
    """One after another, as a bad day would have it."""
    for fault, words in REFUSED.items():
        if transport == "disk" and fault == "wrong digest":
            continue  # the files' own headers and sizes stand for it
        outcome = sync(server, trainers, models[1], transport, fault=fault, options={"apply": apply})
        assert words in outcome.get("error", ""), (fault, outcome)
        told_before = fault in BEFORE_A_BYTE or (transport == "disk" and fault != "nan")
        check_old_weights(server, expected, apply, touched=not told_before)
        if apply == "in_place":
            assert "report" in sync(server, trainers, models[0], transport, options={"apply": apply})


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:64]])


Q, MLP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "a row fewer": {Q: lambda t: t[:-1]},
    "transposed": {MLP: lambda t: t.T},
    "flattened": {Q: torch.Tensor.flatten},
    "two of them": {Q: lambda t: t[:-1], "model.norm.weight": lambda t: t[None]},
    "a vocabulary without the padding": {EMBED: lambda t: t[:-64], HEAD: lambda t: t[:-64]},
    "a resized vocabulary": {EMBED: _padded, HEAD: _padded},
}


@pytest.mark.parametrize("what", OTHER_SHAPES)
def test_other_shapes_are_refused_by_name_before_a_byte_moves(server: Any, models: list[str], what: str) -> None:
    """Rows of the vocabulary too: none is cut off or made up."""
    before, version = sample(server), state(server)["weights"]["version"]
    tensors = load_file(f"{models[1]}/model.safetensors")
    assert tensors[MLP].shape[0] != tensors[MLP].shape[1]
    changed = {name: change(tensors[name]).contiguous() for name, change in OTHER_SHAPES[what].items()}
    with WeightSender(server.url, TensorSource({**tensors, **changed})) as sender, pytest.raises(UpdateError) as refused:
        sender.sync()
    words = str(refused.value)
    assert "answered 422" in words and "in open" in words
    for name, tensor in changed.items():
        assert f"{name} is {list(tensor.shape)}, must be {list(tensors[name].shape)}" in words
    assert (sample(server), state(server)["weights"]["version"]) == (before, version)
    with WeightSender(server.url, TensorSource(tensors)) as sender:
        assert sender.sync().version == version + 1


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("transport", "apply"), WAYS)
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_trainer_that_is_gone(
    server: Any, trainers: Trainers, models: list[str], expected: Any, until: Any, transport: str, apply: str, fault: str
) -> None:
    """Killed: the engine is free again at once. Frozen: after the update's deadline, and it answers meanwhile."""
    deadline_s = 60.0 if fault == "kill" else 1.5
    case = {"urls": server.url, "model": models[1], "transport": transport, "folder": str(server.root / "step")}
    trainer = trainers.start(**case, fault=fault, options={"apply": apply, "deadline_s": deadline_s})
    if fault == "kill":
        assert trainer.outcome() == {}
    else:
        until(trainer.stopped, 20)
        began = time.monotonic()
        for path in ("/v1/engine/status", "/health", "/health/live", "/v1/weights"):
            assert httpx.get(server.url + path, timeout=5).status_code < 500
        assert time.monotonic() - began < 2
    until(lambda: state(server)["weights"]["update"] is None, 10)
    check_old_weights(server, expected, apply, touched=transport != "disk")
    if fault == "freeze":
        trainer.kill()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("transport", SOME)
def test_an_engine_that_freezes(server: Any, trainers: Trainers, models: list[str], transport: str) -> None:
    """The trainer hears of it within its own deadline; thawed, the engine takes the next update."""
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        outcome = sync(server, trainers, models[1], transport, options={"timeout_s": 1.0})
        assert server.url in outcome["error"] or "timed out" in outcome["error"]
    finally:
        os.kill(engine, signal.SIGCONT)
    update = state(server)["weights"]["update"]
    if update is not None:
        httpx.post(f"{server.url}/v1/weights/updates/{update}/abort", json={})


@pytest.mark.parametrize("transport", SOME)
def test_an_engine_that_dies(serving: Any, trainers: Trainers, models: list[str], root: Path, transport: str) -> None:
    """One clear error on the trainer; nothing of the engine is left."""
    with serving(*FLAGS, "--weights-root", str(root), model=models[0], factory=None) as other:
        before = sorted(os.listdir("/dev/shm"))
        folder = str(root / "other")
        trainer = trainers.start(urls=other.url, model=models[1], transport=transport, folder=folder, fault="freeze")
        end = time.monotonic() + 20
        while not trainer.stopped() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(other.engine_pid, signal.SIGKILL)
        os.kill(trainer.pid, signal.SIGCONT)
        outcome = trainer.outcome()
        assert outcome["type"] == "UpdateError" and other.url in outcome["error"]
        assert sorted(os.listdir("/dev/shm")) == before
