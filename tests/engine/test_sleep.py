"""Sleep and wake: what is measured, what fails, and what is left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live import OPTIONS, begin, finish, request, steps, sync, versions, write_versions
from rollsync import Engine
from rollsync.rollout.engine import host_memory, weight_keeper
from rollsync.rollout.errors import IllegalState
from rollsync.rollout.selftest.model import tiny_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("sleep"), 2)


def kept_files() -> int:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    return sum("(deleted)" in link and "rollsync" in link and "memfd:" not in link for link in links)


def test_requests_outlive_sleep_of_either_memory_bit_for_bit(folders: list[str]) -> None:
    with Engine(folders[0], **OPTIONS) as engine:
        engine.add_request(request("wanted", n=2))
        wanted = [(o.token_ids, o.logprobs) for o in finish(engine)["wanted"]]
        for i, (tags, weights) in enumerate([(["kv_cache"], "offload"), (["weights"], "offload"), (None, "offload")]):
            engine.add_request(request(f"r{i}", n=2))
            outputs = steps(engine, 4)
            assert engine.control.sleep(tags, weights)["changed"]
            engine.add_request(request(f"new{i}", n=2))
            assert engine.control.wake(tags)["running"] and not engine.control.wake(tags)["changed"]
            for found in finish(engine, outputs).values():
                assert [(o.token_ids, o.logprobs) for o in found] == wanted
                assert all(versions(o) == [(0, 0, 12, False)] for o in found)


def test_weights_alone_may_wake_and_be_updated_before_the_cache_does(folders: list[str]) -> None:
    with Engine(folders[0], **OPTIONS) as engine:
        engine.control.pause(owner="trainer")
        engine.control.sleep()
        with pytest.raises(IllegalState, match=r"weights offloaded.*legal: .*wake"):
            begin(engine, folders[1])
        assert engine.control.wake(["weights"])["asleep"] == ["kv_cache"]
        sync(engine, folders[1])
        engine.add_request(request("r"))
        assert not engine.has_work
        assert "trainer" in engine.control.wake()["reason"]
        assert engine.control.resume("trainer")["running"]
        assert versions(finish(engine)["r"][0]) == [(1, 0, 12, False)]


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_wake_without_room_stays_asleep_says_how_much_and_works_later(
    folders: list[str], tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(folders[0], **OPTIONS) as engine:
        needed = engine.info.weight_bytes if tag == "weights" else engine.info.kv_bytes
        engine.add_request(request("r"))
        outputs = steps(engine, 3)
        engine.control.sleep([tag])
        monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
        for _ in range(2):
            with pytest.raises(IllegalState, match=f"{tag} cannot wake: {needed} bytes are needed, 1000 are free; it stays asleep"):
                engine.control.wake()
        assert engine.control.status()["memory"][tag] != "resident" and not engine.has_work
        monkeypatch.undo()
        assert engine.control.wake()["running"]
        assert finish(engine, outputs)["r"][0].finish_reason == "length"


def test_weights_that_cannot_be_kept_stay_and_are_served(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(folders[0], **OPTIONS) as engine:
        engine.add_request(request("wanted"))
        wanted = finish(engine)["wanted"][0].token_ids

        def full(**where: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(weight_keeper.tempfile, "TemporaryFile", full)
        with pytest.raises(IllegalState, match=r"weights cannot sleep: .*No space left"):
            engine.control.sleep()
        assert set(engine.control.status()["memory"].values()) == {"resident"} and not engine.control.lifecycle.paused
        engine.add_request(request("r"))
        assert finish(engine)["r"][0].token_ids == wanted


def test_the_file_that_kept_weights_goes_with_wake_or_when_they_are_discarded(folders: list[str]) -> None:
    with Engine(folders[0], **OPTIONS) as engine:
        engine.control.sleep(["weights"])
        assert kept_files() == 1
        engine.control.wake()
        assert kept_files() == 0
        engine.control.sleep(["weights"])
        assert engine.control.sleep(["weights"], "discard")["changed"] and kept_files() == 0
        engine.control.wake()
        with pytest.raises(IllegalState, match="discarded"):
            engine.add_request(request("r"))
        sync(engine, folders[1])
        engine.add_request(request("r"))
        finish(engine)


MEASURE = """
import sys
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.engine.host_memory import resident_bytes

with Engine(sys.argv[1], load_format="random", num_blocks=512, block_tokens=16, max_model_len=64, threads=1) as engine:
    kv, weights = engine.info.kv_bytes, engine.info.weight_bytes
    engine.runner._kv._thread.join()  # populates the pool
    base = resident_bytes()
    for cycle in range(int(sys.argv[2])):
        before = resident_bytes()
        freed = engine.control.sleep()["freed_bytes"]
        assert freed["kv_cache"] >= 0.95 * kv and freed["weights"] >= 0.95 * weights, freed
        gone = before - resident_bytes()
        assert gone >= 0.95 * (kv + weights), (cycle, base, before, freed, gone, kv, weights)
        engine.control.wake()
        engine.runner._kv._thread.join()
        back = resident_bytes() - base
        assert back <= 0.05 * base, (back, base)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=(1, 2, 3), params=params))
    while engine.has_work:
        outputs = engine.step()
    assert len(outputs[0].token_ids) == 12, outputs
"""


@pytest.mark.parametrize("cycles", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_sleep_says_it_freed_is_gone_and_comes_back_to_the_byte(tmp_path: Path, cycles: int) -> None:
    """The weights and the pool are large beside what else comes and goes; in a process where nothing else does."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "head_dim": 64, "intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**sizes)))
    subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), str(cycles)], check=True, timeout=100)
