"""A trainer updates a real server, over each transport, while it samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rollsync import Engine, RolloutClient, RolloutRequest, SamplingParams
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.control import HttpControl, UpdateError
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import TensorSource
from safetensors.torch import load_file, save_file

OPTIONS = {"block_tokens": 16, "num_blocks": 1024, "max_model_len": 2000, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))


def perturbed(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in tensors.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model, three sets of weights."""
    root = tmp_path_factory.mktemp("live")
    folders = [Path(write_model(root / f"m{i}", "llama", max_position_embeddings=2048)) for i in range(3)]
    first = load_file(folders[0] / "model.safetensors")
    for i, folder in enumerate(folders[1:], 1):
        save_file(perturbed(first, i), folder / "model.safetensors")
    return folders


@pytest.fixture(scope="module")
def server(serving: Any, checkpoints: list[Path]) -> Iterator[Any]:
    with serving(*FLAGS, "--weights-root", str(checkpoints[0].parent), model=str(checkpoints[0]), factory=None) as found:
        yield found


@pytest.fixture(scope="module")
def pair(serving: Any, checkpoints: list[Path]) -> Iterator[Any]:
    """One whose engine has two ranks."""
    with serving(*FLAGS, "--tp", "2", "--weights-root", str(checkpoints[0].parent), model=str(checkpoints[0]), factory=None) as found:
        yield found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def fresh_logprobs(folder: Path) -> tuple[list[int], list[float]]:
    with Engine(str(folder), **OPTIONS) as engine:
        engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=SamplingParams(seed=1, max_tokens=16)))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    return outputs[-1].token_ids, outputs[-1].logprobs


def sample(client: RolloutClient) -> tuple[list[int], list[float], list[Any]]:
    found = client.rollouts([PROMPT], sampling_params={"seed": 1, "max_tokens": 16}).results[0].samples[0]
    return list(found.token_ids), list(found.logprobs), list(found.weight_versions)


@pytest.mark.parametrize("transport", ["http", "ipc", "collective", "disk"])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("ranks", ["server", "pair"])
def test_after_a_sync_the_server_gives_the_new_bits(
    request: pytest.FixtureRequest, checkpoints: list[Path], ranks: str, transport: str, apply: str
) -> None:
    server = request.getfixturevalue(ranks)
    where = {"folder": checkpoints[0].parent / "by disk"} if transport == "disk" else {}
    with RolloutClient(server.url) as client:
        for folder in (checkpoints[1], checkpoints[2], checkpoints[0]):
            source = TensorSource(weights(folder))
            with WeightSender(server.url, source, transport=transport, bucket_bytes=3000, apply=apply, **where) as sender:
                report = sender.sync()
            ids, logprobs, spans = sample(client)
            assert (ids, logprobs) == fresh_logprobs(folder)
            assert [s["version"] for s in spans] == [report.version]


def test_a_refused_update_raises_the_servers_words_and_changes_nothing(server: Any, checkpoints: list[Path]) -> None:
    with RolloutClient(server.url) as client:
        before = sample(client)
        bad = weights(checkpoints[1])
        bad["model.layers.0.self_attn.q_proj.weight"] = bad["model.layers.0.self_attn.q_proj.weight"][:-1]
        del bad["model.norm.weight"]
        bad["extra"] = torch.zeros(3)
        with WeightSender(server.url, TensorSource(bad)) as sender, pytest.raises(UpdateError) as refused:
            sender.sync()
        assert all(word in str(refused.value) for word in ("422", "q_proj", "model.norm.weight", "extra"))
        nan = weights(checkpoints[1])
        nan["model.norm.weight"] = nan["model.norm.weight"].clone()
        nan["model.norm.weight"][3] = float("nan")
        words = r"model\.norm\.weight: 1 values are not finite"
        with WeightSender(server.url, TensorSource(nan)) as sender, pytest.raises(UpdateError, match=words):
            sender.sync()
        assert sample(client) == before
        with WeightSender(server.url, TensorSource(weights(checkpoints[1]))) as sender:
            sender.sync()
        assert sample(client)[:2] == fresh_logprobs(checkpoints[1])


def test_status_answers_while_an_update_hangs_and_the_next_one_works(server: Any, checkpoints: list[Path]) -> None:
    control = HttpControl(server.url)
    with WeightSender(server.url, TensorSource(weights(checkpoints[0]))) as sender:
        manifest = sender._agree()
    control.open({"manifest": manifest.to_wire(), "deadline_s": 0.5})
    state = control.call("GET", "/v1/weights")
    assert state["weights"]["update"] and state["weights"]["valid"]
    with pytest.raises(UpdateError, match="409"):
        control.open({"manifest": manifest.to_wire()})
    end = time.monotonic() + 10
    while control.call("GET", "/v1/weights")["weights"]["update"] and time.monotonic() < end:
        time.sleep(0.05)
    with WeightSender(server.url, TensorSource(weights(checkpoints[0]))) as sender:
        sender.sync()


