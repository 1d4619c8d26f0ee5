"""`attach` on servers: what arrives there, servers that die and come back, and those that are not the trainer's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine, RolloutClient, SamplingParams, read_trace
from rollsync.rollout.errors import ServerUnreachable
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.targets import UrlTarget, target_of
from rollsync.trainer_adapters.trl import attach
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.ranks import Alone
from rollsync.weight_sync.sender import WeightSender
from rollsync.weight_sync.sources import weights_from
from servers import Server, serving, until_free
from trl_cases import asked_by, grpo, load, logged, write_text_model

pytestmark = pytest.mark.adapters
FLAGS = ("--num-blocks", "512", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_model(tmp_path_factory.mktemp("servers") / "model")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(folder: str, trace: Path) -> Iterator[Server]:
    with serving(folder, *FLAGS, "--trace", str(trace)) as found:
        yield found


def test_what_a_trainer_says_is_what_the_server_samples_by(folder: str, server: Server, trace: Path, tmp_path: Path) -> None:
    given = {"stop_token_ids": [7, 8], "presence_penalty": 0.25, "logit_bias": {9: 2.0}}
    said = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "max_completion_length": 5}
    trainer = grpo(folder, tmp_path, generation_kwargs=given, max_steps=1, **said)
    generation = attach(trainer, server.url)
    calls = asked_by(generation)
    trainer.train()
    generation.target.close()
    wanted = {**said, **given, "stop_token_ids": (7, 8, trainer.eos_token_ids[0]), "ignore_eos": True}
    wanted["max_tokens"] = wanted.pop("max_completion_length")
    end = time.monotonic() + 60
    while len(records := list(read_trace(trace))) < 8 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(records) == len(calls[0]["rows"]) == 8
    for record in records:
        assert {name: getattr(record.params, name) for name in wanted} == wanted
    assert len({(record.params.seed, record.sample_index) for record in records}) == 8


def test_two_servers_one_dies_in_a_rollout_and_comes_back(folder: str) -> None:
    """Its rows go to the other one, in the same bits; a step later it is back with the model it started with, and is synced first."""
    prompts = [[3 + i, 4, 5, 6 + i] for i in range(12) for _ in range(4)] + [[9, 9, 9], [8, 8], [8, 8]]  # groups of several sizes
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    model = load(folder)
    with Engine(folder, threads=1, num_blocks=512, max_model_len=1024) as engine:
        local = target_of(engine)
        local.sync(weights_from(model), 1, Alone())
        want = [row.token_ids for row in local.generate(prompts, params, seed=1)]
    with serving(folder, *FLAGS) as one, serving(folder, *FLAGS) as two:
        target = UrlTarget([one.url, two.url], patience_s=30)
        target.sync(weights_from(model), 1, Alone())
        with ThreadPoolExecutor(1) as pool:
            rollout = pool.submit(target.generate, prompts, params, seed=1)
            end = time.monotonic() + 60
            with RolloutClient(two.url) as client:
                while not client.status()["stats"]["running"]:
                    assert not rollout.done(), f"nothing went to {two.url}: {rollout.exception() or 'all rows came without it'}"
                    assert time.monotonic() < end, f"nothing went to {two.url}"
                    time.sleep(0.005)
            two.kill()
            assert [row.token_ids for row in rollout.result(300)] == want
        port = int(two.url.rpartition(":")[2])
        until_free(port)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        report = target.sync(weights_from(model), 2, Alone())
        assert list(report.engines) == [one.url] and list(report.failed) == [two.url]
        with serving(folder, *FLAGS, port=port) as back, RolloutClient(back.url) as client:
            rows = target.generate(prompts, params, seed=2)
            assert {span["version"] for row in rows for span in row.weight_versions} == {2}
            assert client.status()["stats"]["generated_tokens"] == 0, "it got prompts with the weights it started with"
            report = target.sync(weights_from(model), 3, Alone())
            assert sorted(report.engines) == sorted([one.url, two.url])
            target.generate(prompts, params, seed=3)
            assert client.status()["stats"]["generated_tokens"] > 0
        target.close()


def test_the_only_server_dies(folder: str, tmp_path: Path) -> None:
    """One error that says which, in the trainer's own time."""
    with serving(folder, *FLAGS) as server:
        trainer = grpo(folder, tmp_path)
        generation = attach(trainer, server.url, patience_s=2)
        generation.sync_weights()
        server.kill()
        with pytest.raises(ServerUnreachable, match=server.url):
            generation.generate(prompts=[[3, 4, 5]] * 4)
        with pytest.raises(UpdateError, match=server.url):
            trainer.train()
        generation.target.close()


def test_a_server_that_waits_for_its_weights(folder: str, tmp_path: Path) -> None:
    """Started without any, it serves nobody until the first sync."""
    with serving(folder, *FLAGS, "--load-format", "dummy") as server:
        trainer = grpo(folder, tmp_path)
        generation = attach(trainer, server.url)
        trainer.train()
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5 and generation.target.version == 2
        generation.target.close()


