"""vLLM's weight transfer, in the bodies that its HTTPVLLMWeightSyncClient and TRL's VLLMClient send, over gloo instead of NCCL."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conversation import VllmTrainer as Trainer
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.selftest.model import write_model
from safetensors.torch import load_file

OPTIONS = {"block_tokens": 16, "num_blocks": 256, "max_model_len": 1000, "threads": 1}
FLAGS = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("vllm")
    return [Path(write_model(root / f"m{i}", "llama", max_position_embeddings=1024, seed=i)) for i in range(2)]


@pytest.fixture(scope="module")
def live(serving: Any, folders: list[Path]) -> Iterator[Any]:
    with serving(*FLAGS, "--weights-root", str(folders[0].parent), model=str(folders[0]), factory=None) as found:
        yield found


@pytest.fixture
def http(live: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as found:
        yield found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def fresh(folder: Path) -> Any:
    with Engine(str(folder), **OPTIONS) as engine:
        engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=SamplingParams(seed=1, max_tokens=8)))
        outputs: list[Any] = []
        while engine.has_work:
            outputs += engine.step()
    return outputs[-1].token_ids, outputs[-1].logprobs


def sampled(http: httpx.Client) -> Any:
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 1, "max_tokens": 8, "logprobs": 0}}
    return http.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"][0]


def served(http: httpx.Client) -> Any:
    choice = sampled(http)
    return choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]]


@pytest.mark.parametrize("init", [{}, {"packed": False}, {"packed_buffer_size_bytes": 5000}, {"packed_buffer_size_bytes": 4096}])
def test_after_a_sync_the_new_weights_are_served_to_the_bit(live: Any, http: httpx.Client, folders: list[Path], init: Any) -> None:
    trainer = Trainer(live.url, **init)
    trainer.join()
    for folder, finish in ((folders[1], {"weight_version": "step 17"}), (folders[0], None)):
        before = http.get("/weight_info").json()["version"]
        done = trainer.sync(tensors_of(folder), finish)
        assert done == {"message": "Weight update finished", "version": before + 1}
        assert trainer.post("finish_weight_update") == done, "a reply that was lost may be asked for again"
        assert served(http) == fresh(folder)
        name = finish["weight_version"] if finish else str(before + 1)
        assert http.get("/weight_info").json() == {"weight_version": name, "version": before + 1}
        assert [span["version"] for span in sampled(http)["weight_versions"]] == [name]
    assert http.post("/update_weight_version", json={"new_version": "named"}).json() == {"success": True, "new_version": "named"}
    assert http.get("/weight_info").json()["weight_version"] == "named"
    trainer.post("shutdown_weight_transfer_engine")


def test_tensor_by_tensor_and_in_part_as_trl_may_send(live: Any, http: httpx.Client, folders: list[Path]) -> None:
    trainer = Trainer(live.url)
    trainer.join()
    trainer.post("start_weight_update", {"is_checkpoint_format": True})
    for name, tensor in tensors_of(folders[1]).items():
        assert trainer.update({name: tensor}, packed=True).status_code == 200
    trainer.post("finish_weight_update", {})
    assert served(http) == fresh(folders[1])
    norm = {"model.norm.weight": tensors_of(folders[1])["model.norm.weight"] * 2}
    trainer.sync(norm)
    assert served(http) != fresh(folders[1])
    sums = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    trainer.sync({"model.norm.weight": norm["model.norm.weight"] / 2})
    found = http.post("/weight_checker", json={"action": "compare", "baseline": sums}).json()
    assert found == {"match": False, "mismatches": ["model.norm.weight"]} and served(http) == fresh(folders[1])


@pytest.mark.parametrize("fault", ["name", "shape", "lengths", "longer", "shorter", "pickle", "nan"])
def test_a_refused_update_changes_nothing_and_the_next_one_works(live: Any, http: httpx.Client, folders: list[Path], fault: str) -> None:
    before, tensors = served(http), tensors_of(folders[1])
    trainer = Trainer(live.url)
    trainer.join()
    trainer.post("start_weight_update", {})
    started = trainer.http.post("/start_weight_update", json={})
    assert started.status_code == 409 and "/shutdown_weight_transfer_engine" in started.json()["error"]["message"]
    info: dict[str, Any] = {}
    if fault == "name":
        tensors["model.extra"] = torch.zeros(3)
    elif fault == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    elif fault == "lengths":
        info["shapes"] = [[1]]
    elif fault == "longer":  # masters are sent, and something else is announced
        info["dtype_names"] = ["bfloat16"] * len(tensors)
    elif fault == "shorter":
        info["dtype_names"] = ["float32"] * len(tensors)
        tensors = {name: t.bfloat16() for name, t in tensors.items()}
    elif fault == "pickle":
        info["ipc_handles_pickled"] = "gASVAAAA"
    else:
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    answer = trainer.update(tensors, **info)
    if fault == "nan":
        assert answer.status_code == 200
        answer = trainer.http.post("/finish_weight_update")
    words = {"name": "model.extra", "shape": "model.norm.weight", "lengths": "shapes", "pickle": "unpickled", "nan": "not finite"}.get(
        fault, f"{fault} than the"
    )
    assert 400 <= answer.status_code < 500 and words in answer.json()["error"]["message"], answer.text
    late = trainer.http.post("/finish_weight_update")
    assert late.status_code == 409 and words in late.json()["error"]["message"], "what went wrong is told again"
    assert served(http) == before
    again = Trainer(live.url)
    again.join()
    again.sync(tensors_of(folders[0]))
    assert served(http) == fresh(folders[0])


def test_a_trainer_that_goes_away_hinders_nobody(live: Any, http: httpx.Client, folders: list[Path]) -> None:
    with socket.socket() as silent:  # answers nobody
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "timeout_s": 1}
        answer = http.post("/init_weight_transfer_engine", json={"init_info": info})
    assert 400 <= answer.status_code < 500 and f"127.0.0.1:{port}" in answer.json()["error"]["message"]
    assert http.post("/start_weight_update").status_code == 409
    first = Trainer(live.url)
    first.join()
    first.post("start_weight_update")
    second = Trainer(live.url)
    second.join()  # as one that was started again would: it never saw the first's update
    second.sync(tensors_of(folders[1]))
    assert served(http) == fresh(folders[1])
    assert first.http.post("/finish_weight_update").json()["version"] == http.get("/weight_info").json()["version"]


def test_discarded_weights_are_refused_until_all_of_them_came(live: Any, http: httpx.Client, folders: list[Path]) -> None:
    http.post("/sleep?level=2").raise_for_status()
    http.post("/wake_up?tags=weights").raise_for_status()
    trainer = Trainer(live.url)
    trainer.join()
    trainer.sync(tensors_of(folders[0]))
    assert http.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
    assert served(http) == fresh(folders[0])


def test_a_folder_is_loaded_by_one_call(http: httpx.Client, folders: list[Path]) -> None:
    for folder in reversed(folders):
        before = http.get("/weight_info").json()["version"]
        assert http.post("/update_weights", json={"weight_dir": str(folder)}).json()["version"] == before + 1
        assert served(http) == fresh(folder)
    outside = http.post("/update_weights", json={"weight_dir": str(folders[0].parent.parent)})
    assert (outside.status_code, outside.json()["error"]["param"]) == (400, "weight_dir")


WEIGHTS_REFUSED: list[tuple[str, Any, str]] = [
    ("/init_weight_transfer_engine", {}, "init_info"),
    ("/init_weight_transfer_engine", {"init_info": {"packed": False}}, "init_info.master_address"),
    ("/init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": "AA=="}}, "init_info.nccl_unique_id_b64"),
    (
        "/init_weight_transfer_engine",
        {"init_info": {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 2}},
        "init_info.world_size",
    ),
    ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
    ("/update_weights", {}, "update_info"),
    ("/update_weights", {"update_info": {}, "weight_dir": "x"}, "update_info"),
    ("/weight_checker", {"action": "reset"}, "action"),
    ("/weight_checker", {"action": "compare"}, "baseline"),
]


@pytest.mark.parametrize("path, body, field", WEIGHTS_REFUSED)
def test_weight_calls_that_cannot_be_honoured_are_refused_by_name(http: httpx.Client, path: str, body: Any, field: str) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