@pytest.mark.parametrize("policy", ["recompute", "keep", "abort"])
def test_running_requests_live_through_an_update_as_the_policy_says(server: Any, checkpoints: list[Path], policy: str, until: Any) -> None:
    with RolloutClient(server.url) as client:
        results: list[Any] = []
        prompts = [PROMPT[i:] + PROMPT[:i] for i in range(8)]
        call = lambda: results.append(client.rollouts(prompts, sampling_params={"seed": 5, "max_tokens": 1500, "ignore_eos": True}))  # noqa: E731
        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: server.running() == len(prompts), 30)
        with WeightSender(server.url, TensorSource(weights(checkpoints[2])), kv_policy=policy) as sender:
            report = sender.sync()
        thread.join(60)
        samples = [s for r in results[0].results for s in r.samples]
        for s in samples:
            assert len(s.token_ids) == len(s.logprobs)
            ends = [span["end"] for span in s.weight_versions]
            assert [span["start"] for span in s.weight_versions] == [0, *ends[:-1]] and (not ends or ends[-1] == len(s.token_ids))
        versions = {span["version"] for s in samples for span in s.weight_versions}
        if policy == "abort":
            assert {s.finish_reason for s in samples} == {"abort"}
        else:
            assert {s.finish_reason for s in samples} == {"length"} and versions == {report.version - 1, report.version}
            late = [span for s in samples for span in s.weight_versions if span["version"] == report.version]
            assert all(bool(span.get("mixed_kv")) == (policy == "keep") for span in late)


def test_pause_sleep_wake_and_resume_keep_their_own_leases(server: Any) -> None:
    with RolloutClient(server.url) as client:
        before = sample(client)
        post = lambda verb, **body: httpx.post(f"{server.url}/v1/engine/{verb}", json=body).json()  # noqa: E731
        assert post("pause", owner="me")["changed"] and not post("pause", owner="me")["changed"]
        slept = post("sleep")
        assert slept["changed"] and not post("sleep")["changed"]
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(sample(client)))
        thread.start()
        assert post("wake", tags=["weights"])["asleep"] == ["kv_cache"]
        woken = post("wake")
        assert not woken["running"] and "me" in woken["reason"]
        time.sleep(0.2)
        assert not done
        assert post("resume", owner="me")["running"]
        thread.join(30)
        assert done == [before]


def test_an_engine_loads_a_folder_by_one_call_and_refuses_others_by_name(server: Any, checkpoints: list[Path]) -> None:
    url = f"{server.url}/v1/weights/updates"
    post = lambda **body: httpx.post(url, json=body)  # noqa: E731
    with RolloutClient(server.url) as client:
        for folder in ("m1", str(checkpoints[2])):
            done = post(transport={"name": "disk", "folder": folder}, commit=True).json()
            assert done["state"] == "committed" and sample(client)[:2] == fresh_logprobs(checkpoints[0].parent / folder)
        before = sample(client)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"transport": {"name": "disk", "folder": "../m1"}}, "transport.folder"),
            ({"transport": {"name": "disk", "folder": "/etc"}}, "transport.folder"),
            ({"transport": {"name": "disk", "folder": "none such"}}, "transport.folder"),
            ({"transport": {"name": "disk", "folder": 3}}, "transport.folder"),
            ({"transport": {"name": "disk"}}, "transport.folder"),
            ({"transport": {"name": "disk", "folder": "m1", "root": "/", "files": {}}}, "transport.root"),
            ({"transport": {"name": "disk", "folder": "m1"}, "manifest": {"tensors": []}}, "manifest"),
            ({"manifest": {"tensors": []}, "commit": True}, "commit"),
        ]
        for body, field in refused:
            answer = post(**body)
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), body
        torn = checkpoints[0].parent / "torn"
        torn.mkdir()
        (torn / "model.safetensors").write_bytes((checkpoints[1] / "model.safetensors").read_bytes()[:-1])
        assert post(transport={"name": "disk", "folder": "torn"}, commit=True).status_code == 422
        assert sample(client) == before