def test_a_server_of_another_model(folder: str, server: Server, tmp_path: Path) -> None:
    """One that computes something else is refused at once, one of other shapes at the first sync, two that differ when first asked."""
    other = write_text_model(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(TargetError, match=r"rms_norm_eps is 1e-06 in the engine and 0\.001 in the trainer"):
        attach(grpo(other, tmp_path), server.url)
    smaller = write_text_model(tmp_path / "smaller", vocab_size=300)
    with pytest.raises(TargetError, match="vocab_size is 264 in the engine and 300 in the trainer"):
        attach(grpo(smaller, tmp_path), server.url)
    with serving(other, *FLAGS) as second, pytest.raises(TargetError, match=r"differ in rms_norm_eps \(0.001 and 1e-06\)"):
        attach(grpo(folder, tmp_path), [server.url, second.url])


def test_a_server_that_comes_back_with_another_model(folder: str, tmp_path: Path) -> None:
    """Its tensors have the same names and shapes, so that it would take the weights."""
    with serving(folder, *FLAGS) as server:
        generation = attach(grpo(folder, tmp_path), server.url, patience_s=2)
        generation.sync_weights()
        port = int(server.url.rpartition(":")[2])
        server.kill()
    until_free(port)
    with serving(folder, *FLAGS, port=port):
        generation.sync_weights()
        assert generation.generate(prompts=[[3, 4, 5]] * 2)
    until_free(port)
    with serving(write_text_model(tmp_path / "other", rope_theta=5000.0), *FLAGS, port=port):
        for _ in range(2):
            with pytest.raises(UpdateError, match=r"was started again and serves another model than before: .*rope.*5000"):
                generation.sync_weights()
        generation.close()


def test_somebody_else_updates_the_server(folder: str, server: Server, tmp_path: Path) -> None:
    trainer = grpo(folder, tmp_path)
    generation = attach(trainer, server.url)
    generation.sync_weights()
    with WeightSender(server.url, weights_from(load(folder))) as sender:
        sender.sync()
    with pytest.raises(TargetError, match="row 0 was drawn by weights of version 2, not 1: does somebody else update this engine"):
        generation.generate(prompts=[[3, 4, 5]] * 2)
    generation.target.close()


def test_a_server_that_does_not_hold_what_was_sent(folder: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's weights came in between: the first sync looks."""
    model, other = load(folder), load(folder)
    with torch.no_grad():
        other.model.norm.weight.mul_(2.0)
    sync = WeightSender.sync

    def raced(self: Any, *args: Any, **kw: Any) -> Any:
        report = sync(self, *args, **kw)
        with WeightSender(server.url, weights_from(other)) as sender:
            sync(sender)
        return report

    target = UrlTarget([server.url])
    with monkeypatch.context() as patch:
        patch.setattr(WeightSender, "sync", raced)
        with pytest.raises(UpdateError, match=r"does not hold the weights that were just sent \(model.norm.weight differ\)"):
            target.sync(weights_from(model), 1, Alone())
    assert target.version is None
    target.sync(weights_from(model), 1, Alone())
    target.close()


def test_a_run_goes_on_when_one_of_two_servers_dies(folder: str, server: Server, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Killing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                second.kill()

    with serving(folder, *FLAGS) as second:
        trainer = grpo(folder, tmp_path, max_steps=3)
        trainer.add_callback(Killing())
        generation = attach(trainer, [server.url, second.url])
        trainer.train()
        assert generation.num_syncs == 3 and list(generation.last_sync.failed) == [second.url]
        assert len(logged(trainer, "reward")) == 3 and max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
        generation.close()


def test_a_server_that_speaks_another_protocol(folder: str, tmp_path: Path) -> None:
    class Old(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"protocol_version": 99, "capabilities": []}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Old) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}"
        with pytest.raises(TargetError, match=f"{url}.*speaks protocol 99.*install the same rollsync on both sides"):
            attach(grpo(folder, tmp_path), url)
        http.shutdown()


def test_pad_and_eos_may_be_one_id(folder: str, server: Server, tmp_path: Path) -> None:
    """Lengths are those of the rows: no EOS is taken off, none put on, and one within a prompt ends nothing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    eos = tokenizer.eos_token_id
    given = {"logit_bias": {eos: 3.0}}
    trainer = grpo(folder, tmp_path, tokenizer=tokenizer, max_steps=1, max_completion_length=12, generation_kwargs=given)
    generation = attach(trainer, server.url)
    calls = asked_by(generation)
    trainer.train()
    generation.target.close()
    rows = calls[0]["rows"]
    ended = [row for row in rows if row[-1] == eos]
    assert ended and len(ended) < len(rows) and all(eos not in row[:-1] for row in rows) and all(eos in p for p in calls[0]["prompts"])
    assert all(len(row) == 12 for row in rows if row[-1] != eos)
    (mean,) = logged(trainer, "completions/mean_length")
    (cut,) = logged(trainer, "completions/clipped_ratio")
    assert mean == pytest.approx(sum(map(len, rows)) / len(rows)) and cut == pytest.approx(1 - len(ended) / len(rows))
