"""SGLang's call sequences, as slime and AReaL make them, against a real engine and with a trainer in a process of its own."""

from __future__ import annotations

import base64
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conversation import SglangTrainer as Trainer
from conversation import ended
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.selftest.model import write_model
from rollsync.rollout.server.dialects.tensor_pickle import Budget, read_parcel
from safetensors.torch import load_file, save_file

OPTIONS = {"block_tokens": 16, "num_blocks": 512, "max_model_len": 1500, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of one model with three sets of weights; the server starts with the first."""
    root = tmp_path_factory.mktemp("sglang")
    files = [f"{write_model(root / f'm{i}', 'llama', max_position_embeddings=2048)}/model.safetensors" for i in range(3)]
    first = load_file(files[0])
    for i, path in enumerate(files[1:], 1):
        generator = torch.Generator().manual_seed(i)
        save_file({k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in first.items()}, path)
    return files


@pytest.fixture(scope="module")
def http(serving: Any, weights: list[str]) -> Iterator[httpx.Client]:
    flags = (*FLAGS, "--allow-tensor-pickle")
    with serving(*flags, model=str(Path(weights[0]).parent), factory=None) as server, httpx.Client(base_url=server.url, timeout=60) as it:
        yield it


@pytest.fixture(scope="module")
def trainer(http: httpx.Client) -> Iterator[Trainer]:
    with ended(Trainer(str(http.base_url))) as found:
        yield found


def done(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200 and answer.json()["success"], (path, answer.text)
    found: dict[str, Any] = answer.json()
    return found


def sample(http: httpx.Client, **body: Any) -> tuple[list[int], list[float]]:
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "sampling_seed": 1}, "return_logprob": True, **body}
    meta = http.post("/generate", json=asked).json()["meta_info"]
    return [row[1] for row in meta["output_token_logprobs"]], [row[0] for row in meta["output_token_logprobs"]]


def fresh(path: str) -> tuple[list[int], list[float]]:
    """What an engine gives that was loaded from these weights."""
    with Engine(str(Path(path).parent), **OPTIONS) as engine:
        params = SamplingParams(seed=1, max_tokens=12)
        request = RolloutRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=params, include=("temperature_logprobs",))
        engine.add_request(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    return outputs[-1].token_ids, outputs[-1].temperature_logprobs


def version(http: httpx.Client) -> str:
    return str(http.get("/get_weight_version").json()["weight_version"])


def halves(path: str) -> tuple[list[str], list[str]]:
    names = list(load_file(path))
    return names[: len(names) // 2], names[len(names) // 2 :]


def test_slime_disaggregated_two_stages_broadcast_between_pause_and_continue(
    http: httpx.Client, trainer: Trainer, weights: list[str]
) -> None:
    before = sample(http)
    for group in ("slime-pp_0", "slime-pp_1"):
        trainer.done("join", group=group)
    done(http, "/pause_generation")
    assert http.get("/flush_cache").status_code == 200
    for stage, names in enumerate(halves(weights[1])):
        trainer.done("broadcast", weights=weights[1], group=f"slime-pp_{stage}", names=names, flush_cache=False, weight_version="7")
        assert version(http) == "0", "nothing is current before continue"
    assert "7" in done(http, "/continue_generation")["message"]
    assert sample(http) == fresh(weights[1]) != before and version(http) == "7"


def test_areal_interrupts_updates_and_goes_on_with_the_partial(
    http: httpx.Client, trainer: Trainer, weights: list[str], until: Any
) -> None:
    asked = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1200, "sampling_seed": 3, "ignore_eos": True},
        "return_logprob": True,
    }
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{http.base_url}/generate", json=asked, timeout=60).json()))
    thread.start()
    until(lambda: http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 1, 30)
    old = version(http)
    done(http, "/pause_generation")
    thread.join(10)
    part = found[0]["meta_info"]
    assert part["finish_reason"]["type"] == "abort" and 0 < part["completion_tokens"] < 1200
    assert http.get("/ready").status_code == 503 and http.get("/health_generate").status_code == 200
    trainer.done("join", group="update_weight_group")
    trainer.done("broadcast", weights=weights[2], group="update_weight_group", names=None, abort_all_requests=True)
    left = 1200 - part["completion_tokens"]
    asked["input_ids"] = PROMPT + found[0]["output_ids"]
    asked["sampling_params"] = {**asked["sampling_params"], "max_new_tokens": left}  # type: ignore[dict-item]
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{http.base_url}/generate", json=asked, timeout=60).json()))
    thread.start()  # waits until generation goes on
    done(http, "/continue_generation")
    thread.join(60)
    rest = found[1]["meta_info"]
    assert rest["completion_tokens"] == left and rest["finish_reason"] == {"type": "length", "length": left}
    assert {span["version"] for span in part["weight_versions"]} == {old}
    assert [span["version"] for span in rest["weight_versions"]] == [version(http)] and version(http) != old
    assert sample(http) == fresh(weights[2])


def test_begin_and_end_hold_an_update_together_without_a_pause(http: httpx.Client, trainer: Trainer, weights: list[str]) -> None:
    trainer.done("join", group="update_weight_group")
    before = sample(http)
    done(http, "/begin_weight_update")
    done(http, "/begin_weight_update")  # a trainer that was started again; nothing had come
    for names in halves(weights[1]):
        trainer.done("broadcast", weights=weights[1], group="update_weight_group", names=names, flat=True)
    assert sample(http) == before
    done(http, "/end_weight_update")
    assert sample(http) == fresh(weights[1])
    refused = http.post("/end_weight_update", json={})
    assert refused.status_code == 400 and refused.json()["success"] is False
    # Begun anew with tensors of a dead trainer inside: those are dropped, and the rest alone is no update.
    done(http, "/begin_weight_update")
    first, rest = halves(weights[2])
    trainer.done("broadcast", weights=weights[2], group="update_weight_group", names=first, flat=True)
    for names, status in ((rest, 400), (None, 200)):
        done(http, "/begin_weight_update")
        trainer.done("broadcast", weights=weights[2], group="update_weight_group", names=names, flat=True)
        assert http.post("/end_weight_update", json={}).status_code == status
        assert sample(http) == fresh(weights[2 if status == 200 else 1])


def test_slime_colocated_releases_shares_memory_and_resumes(http: httpx.Client, trainer: Trainer, weights: list[str]) -> None:
    """GET /flush_cache, release, resume weights, pause, buckets as handles (one of them empty), continue, resume the rest."""
    assert http.get("/flush_cache").status_code == 200
    done(http, "/release_memory_occupation")
    done(http, "/resume_memory_occupation", tags=["weights"])
    done(http, "/pause_generation")
    assert http.get("/flush_cache").status_code == 200
    trainer.done("nothing", flush_cache=False, weight_version="12")  # its empty segment goes with the trainer
    before = set(os.listdir("/dev/shm"))
    first, rest = halves(weights[2])
    trainer.done("share", weights=weights[2], names=first, flush_cache=False, weight_version="12")
    trainer.done("share", weights=weights[2], names=rest, flat=False, flush_cache=False, weight_version="12")
    done(http, "/post_process_weights", restore_weights_before_load=False, post_process_quantization=True)
    done(http, "/continue_generation")
    assert "cuda_graph" in done(http, "/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])["message"]
    assert sample(http) == fresh(weights[2]) and version(http) == "12"
    assert set(os.listdir("/dev/shm")) <= before, "segments are left"


def test_without_a_pause_each_bucket_is_current_by_itself(http: httpx.Client, trainer: Trainer, weights: list[str]) -> None:
    trainer.done("join", group="update_weight_group")
    for names in halves(weights[1]):
        assert "partial" in trainer.done("broadcast", weights=weights[1], group="update_weight_group", names=names)["message"]
    assert sample(http) == fresh(weights[1])


def test_a_bucket_that_does_not_fit_drops_the_update_and_the_next_one_works(
    http: httpx.Client, trainer: Trainer, weights: list[str], tmp_path: Path
) -> None:
    trainer.done("join", group="update_weight_group")
    before, called = sample(http), version(http)
    done(http, "/pause_generation")
    first, rest = halves(weights[2])
    trainer.done("broadcast", weights=weights[2], group="update_weight_group", names=first)
    shapes = [[3, 3] for _ in rest]
    refused = trainer.do("broadcast", weights=weights[2], group="update_weight_group", names=rest, shapes=shapes)
    assert refused["status"] == 400 and not refused["success"] and rest[0] in refused["message"] and rest[-1] in refused["message"]
    assert "update_weight_group is closed" in refused["message"]
    # A client that goes on as if nothing had happened does not get half of the new weights served.
    trainer.done("join", group="update_weight_group")
    trainer.done("broadcast", weights=weights[2], group="update_weight_group", names=rest)
    torn = http.post("/continue_generation", json={})
    assert torn.status_code == 400 and "missing" in torn.json()["message"]
    done(http, "/continue_generation")
    assert sample(http) == before and version(http) == called
    # NaN is found at the commit.
    broken = load_file(weights[2])
    broken["model.norm.weight"] = broken["model.norm.weight"] * float("nan")
    save_file(broken, tmp_path / "nan.safetensors")
    done(http, "/pause_generation")
    trainer.done("broadcast", weights=str(tmp_path / "nan.safetensors"), group="update_weight_group", names=None)
    nan = http.post("/continue_generation", json={})
    assert nan.status_code == 400 and "model.norm.weight" in nan.json()["message"]
    assert http.get("/ready").status_code == 503
    done(http, "/continue_generation")
    assert sample(http) == before and version(http) == called
    done(http, "/pause_generation", mode="retract")
    trainer.done("broadcast", weights=weights[2], group="update_weight_group", names=None)
    done(http, "/continue_generation")
    assert sample(http) == fresh(weights[2])
    done(http, "/destroy_weights_update_group", group_name="update_weight_group")
    assert http.post("/destroy_weights_update_group", json={"group_name": "update_weight_group"}).status_code == 400


def test_a_trainer_that_dies_in_a_bucket_drops_the_update(http: httpx.Client, weights: list[str]) -> None:
    before = sample(http)
    shapes = {name: list(t.shape) for name, t in load_file(weights[1]).items()}
    with ended(Trainer(str(http.base_url))) as victim:
        victim.done("join", group="g")
        done(http, "/pause_generation", mode="in_place")
        asked = {"names": list(shapes), "shapes": list(shapes.values()), "dtypes": ["bfloat16"] * len(shapes), "group_name": "g"}
        found: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: found.append(httpx.post(f"{http.base_url}/update_weights_from_distributed", json=asked, timeout=60))
        )
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and http.get("/v1/loads").status_code == 200
    thread.join(30)
    assert found[0].status_code == 400 and not found[0].json()["success"]
    done(http, "/continue_generation")
    assert sample(http) == before


def test_a_backend_that_does_not_fit_the_device_is_refused_at_once(http: httpx.Client) -> None:
    asked = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "nccl"}
    refused = http.post("/init_weights_update_group", json=asked, timeout=10)
    assert refused.status_code == 400 and refused.json()["error"]["field"] == "backend"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class EvilState:
    def __reduce__(self) -> Any:
        return dict, (), {"a": 1}


def test_pickles_that_are_no_handles_of_tensors_do_nothing(http: httpx.Client, server: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    evil = [pickle.dumps(value, protocol) for value in (Evil(made), [("a", Evil(made))], EvilState(), eval) for protocol in range(6)]
    evil += [
        f"cos\nsystem\n(S'touch {made}'\ntR.".encode(),
        f"(S'touch {made}'\nios\nsystem\n.".encode(),
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x041+1\n\x85R.",
        b"\x80\x04ctorch.multiprocessing.reductions\nrebuild_tensor.__globals__\n.",
        b"\x80\x02]q\x00.",
        b"\x80\x04",
        b"",
        b"\x80\x04K\x01.extra",
        b"\x80\x04\x94\x94.",
        b"\x80\x04" + b"]" * 100000 + b".",
    ]
    for data in evil:
        answer = http.post("/update_weights_from_tensor", json={"serialized_named_tensors": [base64.b64encode(data).decode()]})
        whole = data == b"\x80\x02]q\x00."  # an empty list of tensors
        assert answer.status_code == (200 if whole else 400) and answer.json()["success"] is whole, (data[:80], answer.text)
    assert not made.exists()
    off = httpx.post(f"{server.url}/update_weights_from_tensor", json={"serialized_named_tensors": ["gARdlC4="]})
    assert off.status_code == 400 and "--allow-tensor-pickle" in off.json()["message"]


def test_a_pickle_cannot_have_a_small_one_read_again_and_again() -> None:
    """Handles of a rank lie in pickles of their own, which one outside may name thousands of times."""
    empty = (torch.multiprocessing.reductions.rebuild_storage_empty, (torch.UntypedStorage,))

    class Reduced:
        def __init__(self, *reduced: Any) -> None:
            self.reduced = reduced

        def __reduce__(self) -> Any:
            return self.reduced

    typed = Reduced(torch.multiprocessing.reductions.rebuild_typed_storage, (Reduced(*empty), torch.float32))
    junk = (0, (0,), (1,), [None] * 20_000)
    inner = pickle.dumps(Reduced(torch.multiprocessing.reductions.rebuild_tensor, (torch.Tensor, typed, junk)))

    def outer(times: int) -> bytes:
        named = b"\x8c\x17sglang.srt.utils.common\x8c\x15LocalSerializedTensor\x93)\x81}\x8c\x06values]"
        local = named + b"B" + len(inner).to_bytes(4, "little") + inner + b"asb\x94"
        return b"\x80\x04](\x8c\x01a" + local + b"\x86" + b"\x8c\x01bh\x00\x86" * times + b"e."

    assert len(read_parcel(outer(3), None, 0, Budget(200_000)).tensors) == 4
    with pytest.raises(BadRequest, match=r"at most .* opcodes"):
        read_parcel(outer(1000), None, 0, Budget(200_000))


def test_the_checker_names_tensors_that_did_not_arrive(http: httpx.Client, trainer: Trainer, weights: list[str]) -> None:
    """slime's protocol: snapshot, reset, update, compare."""
    before = sample(http)
    current = next(path for path in weights if before == fresh(path))
    done(http, "/weights_checker", action="snapshot")
    done(http, "/weights_checker", action="reset_tensors")
    differs = http.post("/weights_checker", json={"action": "compare"})
    assert differs.status_code == 400 and "model.embed_tokens.weight" in differs.json()["message"]
    assert "invalid" in http.get("/ready").json()["reason"]
    done(http, "/pause_generation")
    trainer.done("share", weights=current, names=None)
    done(http, "/continue_generation")
    done(http, "/weights_checker", action="compare")
    assert sample(http) == before
    sums = done(http, "/weights_checker")["ranks"][0]["checksums"]
    assert sums.keys() >= set(load_file(current)) - {"lm_head.weight"}
    for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
        rows = load_file(current)[name][:2]
        assert done(http, "/get_weights_by_name", name=name, truncate_size=2)["parameter"] == rows.float().tolist()
    assert http.post("/get_weights_by_name", json={"name": "nothing"}).status_code == 400