def test_a_folder_is_read_beside_the_steps_and_committed_later(server: Any, checkpoints: list[Path], until: Any) -> None:
    control = HttpControl(server.url)
    update = control.open({"transport": {"name": "disk", "folder": "m0"}})
    with pytest.raises(UpdateError, match=r"answered 409: .* reads its folder by itself: it takes no chunks"):
        control.chunk(update["id"], 0, 0)
    until(lambda: control.status(update["id"])["missing_chunks"] == 0)
    assert control.status(update["id"])["received_bytes"] == update["bytes"]
    assert control.commit(update["id"], None)["changed"]
    with RolloutClient(server.url) as client:
        assert sample(client)[:2] == fresh_logprobs(checkpoints[0])


def test_a_sync_by_folder_leaves_the_last_ones_and_nothing_of_a_failed_one(server: Any, checkpoints: list[Path], tmp_path: Path) -> None:
    shared = checkpoints[0].parent / "synced"
    with WeightSender(server.url, TensorSource(weights(checkpoints[1])), transport="disk", folder=shared) as sender:
        version = sender.sync().version
        for step in range(version + 1, version + 4):
            assert sender.sync(version=step).version == step
        assert sorted(f.name for f in shared.iterdir()) == [f"step-{version + 2}", f"step-{version + 3}"]
        assert sender.sync(version=version + 3).version == version + 3, "a trainer that came back uses its numbers again"
    bad = {**weights(checkpoints[1]), "model.norm.weight": torch.full((64,), float("nan"))}
    kept = sorted(f.name for f in shared.iterdir())
    for folder, words in ((shared, r"422.*model\.norm\.weight: 64 values are not finite"), (tmp_path, "is not inside")):
        sender = WeightSender(server.url, TensorSource(bad), transport="disk", folder=folder)
        with sender, pytest.raises(UpdateError, match=words):
            sender.sync()
    assert sorted(f.name for f in shared.iterdir()) == kept and not list(tmp_path.iterdir())
    assert httpx.get(f"{server.url}/v1/weights").json()["weights"]["update"] is None


RACE = {"seed": 1, "max_tokens": 48, "ignore_eos": True}
CLIENTS, RACERS = 64, 4
PAUSES = (("/v1/engine/pause", {"mode": "abort", "owner": "trainer"}), ("/pause", {}), ("/pause_generation", {"mode": "abort"}))
RESUMES = (("/v1/engine/resume", {"owner": "trainer"}), ("/resume", {}), ("/continue_generation", {}))


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_who_submits_while_a_trainer_pauses_and_updates_ends_once_and_on_one_set_of_weights(
    server: Any, checkpoints: list[Path], rounds: int, until: Any
) -> None:
    """Each dialect's pause that aborts, an update, a resume, under 64 threads that never stop submitting."""
    prompts = [[3 + i, *PROMPT] for i in range(RACERS)]
    over, samples, faults = threading.Event(), [], []
    made: dict[int, int] = {}
    senders = [WeightSender(server.url, TensorSource(weights(folder)), timeout_s=20) for folder in checkpoints[:2]]

    def submit(client: RolloutClient, i: int) -> None:
        try:
            while not over.is_set():
                (result,) = client.rollouts([prompts[i]], sampling_params=RACE).results
                samples.append((i, *result.samples))
        except Exception as error:
            faults.append(error)

    def come(count: int) -> None:
        until(lambda: len(samples) >= count or faults, 60)

    with RolloutClient(server.url, timeout_s=60) as client, RolloutClient(server.url, timeout_s=60) as trainer:
        made[senders[0].sync().version] = 0
        wanted = [[list(r.samples[0].token_ids) for r in client.rollouts(prompts, sampling_params=RACE).results]]
        made[senders[1].sync().version] = 1
        wanted.append([list(r.samples[0].token_ids) for r in client.rollouts(prompts, sampling_params=RACE).results])
        threads = [threading.Thread(target=submit, args=(client, i % RACERS)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for number in range(rounds):
            come(len(samples) + CLIENTS // 4)
            path, body = PAUSES[number % 3]
            trainer._call("POST", path, json=body)
            made[senders[number % 2].sync().version] = number % 2
            path, body = RESUMES[number % 3]
            trainer._call("POST", path, json=body)
        over.set()
        for thread in threads:
            thread.join(60)
        for sender in senders:
            sender.close()
    assert not faults and not any(thread.is_alive() for thread in threads)
    ends = set()
    for i, sample_ in samples:  # exactly one each
        ends.add(sample_.finish_reason)
        assert len(sample_.weight_versions) <= 1, "what a pause did not end began after it"
        for span in sample_.weight_versions:
            assert list(sample_.token_ids) == wanted[made[span["version"]]][i][: len(sample_.token_ids)]
    assert ends == {"length", "abort"}
    until(lambda: [server.holds()[k] for k in ("calls", "running", "waiting", "free_blocks")] == [0, 0, 0, OPTIONS["num_blocks"]])
