"""TRL's own clients against a server of Rollsync, given nothing but its URL: cases by name, what they found as one line of JSON.

    python url_worker.py FOLDER URL CASE...

VLLM says which vLLM those clients import: the version of a stub, or "real" for the one that is installed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import vllm_stub

if os.environ.get("VLLM") != "real":
    vllm_stub.install(os.environ.get("VLLM", "0.32.0"))

import torch
import trl
import trl.generation.vllm_client as client_module
from rollsync import RolloutClient
from rollsync.weight_sync.digest import tensor_digest
from trl.generation.vllm_client import VLLMClient
from trl_cases import load

FOLDER, URL = sys.argv[1:3]
PROMPTS = [[40, 41, 42, 43], [44, 45]]

if os.environ.get("VLLM") == "real":  # the group alone is replaced: vLLM's is NCCL's
    client_module.open_trainer_endpoint = vllm_stub.Endpoint
    client_module.packed_nccl_broadcast_producer = vllm_stub.send_packed
joins = VLLMClient.init_communicator
VLLMClient.init_communicator = lambda self, device=0: joins(self, "cuda")  # no index: nothing is asked of CUDA


def connected() -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return VLLMClient(base_url=URL, group_port=port, connection_timeout=20)


def scored(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt + ids])).logits[0].float(), -1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]


def held() -> dict[str, str]:
    with RolloutClient(URL) as client:
        found: dict[str, str] = client.digests()["digests"]
    return found


def digests(model: Any) -> dict[str, str]:
    return {name: f"{tensor_digest(p.detach()):016x}" for name, p in model.named_parameters()}


def case_generate() -> dict[str, Any]:
    """n samples of each prompt, prompt after prompt; logprobs none, the token's own, or with alternatives."""
    client, model = connected(), load(FOLDER)
    found = {how: client.generate(PROMPTS, n=2, max_tokens=6, logprobs=how) for how in (None, 0, 2)}
    own, more = found[0], found[2]
    pairs = zip((p for p in PROMPTS for _ in range(2)), own["completion_ids"], own["logprobs"], strict=True)
    off = max(abs(a[0] - b) for p, ids, values in pairs for a, b in zip(values, scored(model, p, ids), strict=True))
    return {
        "prompts": own["prompt_ids"], "rows": [len(found[how]["completion_ids"]) for how in found], "none": found[None]["logprobs"],
        "off": off, "width": sorted({len(v) for row in more["logprobs"] for v in row}),
        "distinct": len({*map(tuple, own["completion_ids"])}),
        "sampled_is_there": all(
            token in alternatives for ids, row in zip(more["completion_ids"], more["logprob_token_ids"], strict=True)
            for token, alternatives in zip(ids, row, strict=True)
        ),
    }  # fmt: skip


def case_chat() -> dict[str, Any]:
    client = connected()
    chats = [[{"role": "user", "content": "yo"}], [{"role": "user", "content": "hey"}]]
    found = client.chat(chats, n=2, max_tokens=5, logprobs=0)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    wanted = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=False) for c in chats]
    model = load(FOLDER)
    prompts = found["prompt_ids"] if len(found["prompt_ids"]) == 4 else [p for p in found["prompt_ids"] for _ in range(2)]
    rows = zip(prompts, found["completion_ids"], found["logprobs"], strict=True)
    off = max(abs(a[0] - b) for p, ids, values in rows for a, b in zip(values, scored(model, p, ids), strict=True))
    return {"rows": len(found["completion_ids"]), "off": off, "as_rendered": all(list(p) in wanted for p in found["prompt_ids"])}


def case_scores() -> dict[str, Any]:
    client = connected()
    rows = [[40, 41, 42, 43, 44], [50, 51, 52]]
    found = client.get_sequence_logprobs(rows, [3, 1], top_logprobs=0)
    actual = found["actual_logprobs"]
    model = load(FOLDER)
    flat = [[value[0] if isinstance(value, list) else value for value in row] for row in actual]
    wanted = [scored(model, rows[0][:3], rows[0][3:]), scored(model, rows[1][:1], rows[1][1:])]
    return {"off": max(abs(a - b) for mine, row in zip(wanted, flat, strict=True) for a, b in zip(mine, row, strict=True))}


def case_weights() -> dict[str, Any]:
    """All of a model, and one tensor; then an update that can never work, which must not be tried again."""
    client, model = connected(), load(FOLDER)
    info = client._get(f"{URL}/server_info?config_format=json")["vllm_config"]
    client.init_communicator()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    client.update_model_params(model)
    whole = held() == digests(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    client.update_named_param("model.norm.weight", model.model.norm.weight.data)
    client.reset_prefix_cache()
    one = held() == digests(model)
    asked: list[tuple[str, int]] = []
    send = client.session.send

    def noting(request: Any, **kw: Any) -> Any:
        answer = send(request, **kw)
        asked.append((request.url.rpartition("/")[2], answer.status_code))
        return answer

    client.session.send = noting
    try:
        client.update_named_param("model.nothing.weight", torch.zeros(3))
        failed = False
    except Exception:
        failed = True
    return {
        "config": info["weight_transfer_config"], "mode": info["model_config"]["logprobs_mode"], "whole": whole, "one": one,
        "failed": failed, "asked": asked, "kept": held() == digests(model),
    }  # fmt: skip


def case_pause() -> dict[str, Any]:
    """What runs when a trainer pauses goes on when it resumes, and loses nothing."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient

    control, client = AsyncClient(URL), connected()
    got: list[Any] = []
    asking = {"n": 32, "max_tokens": 400, "logprobs": 0, "generation_kwargs": {"ignore_eos": True}}
    thread = threading.Thread(target=lambda: got.append(client.generate([[40, 41]], **asking)))
    thread.start()
    with RolloutClient(URL) as ours:
        end = time.monotonic() + 20
        while not ours.status()["stats"]["running"] and time.monotonic() < end:
            time.sleep(0.01)
        control.pause()
        time.sleep(0.3)
        waited = not got
        control.resume()
    thread.join(60)
    return {"waited": waited, "lengths": [len(ids) for ids in got[0]["completion_ids"]], "longest": control.get_max_model_len()}


def case_train() -> dict[str, Any]:
    """GRPOTrainer as its users write it, in server mode."""
    from trl_cases import grpo, logged

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"vllm_mode": "server", "vllm_server_base_url": URL, "vllm_group_port": port, "vllm_server_timeout": 20.0}
    trainer = grpo(FOLDER, tempfile.mkdtemp(), use_vllm=True, **where, max_steps=3)
    trainer.train()
    prefix = "sampling/sampling_logp_difference"
    with RolloutClient(URL) as client:
        version = client.weights()["weights"]["version"]
    return {"loss": logged(trainer, "loss"), "difference": logged(trainer, f"{prefix}/max"), "version": version}


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    found = {case: globals()[f"case_{case}"]() for case in sys.argv[3:]}
    print("FOUND " + json.dumps({"trl": trl.__version__, "vllm": sys.modules["vllm"].__version__, **found}))
