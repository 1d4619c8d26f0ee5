"""The benchmarks' own logic: arguments, statistics, the report, and workers as processes (a fake one, no model)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from rollsync import Engine
from rollsync.benchmarks import common, grpo_learning, grpo_step, parity, shards, startup, throughput, weight_sync
from rollsync.benchmarks.peers.processes import Reaper, Worker, WorkerFailed, vllm_environment
from rollsync.rollout.selftest.model import write_model

# A worker that answers as loop.py does.
FAKE = """
import json, sys
setup = json.loads(sys.stdin.readline())
print(json.dumps({"ready": setup, "load_s": 0.0}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job.get("op") == "fail":
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(3)
    if job.get("op") == "hang":
        continue
    tokens = len(job["prompts"]) * job["n"] * job["max_tokens"]
    print(json.dumps({"seconds": 0.5, "tokens": tokens, "logprobs": tokens}), flush=True)
"""


def fake(reaper: Reaper) -> Worker:
    return Worker("fake", [sys.executable, "-c", FAKE], reaper, "some-model", {"a": 1})


def test_prompts_are_a_function_of_the_seed() -> None:
    prompts = common.random_prompts("0/groups/1", 3, 24, 49152)
    assert prompts == common.random_prompts("0/groups/1", 3, 24, 49152)
    assert prompts != common.random_prompts("0/groups/2", 3, 24, 49152)
    assert [len(p) for p in prompts] == [24] * 3
    assert all(common.FIRST_PLAIN_ID <= i < 49152 for p in prompts for i in p)


def test_warm_groups_repeat_the_cold_ones_prompts() -> None:
    cold, warm = (next(c for c in throughput.CASES if c.name == name).job(0, 2, 1000) for name in ("groups-cold", "groups-warm"))
    assert cold["prompts"] == warm["prompts"]
    assert (cold["cold"], cold["prime"], warm["cold"], warm["prime"]) == (True, False, False, True)


def test_statistics() -> None:
    found = common.summary([3.0, 1.0, 2.0], tokens=100)
    assert (found["median_s"], found["min_s"], found["max_s"], found["tokens_per_s"]) == (2.0, 1.0, 3.0, 50.0)
    assert common.compare([1.0, 2.0, 1.0], [4.0, 4.0, 2.0]) == {"ratio_of_medians": 4.0, "paired_min": 2.0, "paired_max": 4.0}


def test_shards_are_compared_on_the_same_work(tmp_path: Path) -> None:
    with ExitStack() as stack:
        engines = {f"k_shards {k}": stack.enter_context(Engine(write_model(tmp_path / str(k)), k_shards=k, threads=1)) for k in (1, 4)}
        case = shards.measure(engines, {"decode": (3, 20, 4)}, 2, 250)["decode"]
    assert {side["tokens"] for side in case["sides"].values()} == {12} and case["times_the_time"]["k_shards 4"]["ratio_of_medians"] > 0


def test_the_floor_is_judged_against_the_faster_rival() -> None:
    assert common.verdict(2.5, {"vllm": 3.1, "vllm-inproc": 2.4}) == {"floor": 2.5, "against": "vllm-inproc", "ratio": 2.4, "met": False}
    assert common.verdict(2.5, {}) is None


def test_engine_overhead_is_step_time_outside_the_forward_pass() -> None:
    stages = {"steps": 10, "plan_s": 0.1, "execute_s": 1.8, "update_s": 0.1, "native_s": 1.5, "seconds": 2.5, "cached_tokens": 0}
    found = throughput.stage_shares([stages, stages])
    assert found["engine_overhead"] == pytest.approx(0.25)
    assert not found["overhead_met"]
    assert (found["batch_s"], found["step_s"]) == pytest.approx((0.6, 4.0))
    assert found["outside_steps"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "vllm"], "--peer-python"),
        (["--peers", "none", "--cases", "concurrent-2"], "unknown concurrent-2"),
        (["--peers", "none", "--reps", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        throughput.parse(["--model", "m", *arguments])
    assert words in capsys.readouterr().err


def test_quick_runs_everything_once() -> None:
    args = throughput.parse(["--model", "m", "--peers", "none", "--quick", "--reps", "9"])
    assert (args.reps, args.peers, args.cases) == (1, [], list(throughput.ALL_NAMES))
    assert max(c.quick().new_tokens for c in throughput.CASES) < 50
    assert startup.parse(["--model", "m", "--peers", "none"]).own == list(startup.OWN)


def test_report_names_machine_and_commit_but_no_folders(tmp_path: Path) -> None:
    args = throughput.parse(["--model", "/some/where/model-1", "--peers", "none", "--vllm-preload", "/usr/lib/libx.so"])
    document = common.report(
        "throughput", vars(args), common.begin(), {"versions": common.versions("numpy", "no-such-package"), "cases": {}}
    )
    common.write_json(document, str(tmp_path / "new" / "out.json"))
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert {"schema_version", "benchmark", "started_at", "hardware", "commit", "modified", "seconds", "config", "cases"} <= found.keys()
    assert found["hardware"]["cores"] >= 1
    assert found["config"]["model"] == "model-1"
    assert found["config"]["vllm_preload"] == ["libx.so"]
    assert "/some/where" not in json.dumps(found)
    assert sys.executable not in json.dumps(found)
    assert found["versions"]["no-such-package"] is None


def test_startup_results() -> None:
    samples = {"engine": [{"first_token_s": 2.0}, {"first_token_s": 4.0}], "help": [{"exit_s": 0.1}], "vllm": [{"first_token_s": 30.0}]}
    found = startup.results(samples, ["vllm"])
    assert found["first_token_ratios"] == {"engine": {"vllm": 10.0}}
    assert found["sides"]["help"]["exit_s"]["median_s"] == 0.1


def test_worker_answers_and_stands_still_between_jobs() -> None:
    with Reaper() as reaper, fake(reaper) as worker:
        assert worker.ready["ready"] == {"model": "some-model", "options": {"a": 1}}
        case = throughput.CASES[0]
        answer = throughput.checked("fake", case, worker.ask(case.job(0, 0, 1000)))
        assert answer["tokens"] == 128
        until = time.monotonic() + 5
        while state(worker.pid) != "T" and time.monotonic() < until:
            time.sleep(0.01)
        assert state(worker.pid) == "T"
    assert worker.process.returncode is not None


def test_a_wrong_token_count_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match="127 tokens"):
        throughput.checked("fake", throughput.CASES[0], {"tokens": 127, "logprobs": 128})


def test_a_worker_that_ends_or_hangs_is_named_with_its_last_words() -> None:
    with Reaper() as reaper:
        with fake(reaper) as worker, pytest.raises(WorkerFailed, match=r"fake ended during fail(.|\n)*out of luck"):
            worker.ask({"op": "fail"})
        with fake(reaper) as worker, pytest.raises(WorkerFailed, match=r"no answer within 0.1 s of hang"):
            worker.ask({"op": "hang"}, deadline_s=0.1)


def test_a_worker_ends_with_a_parent_that_is_killed() -> None:
    script = (
        "import time\nfrom rollsync.benchmarks.peers.processes import Reaper, Worker\nimport sys\n"
        "w = Worker('fake', [sys.executable, '-c', sys.argv[1]], Reaper(), 'm')\nprint(w.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, FAKE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    until = time.monotonic() + 10
    while state(pid) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.02)
    assert state(pid) in ("", "Z")


def test_vllm_gets_every_core_and_none_of_our_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    env = vllm_environment(str(tmp_path / "bin" / "python"), in_process=True)
    assert "PYTHONSAFEPATH" not in env
    assert env["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
    assert env["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert int(env["OMP_NUM_THREADS"]) == len(env["VLLM_CPU_OMP_THREADS_BIND"].split(","))


def state(pid: int) -> str:
    """The letter of a process's state; "" once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def test_gaps_are_held_against_the_steps_around_a_sync() -> None:
    times = [0.1 * i for i in range(10)] + [1.2, 1.3, 1.4]  # two samples, a step a tenth; 0.3 s without a token
    tokens = [[(t, 1) for t in times], [(t + 0.01, 1) for t in times]]
    found = weight_sync.in_flight(tokens, [{"began": 0.95, "ended": 1.15}], samples=2)
    assert found["longest_gap_s"] == [pytest.approx(0.3)]
    assert found["step_s"] == pytest.approx(0.1, rel=0.1) and found["longest_gap_steps"]["max"] == pytest.approx(3, rel=0.1)
    assert found["throughput_kept"] == 0


@pytest.mark.slow
def test_weight_sync_runs_quickly_on_a_tiny_model(tmp_path: Path) -> None:
    """All its parts as real processes; nothing it measures is judged."""
    model = write_model(tmp_path / "model", "llama", max_position_embeddings=2048)
    out = tmp_path / "out.json"
    arguments = ["--quick", "--transports", "ipc,disk", "--prompt-tokens", "8", "--engine-options", '{"threads": 1}']
    assert weight_sync.main(["--model", model, "--out", str(out), *arguments]) == 0
    found = json.loads(out.read_text())
    assert found["transports"].keys() == {"ipc", "disk"} and found["in_flight"].keys() == {"keep", "recompute"}
    assert all(t["sync"]["median_s"] > 0 < t["yardstick"]["median_s"] for t in found["transports"].values())
    assert found["pauses"]["step_s"] > 0 and len(list(weight_sync.bounds(found))) == 10


def test_parity_steps_are_compared_in_turn(tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "model", "llama"), tmp_path / "out.json"
    assert parity.main(["--model", model, "--out", str(out), "--quick", "--threads", "1", "--checkpointing", "on"]) == 0
    found = json.loads(out.read_text())["cases"]
    assert list(found) == ["float32-checkpointed", "bfloat16-checkpointed"]
    for case in found.values():
        assert len(case["sides"]["parity"]["samples_s"]) == len(case["sides"]["stock"]["samples_s"]) == 1
        assert case["times_stock"]["ratio_of_medians"] > 0 < case["times_stock"]["stages"]["backward"]


def test_a_grpo_step_is_compared_part_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    args = grpo_step.parse(["--model", "m"])
    assert (args.sides, args.prompts * args.samples) == (["rollsync", "rollsync-url", "trl"], 64)
    ours = [{"seconds": 5.0, "generation": 1.0, "sync": 0.5, "train": 3.5}] * 2
    samples = {"rollsync": ours, "trl": [{"seconds": 14.0, "generation": 10.0, "sync": 0.0, "train": 4.0}], "vllm": [{"generation": 2.0}]}
    found = grpo_step.compared(samples, args)
    assert found["sides"]["rollsync"]["generation"]["tokens_per_s"] == 4096
    faster = found["times_faster"]["rollsync"]
    assert {rival: ratio["ratio_of_medians"] for rival, ratio in faster["generation"].items()} == {"trl": 10.0, "vllm": 2.0}
    assert faster["step"].keys() == {"trl"} and found["floor"]["rollsync"]["met"]
    for arguments, words in ((["--sides", "vllm"], "--peer-python"), (["--micro-batch", "5"], "divide"), (["--sides", "x"], "unknown x")):
        with pytest.raises(SystemExit):
            grpo_step.parse(["--model", "m", *arguments])
        assert words in capsys.readouterr().err


def test_learning_is_judged_seed_by_seed() -> None:
    def run(seed: int, learning_rate: float, reward: float) -> dict[str, object]:
        curve = [{"max_logp_difference": 0.0}]
        return {"seed": seed, "learning_rate": learning_rate, "reward_last": reward, "parity": True, "curve": curve, "seconds": 1.0}

    runs = [run(0, 1e-5, 0.9), run(0, 0.0, 0.5), run(1, 1e-5, 0.6), run(1, 0.0, 0.5), run(2, 1e-5, 0.9)]
    found = grpo_learning.judged(runs)
    assert found["gain"]["by_seed"] == {0: 0.4, 1: 0.1} and not found["gain"]["met"]
    assert grpo_learning.judged(runs[:2])["gain"]["met"] and found["max_logp_difference"]["met"]
