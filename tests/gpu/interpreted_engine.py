"""The whole GPU engine on CPU tensors, by Triton's interpreter. Run as a program by test_interpreted_engine.py: prints one verdict a line.

    python interpreted_engine.py SCRATCH_FOLDER [TEST ...]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "engine")]

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
np.seterr(all="ignore")  # rows that are masked

from live import sync  # noqa: E402
from real_engine import bits, finals  # noqa: E402
from replayed import MODULES, NotReplayable, Recorder  # noqa: E402
from rollsync import Engine, RolloutRequest, SamplingParams  # noqa: E402
from rollsync.kernels.gpu.arrays import DeviceArrays  # noqa: E402
from rollsync.kernels.gpu.device_sampler import DeviceSampler  # noqa: E402
from rollsync.kernels.gpu.queue import HostQueue  # noqa: E402
from rollsync.kernels.reference_program import sample_rows  # noqa: E402
from rollsync.kernels.step import ADJUST, StepLimits, allowed_words  # noqa: E402
from rollsync.rollout.engine.config import make_config  # noqa: E402
from rollsync.rollout.engine.gpu_device import GpuDevice  # noqa: E402
from rollsync.rollout.engine.model_runner import ModelRunner  # noqa: E402
from rollsync.rollout.selftest.model import write_model  # noqa: E402
from thread_ranks import ThreadGroup, ThreadRanks  # noqa: E402

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 96,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "block_tokens": 16, "num_blocks": 24, "max_model_len": 128, "max_num_seqs": 4, "max_batch_tokens": 64,
    "k_shards": 2,
}  # fmt: skip
MODEL = Path(sys.argv[1])


def device(queue: HostQueue | None = None, *, graphs: bool = False) -> GpuDevice:
    return GpuDevice(torch.device("cpu"), OPTIONS["k_shards"], None, graphs=graphs, queue=queue or HostQueue())


def gpu_engine(folder: str, on: GpuDevice | None = None, **options: Any) -> Engine:
    return Engine(folder, runner=ModelRunner(make_config(folder, {**OPTIONS, **options}), device=on or device()))


def requests(count: int = 3, max_tokens: int = 3, **params: Any) -> list[RolloutRequest]:
    rng = np.random.default_rng(7)
    opening = tuple(rng.integers(3, 90, 18).tolist())  # a whole block of it can be cached
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt_token_ids=opening + tuple(rng.integers(3, 90, 1 + 2 * i).tolist()),
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, **params),
            include=("model_logprobs", "entropy"),
        )
        for i in range(count)
    ]


def run(engine: Engine, some: Sequence[RolloutRequest], **how: Any) -> dict[Any, Any]:
    return {key: bits(output) for key, output in finals(engine, some, **how).items()}


def model(name: str, **changes: Any) -> str:
    return str(write_model(MODEL / name, "llama", **{**SMALL, **changes}))


WANTED: dict[Any, Any] = {}


def wanted() -> dict[Any, Any]:
    """Bits of the requests together, in one step where they fit."""
    if not WANTED:
        with gpu_engine(model("m")) as engine:
            WANTED.update(run(engine, requests()))
    return WANTED


def test_greedy_ids_are_the_cpu_engines_and_logprobs_are_close() -> None:
    folder = str(write_model(MODEL / "plain", "llama", **SMALL))
    some, plain = requests(temperature=0.0), {"load_format": "random"}
    found = []
    for engine in (Engine(folder, device="cpu", **plain, **OPTIONS), gpu_engine(folder, **plain)):
        with engine:
            found.append(finals(engine, some))
    for key, cpu in found[0].items():
        gpu = found[1][key]
        assert gpu.token_ids == cpu.token_ids
        np.testing.assert_allclose(gpu.model_logprobs, cpu.model_logprobs, atol=1e-4)
        assert cpu.entropy == gpu.entropy == [0.0] * 3


def test_alone_chunked_and_cached_give_the_bits_of_the_batch() -> None:
    with gpu_engine(model("m"), max_batch_tokens=7) as engine:
        assert run(engine, requests()[1:]) == {k: v for k, v in wanted().items() if k[0] != "r0"}, "in chunks of 7"
        before = engine.scheduler.blocks.num_cached
        assert before and run(engine, requests()[2:]) == {k: v for k, v in wanted().items() if k[0] == "r2"}, "alone, cached"


def test_preempted_and_prefilled_again_give_the_same_bits() -> None:
    with gpu_engine(model("m"), num_blocks=4, max_model_len=64, prefix_cache=False) as engine:
        assert run(engine, requests(2, max_tokens=3)) == {k: v for k, v in wanted().items() if k[0] != "r2"}
    with gpu_engine(model("m")) as engine:
        (output,) = finals(engine, requests(1)).values()
        again = RolloutRequest(
            request_id="again", prompt_token_ids=requests(1)[0].prompt_token_ids, params=requests(1)[0].params,
            forced_token_ids=tuple(output.token_ids), include=("model_logprobs", "entropy"),
        )  # fmt: skip
        (given,) = finals(engine, [again]).values()
        assert bits(given)[2:] == bits(output)[2:], "decoded one by one, and all in one chunk"


def test_rows_of_every_kind_are_sampled_in_pieces_as_the_reference_samples_them() -> None:
    rows, vocab, limit = 20, 300, 66  # of many padded ids, whose words of a mask are written too
    arrays = DeviceArrays(StepLimits(tokens=1, rows=rows, slots=4, table_blocks=1, banned=40, vocab=limit), HostQueue())
    rng = np.random.default_rng(3)
    arrays.num_rows = rows
    arrays["temperature"][:], arrays["top_p"][:] = rng.choice([0.0, 0.7, 1.0, 1.4], rows), rng.choice([1.0, 0.9, 0.5], rows)
    arrays["top_k"][:], arrays["min_p"][:] = rng.choice([0, 5, 30], rows), rng.choice([0.0, 0.05], rows)
    arrays["seed"][:] = rng.integers(0, 1 << 63, rows, np.uint64) * np.uint64(2) + np.uint64(1)
    arrays["sample_index"][:], arrays["row_position"][:] = np.arange(rows), np.arange(rows) + 7
    arrays["forced"][:], arrays["want"][:] = np.where(np.arange(rows) % 5 == 4, 11, -1), np.arange(rows) % 8
    arrays["top_n"][:] = np.arange(rows) % 4
    arrays["ban_offset"][:] = np.minimum(np.arange(rows + 1), 17) * 2
    arrays["banned"][:] = np.arange(40) % 64
    for slot in range(4):
        words = allowed_words(range(slot, 60, slot + 1))
        arrays.reserve_allowed(len(words))
        arrays["allowed"][slot, : len(words)] = words
    arrays["allowed_row"][:] = np.where(np.arange(rows) % 3 == 1, np.arange(rows) % 4, -1)
    end = 0
    for row in range(rows):
        entries = [(i, 0.5 * i, 1.2, 0.1) for i in range(row % 3)]
        end = arrays.put_adjust(end, np.array(entries, ADJUST))
        arrays["adjust_offset"][row + 1] = end
    arrays.reserve_masks()
    logits = torch.from_numpy(rng.normal(0, 3, (rows, 304)).astype(np.float32))[:, :vocab]
    logits[6, 3] = float("nan")
    with torch.inference_mode():
        sample_rows(arrays, logits, limit)
        outs = [name for name in arrays.columns if name.startswith("out_")]
        wanted, masks = {name: arrays[name].copy() for name in outs}, arrays.masks()
        for name in outs:
            arrays[name][...] = 99
        sampler = DeviceSampler(arrays, HostQueue(), limit)
        sampler.reserve(rows, 16, vocab)
        arrays.send()
        sampler.prepare()
        for begin, stop in ((0, 16), (16, rows)):
            sampler.launch(logits[begin:stop], begin)
        sampler.fetch()
        sampler.finish()
    assert arrays.masks() == masks and any(len(mask) > 4 for mask in masks)
    sound, top = wanted["out_nonfinite"] == 0, arrays["top_n"]
    assert not sound.all() and (arrays["out_nonfinite"] == wanted["out_nonfinite"]).all()
    for name in ("token", "logprob", "temperature_logprob"):
        assert arrays["out_" + name][sound].tobytes() == wanted["out_" + name][sound].tobytes(), name
    for bit, name in ((1, "model_logprob"), (2, "entropy")):
        asked = sound & (arrays["want"] & bit > 0)
        assert arrays["out_" + name][asked].tobytes() == wanted["out_" + name][asked].tobytes(), name
    for row in sound.nonzero()[0].tolist():
        for name in ("out_top_id", "out_top_logprob"):
            assert arrays[name][row, : top[row]].tobytes() == wanted[name][row, : top[row]].tobytes(), (name, row)


def test_graphs_replay_what_they_recorded_and_give_the_same_bits() -> None:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        with gpu_engine(model("m"), device(HostQueue(recorder.capture), graphs=True)) as engine:
            assert run(engine, requests(2, max_tokens=5)) == run_plain(requests(2, max_tokens=5))
            assert recorder.graphs and max(g.num_replays for g in recorder.graphs) >= 2, "no size came three times"
            assert len(recorder.graphs[0].launched) == 10 * SMALL["num_hidden_layers"] + 3  # one of two row-parallel layers has ranges of K


def run_plain(some: Sequence[RolloutRequest]) -> dict[Any, Any]:
    with gpu_engine(model("m")) as engine:
        return run(engine, some)


def test_the_recorder_finds_numbers_that_change_and_new_memory() -> None:
    from rollsync.kernels.gpu import ops

    x, w, out = torch.ones(4, 32), torch.ones(32), torch.empty(4, 32)
    eps = [1e-5]
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        graph = recorder.capture(lambda: (ops.rmsnorm(x, w, eps[0], out=out), None)[1])
        graph.replay()
        eps[0] = 1e-6
        with pytest.raises(NotReplayable, match="launch 0 was"):
            graph.replay()
        with pytest.raises(NotReplayable, match="empty"):
            recorder.capture(lambda: (ops.rmsnorm(x, w, 1e-5), None)[1])
        with pytest.raises(NotReplayable, match="_local_scalar_dense"):
            recorder.capture(lambda: out[0, 0].item() and None)


def test_staged_weights_leave_old_bits_until_they_commit_and_then_are_a_fresh_engines() -> None:
    old, new = model("m"), model("new", seed=3)
    some = requests(1, max_tokens=2)
    with gpu_engine(new) as engine:
        fresh, digests = run(engine, some), engine.runner.updates.digests()
    with gpu_engine(old, device(HostQueue(), graphs=True)) as engine:
        addresses = {name: tensor.data_ptr() for name, tensor in engine.runner.weights.tensors.items()}
        assert run(engine, some) != fresh
        sync(engine, new)
        assert run(engine, some) == fresh and engine.weight_version == 1
        assert engine.runner.updates.digests() == digests
        assert {name: tensor.data_ptr() for name, tensor in engine.runner.weights.tensors.items()} == addresses


def test_sleep_and_wake_give_the_bits_back_on_new_addresses() -> None:
    with gpu_engine(model("m"), device(HostQueue(), graphs=True)) as engine:
        first = run(engine, requests(1, max_tokens=2))
        engine.control.sleep()
        assert not engine.runner.weights.tensors
        engine.control.wake()
        assert run(engine, requests(1, max_tokens=2)) == first


def test_two_ranks_give_the_bits_of_one() -> None:
    shared, barrier, lock = [None] * 2, threading.Barrier(2), threading.Lock()
    wide = {"num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 4}
    with gpu_engine(model("wide", **wide)) as engine:
        one = run(engine, requests(1, max_tokens=2))
    ranks = ThreadRanks.__new__(ThreadRanks)
    config = make_config(model("wide", **wide), {**OPTIONS, "tp": 2})
    ranks.ranks = [ModelRunner(config, group=ThreadGroup(r, 2, shared, barrier), device=device()) for r in range(2)]
    ranks.info, ranks.updates = ranks.ranks[0].info, ranks.ranks[0].updates
    ranks._pool = ThreadPoolExecutor(2)
    with pytest.MonkeyPatch.context() as patch, Engine("", runner=ranks) as engine:
        for module in MODULES:  # the interpreter runs one kernel at a time
            patch.setattr(module, "launch", lambda *args, launch=module.launch: _locked(lock, launch, args))
        assert run(engine, requests(1, max_tokens=2)) == one


def _locked(lock: threading.Lock, launch: Callable[..., None], args: Any) -> None:
    with lock:
        launch(*args)


def main() -> None:
    chosen = sys.argv[2:]
    tests: dict[str, Callable[[], None]] = {
        name: test for name, test in globals().items() if name.startswith("test_") and (not chosen or name in chosen)
    }
    import time

    for name, test in tests.items():
        t = time.perf_counter()
        try:
            test()
            problem = None
        except BaseException:
            problem = traceback.format_exc()
        print(json.dumps([name, problem, round(time.perf_counter() - t, 1)]), flush=True)


if __name__ == "__main__":
    main()
