"""Tensor parallel: ranks that share a model give the bits of one, live and die together."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engine import bits, changed, finals, make_requests, run
from rollsync import Engine, EngineConfig
from rollsync.kernels.native_lib import available_builds
from rollsync.kernels.program import NativeProgram
from rollsync.rollout.engine import rank_processes
from rollsync.rollout.errors import ConfigError, EngineDead, IllegalState, UpdateRefused
from rollsync.rollout.models.config import load_decoder_config
from rollsync.rollout.models.params import hf_shapes
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.manifest import Manifest, TensorEntry, TensorSlice, plan
from thread_ranks import ThreadRanks

REQUESTS = make_requests(5, max_tokens=12, shared=36)
SMALL: dict[str, Any] = {"threads": 1, "num_blocks": 256}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models that show every change of a sum's order; vocabularies that do not divide evenly, one too small for all of four ranks."""
    root = tmp_path_factory.mktemp("models")
    gemma = {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "untied": ("llama", {}),
        "tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 257}),
        "biased": ("qwen2", {"vocab_size": 300}),
        "post-norms": ("gemma2", {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", **gemma}),
    }
    return {name: write_model(root / name, family, **changes) for name, (family, changes) in kinds.items()}


def run_threads(model: str, tp: int, requests: Any = REQUESTS, **options: Any) -> dict[tuple[str, int], Any]:
    with Engine(model, runner=ThreadRanks(model, tp=tp, **{**SMALL, **options})) as engine:  # type: ignore[arg-type]
        return {key: bits(output) for key, output in finals(engine, requests).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["untied", "tied", "biased", "post-norms"])
def test_ranks_give_the_bits_of_one(models: dict[str, str], kind: str, dtype: str) -> None:
    want = run(models[kind], REQUESTS, dtype=dtype)
    for build in available_builds():
        for tp in (2, 4):
            got = run_threads(models[kind], tp, dtype=dtype, kernels=build, max_batch_tokens=64, block_tokens=16)
            assert got == want, (build, tp)


def test_the_reference_and_pieces_of_logits(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = REQUESTS[:2]
    for kind in ("tied", "biased"):
        want = run(models[kind], few, dtype="bfloat16")
        assert run_threads(models[kind], 2, few, dtype="bfloat16", kernels="reference", block_tokens=4) == want
        with monkeypatch.context() as patch:
            patch.setattr(NativeProgram, "LOGITS_BYTES", 1)  # 32 rows at a time: prompt_logprobs ask for more
            assert run_threads(models[kind], 4, few, dtype="bfloat16") == want
    want = run(models["post-norms"], few, dtype="bfloat16", head_dtype="float32")
    assert run_threads(models["post-norms"], 4, few, dtype="bfloat16", head_dtype="float32") == want


def test_preempted_cached_and_penalised(models: dict[str, str]) -> None:
    params = {"repetition_penalty": 1.3, "top_logprobs": 3, "logit_bias": {7: 3.0}}
    requests = [*REQUESTS, *(changed(r, (), request_id=f"p{i}", n=2, **params) for i, r in enumerate(REQUESTS[:3]))]
    want = run(models["untied"], requests, alone=True, dtype="bfloat16", prefix_cache=False)
    options = {"num_blocks": 40, "block_tokens": 16, "max_batch_tokens": 24, "dtype": "bfloat16"}
    runner: Any = ThreadRanks(models["untied"], tp=2, **SMALL | options)
    with Engine(models["untied"], runner=runner) as engine:
        for request in requests:
            engine.add_request(request)
        outputs = []
        while engine.has_work:
            outputs += [o for o in engine.step() if o.finished]
            if engine.stats()["steps"] % 7 == 0:
                engine.scheduler.preempt_all()
        again = finals(engine, requests)
        assert engine.stats()["preemptions"] > 0 and any(output.cached_tokens for output in again.values())
    assert {(o.request_id, o.sample_index): bits(o) for o in outputs} == want
    assert {key: bits(output) for key, output in again.items()} == want


@pytest.mark.parametrize(
    ("tp", "changes", "words"),
    [
        (2, {"num_attention_heads": 9, "num_key_value_heads": 3}, "num_kv_heads = 3, num_heads = 9"),
        (8, {}, "num_kv_heads = 4, the 4 partial sums over num_heads \\* head_dim = 128 \\(k_shards = 4"),
        (2, {"intermediate_size": 99}, "intermediate_size = 99, the 1 partial sums over intermediate_size = 99"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}, "the 1 partial sums over num_heads"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(tmp_path: Path, tp: int, changes: dict[str, Any], words: str) -> None:
    model = write_model(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=f"tensor parallel size {tp} must divide .*{words}"):
        Engine(model, tp=tp, **SMALL)


@pytest.fixture(scope="module")
def pair(models: dict[str, str]) -> Iterator[Engine]:
    """An engine of two processes, for tests that leave it as it was."""
    with Engine(models["untied"], tp=2, dtype="bfloat16", **SMALL) as engine:
        yield engine


def outcome(engine: Engine) -> dict[tuple[str, int], Any]:
    return {key: bits(output) for key, output in finals(engine, REQUESTS).items()}


def test_processes_give_the_bits_of_one(models: dict[str, str], pair: Engine) -> None:
    with Engine(models["untied"], dtype="bfloat16", **SMALL) as alone:
        assert outcome(pair) == outcome(alone)
        assert pair.info.fingerprint == alone.info.fingerprint
        assert pair.info.kv_bytes == alone.info.kv_bytes and pair.info.num_blocks == alone.info.num_blocks
        assert pair.runner.updates.digests() == alone.runner.updates.digests()
    assert not torch.distributed.is_initialized(), "torch's default group is a trainer's"


def test_sleep_frees_memory_on_both_and_wake_brings_the_bits_back(pair: Engine) -> None:
    before, own = outcome(pair), memory_of(pair)
    report = pair.control.sleep()
    freed = {pid: own[pid] - after for pid, after in memory_of(pair).items()}
    assert sum(report["freed_bytes"].values()) == pytest.approx(sum(freed.values()), abs=3 << 20)
    assert not pair.has_work
    pair.control.wake()
    pair.control.sleep(["weights"])
    pair.control.wake(["weights"])
    assert outcome(pair) == before


def memory_of(engine: Engine) -> dict[int, int]:
    """Anonymous bytes by process."""
    found = {}
    for pid in (os.getpid(), *engine.runner.rank_pids):  # type: ignore[attr-defined]
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[pid] = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon"))
    return found


def test_one_ranks_refusal_is_everybodys_and_told_once(models: dict[str, str], pair: Engine) -> None:
    before = outcome(pair)
    whole = {name: torch.zeros(shape) for name, shape in hf_shapes(load_decoder_config(models["untied"])).items()}
    manifest = plan([TensorEntry(n, "float32", tuple(t.shape), (TensorSlice(0, Box.whole(t.shape)),)) for n, t in whole.items()])
    first, *rest = manifest.tensors
    for wrong in (Manifest(tuple(rest)), Manifest((replace(first, name="x"), *rest))):
        with pytest.raises(UpdateRefused) as refused:
            pair.control.open_update(wrong)
        assert str(refused.value).count("embed_tokens") == 1 and "rank" not in str(refused.value)
    update = pair.control.open_update(manifest)
    (bucket,) = manifest.buckets
    data = bytearray(bucket.nbytes)
    data[:4] = b"\0\0\xc0\x7f"
    with pytest.raises(ValueError, match=r"must be .* bytes, got 3"):
        pair.control.take_chunk(update.id, 0, 0, {"data": b"abc"})
    assert pair.control.take_chunk(update.id, 0, 0, {"data": bytes(data)})["missing_chunks"] == 0
    assert not pair.control.take_chunk(update.id, 0, 0, {"data": bytes(data)})["changed"]
    with pytest.raises(UpdateRefused, match=r"1 problem: .*embed_tokens.weight: 1 values are not finite"):
        pair.control.commit_update(update.id)
    pair.control.abort_update(update.id)
    assert outcome(pair) == before


def test_a_timeout_of_rank_0s_own_part_is_the_callers_and_no_lost_rank(pair: Engine) -> None:
    """As a network file system may raise it while a chunk is read."""
    runner: Any = pair.runner

    def own() -> Any:
        raise TimeoutError("the file server does not answer")

    with pytest.raises(TimeoutError, match="file server"):
        runner._ranks.call("digests", [], own)
    pair.poll()
    assert pair.runner.updates.digests()


def test_a_join_that_fails_leaves_a_group_of_that_name_that_was_bound_meanwhile(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, bound = pair.control.groups, threading.Event()
    ranks: Any = pair.runner.updates.groups
    leave = ranks.leave
    monkeypatch.setattr(ranks, "leave", lambda *args: bound.wait(20) and leave(*args))
    groups.bind("t", "127.0.0.1")

    def join() -> None:
        with pytest.raises(IllegalState):
            groups.join("t", timeout_s=20)

    failing = threading.Thread(target=join)
    failing.start()
    time.sleep(0.3)
    place = groups.bind("t", "127.0.0.1")
    bound.set()
    failing.join(20)
    assert groups.status()["t"] == {"state": "forming", "host": place["host"], "port": place["port"]}
    assert groups.leave("t")["changed"]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("fault", ["killed idle", "raises", "frozen", "deaf", pytest.param("killed at work", marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_engine_with_its_words(models: dict[str, str], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "END_S", 0.3)
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with Engine(models["untied"], tp=2, dtype="bfloat16", **SMALL) as engine:
        runner: Any = engine.runner
        pids = runner.rank_pids
        engine.add_request(REQUESTS[0])
        engine.step()
        words = {
            "raises": r"rank 1 .* failed: .*Traceback.*plan_from_wire", "frozen": r"rank 0 waited for rank 1 within a step, at most 0\.5 s",
            "deaf": r"rank 1 \(pid \d+\) does not read",
        }.get(fault, r"rank \d \(pid \d+\) ended: killed by SIGKILL")  # fmt: skip
        if fault == "raises":
            runner._ranks.post("step", [1])
        elif fault == "frozen":
            runner._group._timeout = timedelta(seconds=0.5)
            os.kill(pids[0], signal.SIGSTOP)
        elif fault == "deaf":
            connection = socket.socket(fileno=os.dup(runner._ranks._ranks[0].channel.connection.fileno()))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 300_000))
            connection.close()
            os.kill(pids[0], signal.SIGSTOP)
            with pytest.raises(EngineDead, match=words):
                runner._ranks.call("values", ["x" * (8 << 20), 1], lambda: None)
        else:
            os.kill(pids[-1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match=f"(?s){words}"):
            while time.monotonic() < began + 10:
                engine.poll() if fault in ("killed idle", "deaf") else engine.step()
        with pytest.raises(IllegalState, match="broken"):
            engine.add_request(REQUESTS[1])
    assert all(gone(pid) for pid in pids) and time.monotonic() < began + 5
    assert len(os.listdir("/proc/self/fd")) == files and set(threading.enumerate()) == threads


def test_a_rank_that_cannot_load_is_told_and_leaves_nothing(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, to_flat = set(threading.enumerate()), EngineConfig.to_flat
    monkeypatch.setattr(EngineConfig, "to_flat", lambda config: {**to_flat(config), "model": "/nowhere"})
    with pytest.raises(ConfigError, match="/nowhere"):
        Engine(models["untied"], tp=2, **SMALL)
    assert set(threading.enumerate()) == threads
