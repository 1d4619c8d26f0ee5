"""The parts of the OpenRLHF adapter that need neither Ray nor OpenRLHF; tests/trainer_adapters/with_openrlhf/ has the rest."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollsync import BadRequest, ConfigError
from rollsync.rollout.engine.async_engine import AsyncEngine
from rollsync.rollout.engine.types import SampleOutput
from rollsync.trainer_adapters.errors import TargetError
from rollsync.trainer_adapters.openrlhf import launch, stub
from rollsync.trainer_adapters.openrlhf import updates as updates_module
from rollsync.trainer_adapters.openrlhf.exchange import read_params, told
from rollsync.trainer_adapters.openrlhf.planes import Plane, open_handle
from rollsync.trainer_adapters.openrlhf.updates import ParameterUpdates
from rollsync.weight_sync.control import UpdateError
from safetensors.torch import load_file


def test_own_arguments_are_taken_out() -> None:
    given = ["--vllm.num_engines", "2", "--rollsync.threads", "4", "--rollsync.dtype=float32", "--rollsync.partial_kv", "recompute", "-x"]
    own, rest = launch.split_arguments(given)
    assert own == {"threads": 4, "dtype": "float32", "partial_kv": "recompute"} and rest == ["--vllm.num_engines", "2", "-x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rollsync.threads"], "--rollsync.threads needs a value"),
        (["--rollsync.threads", "--other"], "--rollsync.threads needs a value"),
        (["--rollsync.threads", "0"], "numerics.threads must be in"),
        (["--rollsync.nothing", "1"], "unknown engine option 'nothing'"),
        (["--rollsync.partial_kv", "drop"], "rollsync.partial_kv must be keep or recompute, got 'drop'"),
        (["--rollsync.threads", "1.5"], "numerics.threads must be a whole number"),
        (["--rollsync.seed=1e400"], "seed must be a whole number"),
        (["--rollsync.tp", "2"], "rollsync.tp must be 1, got 2: raise vllm.num_engines"),
        (["--vllm.num_engines", "-3"], "vllm.num_engines must be at least 1.*got -3"),
        (["--vllm.num_engines", "00"], "vllm.num_engines must be at least 1.*got 00"),
        ([], "vllm.num_engines must be at least 1"),
        (["--vllm.num_engines=0"], "vllm.num_engines must be at least 1"),
        (["--vllm.num_engines", "2", "--vllm.tensor_parallel_size", "2"], "vllm.tensor_parallel_size must be 1"),
        (["--vllm.num_engines", "2", "--ds.param_dtype", "fp16", "--ds.lora.rank", "4"], "ds.lora.rank must be .*; ds.param_dtype must be"),
        (["--vllm.num_engines", "2", "--data.max_images_per_prompt", "1"], "data.max_images_per_prompt must be 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises((BadRequest, ConfigError), match=words):
        launch.check_arguments(launch.split_arguments(arguments)[1])


def test_the_users_runtime_env_is_kept() -> None:
    assert launch.runtime_env({"NCCL_DEBUG": "INFO"}) == {
        "worker_process_setup_hook": launch.HOOK,
        "env_vars": {**launch.STOCK_ENV, "NCCL_DEBUG": "INFO", launch.RAY_HOOK: launch.HOOK},
    }
    job = {"pip": ["x"], "env_vars": {"A": "1", "NCCL_DEBUG": "TRACE"}, "worker_process_setup_hook": "mine.hook"}
    env = launch.runtime_env({launch.RAY_JOB: json.dumps({"runtime_env": job})})
    assert env["pip"] == ["x"] and env["worker_process_setup_hook"] == launch.HOOK
    assert env["env_vars"] | {"A": "1", "NCCL_DEBUG": "TRACE", launch.NEXT_HOOK: "mine.hook"} == env["env_vars"]
    job["env_vars"][launch.RAY_HOOK] = "ray_runtime_env_func::abc"
    with pytest.raises(BadRequest, match="worker_process_setup_hook must be a name like"):
        launch.runtime_env({launch.RAY_JOB: json.dumps({"runtime_env": job})})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{bad", " must be a JSON object, got {bad"),
        ("[]", r" must be a JSON object, got \[\]"),
        ("null", " must be a JSON object, got None"),
        ('{"runtime_env": "x"}', ": runtime_env must be a JSON object, got 'x'"),
        ('{"runtime_env": {"env_vars": ["a"]}}', r": runtime_env.env_vars must be a JSON object, got \['a'\]"),
        ('{"runtime_env": {"env_vars": {"A": 1}}}', ": runtime_env.env_vars.A must be text, got 1"),
    ],
)
def test_a_runtime_env_that_is_none_is_told_by_name(text: str, words: str) -> None:
    with pytest.raises(BadRequest, match=launch.RAY_JOB + words):
        launch.runtime_env({launch.RAY_JOB: text})


def test_vllm_is_stood_in_for_only_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    try:
        assert stub.stand_in_for_vllm() and not stub.stand_in_for_vllm()
        import vllm
        from vllm.distributed.utils import StatelessProcessGroup

        assert (vllm.SamplingParams, StatelessProcessGroup) == (stub.SamplingParams, stub.StatelessProcessGroup)
        assert pickle.loads(pickle.dumps(vllm.SamplingParams(top_k=3))) == stub.SamplingParams(top_k=3)
        with pytest.raises(AttributeError, match=r"vllm\.LLM: vLLM is not installed"):
            _ = vllm.LLM
        with pytest.raises(TypeError, match="bad_words"):
            vllm.SamplingParams(bad_words=["a"])
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "vllm":
                del sys.modules[name]


class Decoder:
    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == 0))


def test_parameters_and_samples_are_translated() -> None:
    params = read_params(stub.SamplingParams(temperature=0.5, top_k=-1, max_tokens=7, stop=["x"], stop_token_ids=[4], logprobs=2))
    assert (params.temperature, params.top_k, params.max_tokens, params.stop, params.top_logprobs) == (0.5, 0, 7, ("x",), 2)
    for bad, words in (
        ({"top_p": 0.0}, "sampling_params.top_p must be"),
        ({"logprobs": 21}, r"sampling_params.logprobs must be an int in \[0, 20\]"),
        ({"min_tokens": 9, "max_tokens": 8}, r"sampling_params.min_tokens \(9\) must not exceed max_tokens"),
    ):
        with pytest.raises(BadRequest, match=words):
            read_params(stub.SamplingParams(**bad))
    foreign = stub.SamplingParams()
    foreign.structured_outputs = {"regex": "a"}  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match=r"sampling_params\.structured_outputs is not supported"):
        read_params(foreign)

    def tell(want: bool = True, **changes: Any) -> Any:
        sample = {"request_id": "7", "sample_index": 0, "token_ids": [1, 23, 0], "logprobs": [-0.5, -1.0, -2.0], "finish_reason": "stop"}
        one = SampleOutput(**(sample | changes))
        return told("7", [9], params, [one], Decoder(), 26, want_logprobs=want, skip_special_tokens=True)  # type: ignore[arg-type]

    top = {"top_token_ids": [[1, 2], [3, 4], [0, -1]], "top_logprobs": [[-0.5, -1.5], [-0.1, -0.2], [-2.0, -9.0]]}
    (output,) = tell(**top, stop_reason="x").outputs
    assert (output.text, output.finish_reason, output.token_ids) == ("b", "stop", [1, 23, 0])
    assert [{id: (p.logprob, p.rank) for id, p in row.items()} for row in output.logprobs] == [
        {1: (-0.5, 1), 2: (-1.5, 2)}, {3: (-0.1, 1), 4: (-0.2, 2), 23: (-1.0, None)}, {0: (-2.0, 1)},
    ]  # fmt: skip
    assert tell(want=False).outputs[0].logprobs is None
    for bad, words in (
        ({"logprobs": [-0.5]}, "3 ids and 1 logprobs"),
        ({"token_ids": [], "logprobs": []}, "has no token"),
        ({"token_ids": [1, 2, 26]}, "holds id 26, ids end at 25"),
        ({"finish_reason": "error", "error": "broken"}, "failed: broken"),
    ):
        with pytest.raises(TargetError, match=words):
            tell(**bad)


def test_trainer_and_engines_meet_and_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sent = torch.arange(6, dtype=torch.bfloat16).view(2, 3)

    def rank(number: int) -> torch.Tensor:
        pair = stub.PyNcclCommunicator(stub.StatelessProcessGroup.create("127.0.0.1", port, number, 3), device="cpu")
        tensor = sent.clone() if number == 0 else torch.zeros(2, 3, dtype=torch.bfloat16)
        for _ in range(2):
            pair.broadcast(tensor, src=0, stream=None)
        return tensor

    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(found, sent) for found in pool.map(rank, range(3)))
    monkeypatch.setattr(stub, "WAIT_S", 0.3)
    with pytest.raises(ValueError, match="rank 1, 2 did not join within"):
        stub.PyNcclCommunicator(stub.StatelessProcessGroup.create("127.0.0.1", port, 0, 3), device="cpu")
    with pytest.raises(ValueError, match="nobody answers there"):
        stub.StatelessProcessGroup.create("127.0.0.1", 1, 1, 3)
    with pytest.raises(BadRequest, match="ipc_handles: memory of a GPU cannot be opened by an engine on the CPU"):
        open_handle({}, torch.device("cpu"))


def test_parameters_become_current_together_or_not_at_all(cancelling: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cancelling["llama"]
    tensors = {name: tensor + 1 for name, tensor in load_file(Path(folder, "model.safetensors")).items()}

    async def send(updates: ParameterUpdates, given: dict[str, torch.Tensor]) -> Any:
        for number, (name, tensor) in enumerate(given.items(), 1):
            report = await updates.take(name, tensor.dtype, tensor.shape, lambda tensor=tensor: tensor, last=number == len(given))
        return report

    async def script() -> None:
        engine = await AsyncEngine.start(folder, threads=1, num_blocks=16)
        digests = lambda: engine.aside("digests", "digests")  # noqa: E731
        updates, old = ParameterUpdates(engine, "float32"), await digests()
        for harm, words in (
            ({"lm_head.weight": torch.full_like(tensors["lm_head.weight"], torch.nan)}, "lm_head.weight: 16384 values are not finite"),
            ({"lm_head.weight": torch.zeros(3, 64)}, r"lm_head.weight: .*\[3, 64\]"),
            ({"model.extra.weight": torch.zeros(3)}, "model.extra.weight"),
            ({"model.norm.weight": tensors["model.norm.weight"].bfloat16()}, "model.norm.weight: dtype is bfloat16"),
        ):
            with pytest.raises(UpdateError, match="version 0 serves on: .*" + words):
                await send(updates, {**tensors, **harm})
        first = dict(list(tensors.items())[:5])
        with pytest.raises(UpdateError, match=r"version 0 serves on: .*missing"):
            await send(updates, first)
        third = list(tensors)[2]
        with pytest.raises(UpdateError, match=f"version 0 serves on: {third}: it came twice"):
            for name in [*list(tensors)[:3], third]:
                await updates.take(name, tensors[name].dtype, tensors[name].shape, lambda name=name: tensors[name], last=False)
        name, tensor = next(iter(tensors.items()))
        await updates.take(name, tensor.dtype, tensor.shape, lambda: tensor, last=False)  # the trainer gives up here, and begins anew
        assert await digests() == old
        assert (await send(updates, tensors))["version"] == 1
        assert await digests() != old
        calls = (
            updates.take(name, t.dtype, t.shape, lambda t=t: t, last=number == len(tensors))
            for number, (name, t) in enumerate(tensors.items(), 1)
        )
        assert (await asyncio.gather(*calls))[-1]["version"] == 2  # type: ignore[index]  # all at once, one behind the other
        plane, stuck = Plane(torch.device("cpu")), threading.Event()
        plane._pair = SimpleNamespace(broadcast=lambda *_, **__: stuck.wait(30), close=stuck.set)
        monkeypatch.setattr(updates_module, "RECEIVE_S", 0.2)
        for place, words in enumerate((f"{name}: it did not come within 0.2 s", "init_process_group comes first")):
            await updates.drop("a new beginning")
            with pytest.raises(UpdateError, match=words):
                receive = lambda: plane.receive(tensor.dtype, tuple(tensor.shape))  # noqa: E731
                await updates.take(name, tensor.dtype, tensor.shape, receive, last=bool(place), give_up=plane.close)
            assert stuck.is_set()  # nobody is left in the broadcast
        await engine.close()

    asyncio.run(script())
