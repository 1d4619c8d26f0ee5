"""O3 to O5: OpenRLHF's own rank 0 sends weights to engines that sample, sleep or stand still; and what fails on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from openrlhf_helpers import make_generator, start, stop
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.digest import box_digest

pytestmark = pytest.mark.adapters
DEADLINE_S = 90


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=DEADLINE_S)


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """What engines say of these weights."""
    return {name: f"{box_digest(tensor, Box.whole(tensor.shape), tuple(tensor.shape)):016x}" for name, tensor in weights.items()}


def served(engines: list[Any]) -> list[dict[str, str]]:
    """What each engine says of the weights it serves."""
    return get([engine.digests.remote() for engine in engines])


def version(engine: Any) -> int:
    return int(get(engine.status.remote())["state"]["weights"]["version"])


def params(**given: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"logprobs": 1, "ignore_eos": True, "max_tokens": 8, **given})


@pytest.fixture(scope="module")
def engines(cluster: Any, folder: str) -> Iterator[list[Any]]:
    """Two, which every test leaves serving."""
    made = start(folder, 2)
    yield made
    stop(made)


@pytest.fixture(scope="module")
def trainer(engines: list[Any], folder: str) -> Iterator[Any]:
    from trainer_rank import TrainerRank

    made = TrainerRank.remote(folder)
    yield made
    ray.kill(made)


def test_by_openrlhfs_default_way(engines: list[Any], trainer: Any, reference: Any) -> None:
    get(trainer.meet.remote(engines))
    for step in (1, 2):
        get(trainer.change.remote(0.05))
        get(trainer.sync.remote())
        weights = get(trainer.weights.remote())
        assert served(engines) == [digests(weights)] * 2
        output = get(engines[1].generate.remote([5, 6, 7], params())).outputs[0]
        assert output.weight_versions == [{"version": step, "start": 0, "end": 8}]
        found = [row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)]
        expected = reference([5, 6, 7, *output.token_ids], 1.0, weights)[2:]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_samples_in_flight_go_on_under_the_new_weights(engines: list[Any], trainer: Any) -> None:
    get(trainer.meet.remote(engines))
    engine, now = engines[0], version(engines[0])
    drawn = get(engine.status.remote())["generated_tokens"]
    refs = [engine.generate.remote([i, 2, 3], params(max_tokens=240, seed=i)) for i in range(4)]
    until = time.monotonic() + DEADLINE_S
    while get(engine.status.remote())["generated_tokens"] < drawn + 20:
        assert time.monotonic() < until
    get(engine.pause_generation.remote())
    before = get(engine.status.remote())
    assert before["state"]["scheduling"]["state"] == "paused" and before["running"] == 4
    get(trainer.change.remote(0.05))
    get(trainer.sync.remote())
    after = get(engine.status.remote())
    assert (after["running"], after["generated_tokens"]) == (4, before["generated_tokens"])
    get(engine.resume_generation.remote())
    for output in get(refs):
        (sample,) = output.outputs
        spans = sample.weight_versions
        assert len(sample.token_ids) == 240 and [s["version"] for s in spans] == [now, now + 1]
        assert 0 < spans[0]["end"] < 240 and spans[1]["mixed_kv"] == 1


def test_engines_sleep_while_the_trainer_trains(engines: list[Any], trainer: Any, tokenizer: Any) -> None:
    from openrlhf.trainer.ray import batch_vllm_engine_call

    memory = lambda: [get(engine.status.remote())["state"]["memory"] for engine in engines]  # noqa: E731
    asleep = [{"weights": "offloaded", "kv_cache": "discarded"}] * 2
    batch_vllm_engine_call(engines, "sleep")
    assert memory() == asleep
    generator = make_generator(tokenizer, engines, sleeps=True, prompts=4)
    sample = lambda: generator.generate_samples(max_len=64, max_new_tokens=8, temperature=1.0, top_p=1.0)[0]  # noqa: E731
    assert len(sample()) == 4 and memory() == asleep
    get(trainer.meet.remote(engines))
    with pytest.raises(Exception, match="opening an update is not possible now"):
        get(trainer.sync.remote())
    batch_vllm_engine_call(engines, "wake_up", tags=["weights"])
    assert memory() == [{"weights": "resident", "kv_cache": "discarded"}] * 2
    get(trainer.change.remote(0.05))
    get(trainer.sync.remote())
    assert served(engines) == [digests(get(trainer.weights.remote()))] * 2
    assert len(sample()) == 4 and memory() == asleep
    with pytest.raises(Exception, match="level must be 1 or 2, got 3"):
        get(engines[0].sleep.remote(level=3))
    with pytest.raises(Exception, match="tags must be one of weights, kv_cache"):
        get(engines[0].wake_up.remote(tags=["gradients"]))
    batch_vllm_engine_call(engines, "wake_up")


def test_by_rays_collectives(engines: list[Any], folder: str) -> None:
    from trainer_rank import RaySender

    sender = RaySender.remote()
    weights = get(sender.sync.remote(folder, engines, 0.25))
    assert served(engines) == [digests(weights)] * 2
    ray.kill(sender)


def test_what_fails_leaves_the_old_weights(engines: list[Any], folder: str) -> None:
    from trainer_rank import TrainerRank

    old, now = served(engines), version(engines[0])
    serves = f"the weights of this step were not taken, version {now} serves on: "
    trainer = TrainerRank.remote(folder)
    get(trainer.meet.remote(engines))
    for harm, words in (
        (("change", float("nan"), "model.norm.weight"), "model.norm.weight: 32 values are not finite"),
        (("rename", "model.norm.weight", "lora_A"), "model.norm.lora_A.*adapters come unmerged: leave --ds.lora.rank out"),
        (("drop", "model.norm.lora_A"), "model.norm.weight .32. is missing"),
        (("cast", "bfloat16"), "dtype is bfloat16, the engine computes in float32: --ds.param_dtype and --rollsync.dtype must agree"),
    ):
        get(getattr(trainer, harm[0]).remote(*harm[1:]))
        with pytest.raises(Exception, match=serves + ".*" + words):
            get(trainer.sync.remote())
    assert served(engines) == old
    assert len(get(engines[0].generate.remote([5, 6, 7], params())).outputs[0].token_ids) == 8

    ref = engines[0].update_weight.remote("model.embed_tokens.weight", dtype=torch.float32, shape=(258, 32))
    ray.kill(trainer)  # it dies half way
    with pytest.raises(Exception, match=serves + "model.embed_tokens.weight: it could not be received"):
        get(ref)
    again = TrainerRank.remote(folder)  # and is started again
    get(again.meet.remote(engines))
    get(again.change.remote(0.05))
    get(again.sync.remote())
    assert served(engines) == [digests(get(again.weights.remote()))] * 2
    ray.kill(again)


def test_gpu_memory_is_refused_by_an_engine_on_the_cpu(engines: list[Any]) -> None:
    what = {"dtype": torch.float32, "shape": (32,), "ipc_handles": {"GPU-0": (None, ())}}
    with pytest.raises(Exception, match=r"ipc_handles: memory of a GPU cannot be opened .* on the CPU: --vllm\.sync_backend gloo"):
        get(engines[0].update_weight_cuda_ipc.remote("model.norm.weight", **what))
    for given, words in (
        ({"group_name": ""}, "group_name must not be empty"),
        ({"rank_offset": 0}, "rank_offset must be in"),
        ({"backend": "nccl", "use_ray": True}, "backend nccl needs engines on a GPU"),
    ):
        where = {
            "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g", "backend": "gloo",
            "use_ray": False,
        }  # fmt: skip
        with pytest.raises(Exception, match=words):
            get(engines[0].init_process_group.remote(**(where | given)))
