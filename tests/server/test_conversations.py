"""Trainers written for other engines, call by call as they make them between two batches, against a real server: slime, checkpoint-engine,
AReaL, SkyRL, prime-rl. After each the new weights are served to the bit, and what was cut short goes on with the right ids."""

from __future__ import annotations

import base64
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversation import FLAGS, SglangTrainer, VllmTrainer, ended, fresh, score, tensors_of, write_weights
from safetensors.torch import save_file

PROMPT = tuple(range(3, 23))
LONG = 1200
"""tokens of a sample that is under way when the weights change"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_weights(tmp_path_factory.mktemp("conversations"), 3)


@pytest.fixture(scope="module")
def http(serving: Any, folders: list[Path], tokenizer_folder: Path) -> Iterator[httpx.Client]:
    flags = (*FLAGS, "--allow-tensor-pickle", "--weights-root", str(folders[0].parent), "--tokenizer", str(tokenizer_folder))
    with serving(*flags, model=str(folders[0]), factory=None) as server, httpx.Client(base_url=server.url, timeout=60) as it:
        yield it


@pytest.fixture(scope="module")
def trainer(http: httpx.Client) -> Iterator[SglangTrainer]:
    with ended(SglangTrainer(str(http.base_url))) as found:
        yield found


@pytest.fixture(scope="module")
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as found:
        yield found


def ok(http: httpx.Client, path: str, body: Any = None, **more: Any) -> Any:
    answer = http.post(path, json=body, **more)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()


def file_of(folder: Path) -> str:
    return str(folder / "model.safetensors")


def halves(folder: Path) -> tuple[list[str], list[str]]:
    names = list(tensors_of(folder))
    return names[: len(names) // 2], names[len(names) // 2 :]


def running(http: httpx.Client) -> int:
    return int(http.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"])


def version(http: httpx.Client) -> str:
    return str(http.get("/get_weight_version").json()["weight_version"])


def check_serves(http: httpx.Client, folder: Path) -> None:
    """The weights of `folder` are served: ids and logprobs of a fresh engine, and of every tensor the digest."""
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 1, "max_tokens": 8, "logprobs": 0}}
    choice = ok(http, "/inference/v1/generate", body)["choices"][0]
    assert (choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]]) == fresh(folder, PROMPT, 8, seed=1)
    assert http.get("/is_paused").json() == {"is_paused": False}


# slime


def slime_sample(http: httpx.Client, ids: tuple[int, ...], seed: int, max_new_tokens: int) -> Any:
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": max_new_tokens,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": seed,
    }
    body = {"sampling_params": sampling, "return_logprob": True, "input_ids": ids}
    meta = ok(http, "/generate", body, headers={"X-SMG-Routing-Key": f"session {seed}"})["meta_info"]
    return [row[1] for row in meta["output_token_logprobs"]], [row[0] for row in meta["output_token_logprobs"]], meta


def test_slime_over_samples_aborts_until_idle_and_continues_the_partials_under_new_weights(
    http: httpx.Client, trainer: SglangTrainer, folders: list[Path], aside: ThreadPoolExecutor, until: Any
) -> None:
    check_serves(http, folders[0])
    long = [aside.submit(slime_sample, http, PROMPT, seed, LONG) for seed in range(3)]
    short = [aside.submit(slime_sample, http, PROMPT, seed, 4) for seed in range(3, 6)]
    assert all(f.result(30)[2]["finish_reason"]["type"] == "length" for f in short)
    until(lambda: running(http) == 3, 20)
    while running(http):  # there are more samples than the batch needs
        ok(http, "/abort_request", {"abort_all": True})
        time.sleep(0.1)
    partials = [f.result(10) for f in long]
    assert all(meta["finish_reason"]["type"] == "abort" for *_, meta in partials)
    trainer.done("join", group="slime-pp_0")
    ok(http, "/pause_generation", {})
    assert http.get("/flush_cache").status_code == 200
    for names in halves(folders[1]):
        trainer.done("broadcast", weights=file_of(folders[1]), group="slime-pp_0", names=names, flush_cache=False, weight_version="3")
    ok(http, "/continue_generation", {})
    check_serves(http, folders[1])
    for seed, (ids, logprobs, meta) in enumerate(partials):
        assert (ids, logprobs) == tuple(part[: len(ids)] for part in fresh(folders[0], PROMPT, LONG, seed=seed)) and ids
        assert [(s["version"], s["end"]) for s in meta["weight_versions"]] == [("0", len(ids))]
        more, new_logprobs, meta = slime_sample(http, (*PROMPT, *ids), seed, 6)
        assert (more, new_logprobs) == fresh(folders[1], (*PROMPT, *ids), 6, seed=seed)
        assert [s["version"] for s in meta["weight_versions"]] == ["3"]
    trainer.done("post", path="/destroy_weights_update_group", group_name="slime-pp_0")


def test_slime_replays_what_top_p_kept(http: httpx.Client) -> None:
    """Ids and offsets as its patched servers send them; logprobs are renormalised over those ids, and nothing comes without truncation."""

    def sampled(**sampling: Any) -> Any:
        common = {"max_new_tokens": 6, "sampling_seed": 2, "custom_params": {"return_top_p_token_ids": True}}
        return ok(http, "/generate", {"input_ids": PROMPT, "sampling_params": {**common, **sampling}, "return_logprob": True})["meta_info"]

    meta, plain = sampled(top_p=0.6), sampled()
    ids, offsets = (array("i", base64.b64decode(meta[name])).tolist() for name in ("top_p_token_ids", "top_p_token_offsets"))
    drawn = meta["output_token_logprobs"]
    assert offsets[0] == 0 and offsets[-1] == len(ids) and len(offsets) == len(drawn) + 1
    for (logprob, token, _), begin, end in zip(drawn, offsets[:-1], offsets[1:], strict=True):
        assert token in ids[begin:end] and logprob <= 0.0 and (end - begin > 1 or logprob == 0.0)
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "seed": 2, "top_p": 0.6, "logprobs": 0}}
    choice = ok(http, "/inference/v1/generate", asked)["choices"][0]
    assert [c["logprob"] for c in choice["logprobs"]["content"]] == [row[0] for row in drawn], "those of the distribution drawn from"
    assert "top_p_token_ids" not in plain


def test_slime_by_disk_loads_a_numbered_folder_inside_a_pause(http: httpx.Client, folders: list[Path]) -> None:
    folder = folders[0].parent / "weight_v000004"
    folder.mkdir()
    save_file(tensors_of(folders[2]), folder / "model.safetensors")
    ok(http, "/pause_generation", {})
    assert http.get("/flush_cache").status_code == 200
    ok(http, "/update_weights_from_disk", {"model_path": str(folder), "flush_cache": False, "weight_version": "4"})
    ok(http, "/continue_generation", {})
    check_serves(http, folders[2])
    assert version(http) == "4"


@pytest.mark.slow
def test_slime_puts_a_new_engine_in_a_dead_ones_place(serving: Any, folders: list[Path]) -> None:
    """Started anew with the first weights: released, its weights resumed, and updated with all others."""
    flags = (*FLAGS, "--allow-tensor-pickle")
    with serving(*flags, model=str(folders[0]), factory=None) as again, httpx.Client(base_url=again.url, timeout=60) as http:
        assert http.get("/health_generate").status_code == 200 and http.get("/server_info").json()["tp_size"] == 1
        ok(http, "/release_memory_occupation", {})
        ok(http, "/resume_memory_occupation", {"tags": ["weights"]})
        with ended(SglangTrainer(again.url)) as trainer:
            ok(http, "/pause_generation", {})
            assert http.get("/flush_cache").status_code == 200
            trainer.done("share", weights=file_of(folders[2]), names=None, flush_cache=False, weight_version="9")
            ok(http, "/continue_generation", {})
        ok(http, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        check_serves(http, folders[2])
        assert version(http) == "9"


# checkpoint-engine


@pytest.mark.parametrize("path", ["/update_weights_from_ipc", "/collective_rpc"])
def test_checkpoint_engine_hands_a_buffer_over_by_its_socket(
    http: httpx.Client, trainer: SglangTrainer, folders: list[Path], path: str
) -> None:
    folder = folders[0 if path == "/collective_rpc" else 1]
    reply = trainer.do("serve_parameters", weights=file_of(folder), path=path)
    assert reply["status"] == 200 and not reply.get("trainer_error"), reply
    check_serves(http, folder)
    if path == "/update_weights_from_ipc":
        assert version(http) == "step 8"


@pytest.mark.slow
def test_checkpoint_engine_has_a_socket_for_each_of_two_ranks(serving: Any, folders: list[Path]) -> None:
    flags = (*FLAGS, "--allow-tensor-pickle", "--tp", "2")
    with serving(*flags, model=str(folders[0]), factory=None) as two, ended(SglangTrainer(two.url)) as trainer:
        reply = trainer.do("serve_parameters", weights=file_of(folders[1]), path="/update_weights_from_ipc", ranks=2)
        assert reply["status"] == 200 and not reply.get("trainer_error"), reply
        with httpx.Client(base_url=two.url, timeout=60) as http:
            check_serves(http, folders[1])


@pytest.mark.parametrize(
    "spoil, words, heard",
    [
        ("name", "nobody.weight", "nobody.weight"),
        ("drop", "missing", "missing"),
        ("die", "gave up", "given up"),
        ("copy", "zmq_handles: the pickle names", "no handle of a tensor"),
        ("own", "gave up", "given up"),
        ("none", "no tensor", "no tensor"),
        ("parts", "one part", "one part"),
    ],
)
def test_an_update_that_checkpoint_engine_does_not_end_well_changes_nothing(
    http: httpx.Client, trainer: SglangTrainer, folders: list[Path], spoil: str, words: str, heard: str
) -> None:
    check_serves(http, folders[0])
    reply = trainer.do("serve_parameters", weights=file_of(folders[2]), path="/update_weights_from_ipc", spoil=spoil)
    assert reply["status"] == 400 and words in reply["message"], reply
    assert heard in reply.get("trainer_error", ""), "the parameter server is told, and stops its ranks"
    check_serves(http, folders[0])


def test_half_an_update_that_was_begun_does_not_become_current_at_its_end(
    http: httpx.Client, trainer: SglangTrainer, folders: list[Path]
) -> None:
    assert http.post("/begin_weight_update", json={}).status_code == 200
    reply = trainer.do("serve_parameters", weights=file_of(folders[2]), path="/update_weights_from_ipc", spoil="die")
    assert reply["status"] == 400 and "gave up" in reply["message"], reply
    assert http.post("/end_weight_update", json={}).status_code == 400
    check_serves(http, folders[0])


def test_a_parameter_server_that_leaves_after_the_commit_has_updated(
    http: httpx.Client, trainer: SglangTrainer, folders: list[Path]
) -> None:
    reply = trainer.do("serve_parameters", weights=file_of(folders[2]), path="/update_weights_from_ipc", spoil="leave")
    assert reply["status"] == 200, reply
    check_serves(http, folders[2])
    trainer.do("serve_parameters", weights=file_of(folders[0]), path="/update_weights_from_ipc")
    check_serves(http, folders[0])


def test_checkpoint_engine_needs_the_flag_and_a_socket_for_each_rank(http: httpx.Client, server: Any) -> None:
    address = "ipc://@nobody.sock"
    off = httpx.post(f"{server.url}/update_weights_from_ipc", json={"zmq_handles": {"GPU-0": address}})
    assert off.status_code == 400 and "--allow-tensor-pickle" in off.json()["message"]
    for sockets in ({"GPU-0": address, "GPU-1": address}, {"GPU-0": "tcp://127.0.0.1:9"}, {}, {"GPU-0": "ipc://"}, {"GPU-0": "ipc://@"}):
        refused = http.post("/update_weights_from_ipc", json={"zmq_handles": sockets})
        assert refused.status_code == 400 and refused.json()["error"]["field"] == "zmq_handles", refused.text
    twice = {"method": "update_weights_from_ipc", "args": [{"GPU-0": address}], "kwargs": {"zmq_handles": {"GPU-0": address}}}
    refused = http.post("/collective_rpc", json=twice)
    assert refused.status_code == 400 and "kwargs.zmq_handles" in refused.text
    silent = {"method": "update_weights_from_ipc", "args": [{"GPU-0": address}], "timeout": 0.2}
    answer = http.post("/collective_rpc", json=silent)
    assert answer.status_code == 422 and address in answer.json()["error"]["message"]


# AReaL


def areal_generate(http: httpx.Client, interrupted: threading.Event, backend: str) -> tuple[list[int], list[float], list[str]]:
    """Its client's loop: whatever was aborted is sent again with the tokens so far. (ids, logprobs, version of each)"""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    while len(ids) < LONG:
        common = {
            "top_p": 1.0,
            "top_k": int(1e8),
            "temperature": 1.0,
            "stop_token_ids": [],
            "ignore_eos": True,
            "skip_special_tokens": True,
        }
        if backend == "sglang":
            sampling = {**common, "max_new_tokens": LONG - len(ids), "frequency_penalty": 0.0}
            body = {"input_ids": [*PROMPT, *ids], "image_data": [], "sampling_params": sampling, "return_logprob": True, "stream": False}
            meta = ok(http, "/generate", body)["meta_info"]
            reason, spans = meta["finish_reason"]["type"], meta["weight_versions"]
            ids += [row[1] for row in meta["output_token_logprobs"]]
            logprobs += [row[0] for row in meta["output_token_logprobs"]]
        else:
            asked = {"max_tokens": LONG - len(ids), "return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False}
            body = {**common, **asked, "stream": False, "prompt": [*PROMPT, *ids]}
            choice = ok(http, "/v1/completions", body)["choices"][0]
            reason, spans = choice["finish_reason"], choice["weight_versions"]
            ids += [int(text.split(":")[1]) for text in choice["logprobs"]["tokens"]]
            logprobs += choice["logprobs"]["token_logprobs"]
        versions += [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        if reason == "abort":
            interrupted.set()
    return ids, logprobs, versions


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_areal_interrupts_sends_by_broadcast_and_goes_on(
    http: httpx.Client, trainer: SglangTrainer, folders: list[Path], aside: ThreadPoolExecutor, until: Any, backend: str
) -> None:
    old, new = (folders[0], folders[1]) if backend == "sglang" else (folders[1], folders[2])
    check_serves(http, old)
    ours, prefix = version(http), "" if backend == "sglang" else "areal_"
    trainer.done("join", group="update_weight_group", path=f"/{prefix}init_weights_update_group")
    interrupted = threading.Event()
    rollout: Future[Any] = aside.submit(areal_generate, http, interrupted, backend)
    until(lambda: running(http) == 1 or rollout.done(), 20)
    ok(http, f"/{prefix}pause_generation", {})
    assert interrupted.wait(10)
    for names in halves(new):
        if backend == "sglang":
            trainer.done("broadcast", weights=file_of(new), group="update_weight_group", names=names, abort_all_requests=True)
        else:
            trainer.done("areal_broadcast", weights=file_of(new), group="update_weight_group", names=names)
    ok(http, f"/{prefix}continue_generation", {})
    check_serves(http, new)
    ids, logprobs, versions = rollout.result(60)
    cut = versions.count(ours)
    assert len(ids) == len(logprobs) == len(versions) == LONG and 0 < cut < LONG
    assert versions == [ours] * cut + [version(http)] * (LONG - cut)
    assert logprobs[:cut] == score(old, PROMPT, tuple(ids))[:cut] and logprobs[cut:] == score(new, PROMPT, tuple(ids))[cut:]


def test_areal_by_disk_and_what_it_has_for_adapters(http: httpx.Client, folders: list[Path]) -> None:
    ok(http, "/areal_pause_generation", {})
    ok(http, "/areal_update_weights", {"model_path": str(folders[1])})
    ok(http, "/areal_continue_generation", {})
    check_serves(http, folders[1])
    late = http.post("/areal_update_weights_xccl", json={})
    assert late.status_code == 400 and "/areal_set_update_weight_meta" in late.json()["message"]
    for path in ("/areal_update_weights_lora", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/pull_weights", "/start_profile"):
        refused = http.post(path, json={"lora_name": "a", "lora_path": "b"})
        assert refused.status_code == 400 and path in refused.text, path


# SkyRL and prime-rl


def under_way(http: httpx.Client, salt: str) -> Any:
    """A sample as both ask for it; it freezes in a pause and goes on after it."""
    sampling = {
        "max_tokens": LONG,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 0,
        "ignore_eos": True,
        "seed": 5,
    }
    body = {"token_ids": PROMPT, "sampling_params": sampling, "cache_salt": salt}
    return ok(http, "/inference/v1/generate", body, headers={"X-Session-ID": "7", "X-data-parallel-rank": "0"})["choices"][0]


def check_frozen(choice: Any, old: Path, new: Path, names: tuple[str, str]) -> None:
    """It was cut once: tokens of the old weights, then of the new ones over KV of the old."""
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == list(names) and choice["finish_reason"] == "length"
    cut, logprobs = spans[0]["end"], [c["logprob"] for c in choice["logprobs"]["content"]]
    assert 0 < cut < LONG == len(logprobs) == spans[1]["end"]
    assert (choice["token_ids"][:cut], logprobs[:cut]) == tuple(part[:cut] for part in fresh(old, PROMPT, LONG, seed=5, ignore_eos=True))
    assert logprobs[cut:] != score(old, PROMPT, tuple(choice["token_ids"]))[cut:]


def test_skyrl_freezes_sends_by_collective_rpc_and_resumes(
    http: httpx.Client, folders: list[Path], aside: ThreadPoolExecutor, until: Any
) -> None:
    check_serves(http, folders[1])
    names = [http.get("/weight_info").json()["weight_version"]]
    trainer = VllmTrainer(str(http.base_url), packed=True)
    assert http.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    trainer.join()
    rollout = aside.submit(under_way, http, "0")
    until(lambda: running(http) == 1, 20)
    ok(http, "/pause?mode=keep&clear_cache=false")
    ok(http, "/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}})
    trainer.update_rpc(tensors_of(folders[2]), packed=True).raise_for_status()
    ok(http, "/collective_rpc", {"method": "skyrl_finish_weight_update"})
    ok(http, "/resume")
    names.append(http.get("/weight_info").json()["weight_version"])
    check_frozen(rollout.result(60), folders[1], folders[2], (names[0], names[1]))
    check_serves(http, folders[2])
    refused = http.post("/collective_rpc", json={"method": "update_weights_ipc", "kwargs": {"update_info": {}}})
    assert refused.status_code == 400 and "broadcast" in refused.json()["error"]["message"]
    assert http.post("/collective_rpc", json={"method": "shutdown"}).json()["error"]["param"] == "method"
    # Colocated: everything is given away, and the weights come before the KV cache does.
    ok(http, "/sleep?level=2")
    ok(http, "/wake_up?tags=weights")
    ok(http, "/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}})
    trainer.update_rpc(tensors_of(folders[0]), packed=True).raise_for_status()
    ok(http, "/collective_rpc", {"method": "skyrl_finish_weight_update"})
    ok(http, "/wake_up?tags=kv_cache")
    ok(http, "/reset_prefix_cache", {"reset_running_requests": False})
    check_serves(http, folders[0])
    trainer.post("shutdown_weight_transfer_engine")


def test_prime_rl_polls_for_a_stable_folder_and_loads_it_in_flight(
    http: httpx.Client, folders: list[Path], aside: ThreadPoolExecutor, until: Any
) -> None:
    check_serves(http, folders[0])
    assert http.get("/v1/models").json()["data"][0]["id"] == str(folders[0]) and http.get("/liveness").json() == {"status": "ok"}
    before = http.get("/weight_info").json()["weight_version"]
    step = folders[0].parent / "broadcasts" / "step_1"
    step.mkdir(parents=True)
    save_file(tensors_of(folders[1]), step / "model.safetensors")
    (step / "STABLE").touch()  # the trainer; from here on the orchestrator
    rollout = aside.submit(under_way, http, "0")
    until(lambda: running(http) == 1, 20)
    ok(http, "/pause", params={"mode": "keep", "clear_cache": "false"})
    (step / "NCCL_READY").touch()
    assert ok(http, "/update_weights", {"weight_dir": step.as_posix()})["status"] == "ok"
    ok(http, "/resume")
    after = http.get("/weight_info").json()["weight_version"]
    check_frozen(rollout.result(60), folders[0], folders[1], (before, after))
    check_serves(http, folders[1])
    asked = {
        "host": "127.0.0.1",
        "port": 29501,
        "rank_offset": 0,
        "inference_world_size": 1,
        "timeout": 9,
        "quantize_in_weight_transfer": False,
    }
    refused = http.post("/init_broadcaster", json=asked)
    assert refused.status_code == 400 and "filesystem" in refused.json()["error"]["message"]


def test_prefixes_are_cached_for_one_salt_alone(http: httpx.Client) -> None:
    prompt = list(range(40, 80))

    def cached(**salt: Any) -> int:
        sampling = {"max_new_tokens": 1, "sampling_seed": 1}
        return int(ok(http, "/generate", {"input_ids": prompt, "sampling_params": sampling, **salt})["meta_info"]["cached_tokens"])

    assert [cached(), cached(), cached(cache_salt="7"), cached(cache_salt="7"), cached(extra_key="7")] == [0, 32, 0, 32, 0]
    assert [cached(cache_salt="7", extra_key="8"), cached(cache_salt="8"), cached(cache_salt="7\n8")] == [0, 0, 0]
