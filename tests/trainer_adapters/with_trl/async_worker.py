"""AsyncGRPOTrainer on a server of Rollsync: cases by name, what they found as one line of JSON.

    python async_worker.py FOLDER URL CASE...

The trainer is TRL's own but for two things that it has no CPU path for: it asks CUDA for the device's peak speed, and its attention is a
GPU kernel, for which transformers' public registry takes another.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

if "default_worker" in sys.argv:  # TRL's own worker wants to import vLLM
    import vllm_stub

    vllm_stub.install()

import numpy as np
import torch
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
from rollsync import RolloutClient
from rollsync.trainer_adapters.trl_async import rollout_worker, weight_transfer
from transformers import AttentionInterface, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_cases import chats, load

FOLDER, URL = sys.argv[1:3]
MAX_TOKENS = 12


def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kw: Any) -> tuple[Any, None]:
    """What flash attention computes of a row's tree: each segment's queries are the last of its keys."""
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
    k, v = (x.index_select(0, kw["tree_kv_index"]).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.empty_like(q)
    ends_q, ends_k = kw["tree_cu_seqlens_q"].tolist(), kw["tree_cu_seqlens_k"].tolist()
    for i in range(len(ends_q) - 1):
        here, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        num_q, num_k = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]
        seen = torch.arange(num_k)[None] <= torch.arange(num_q)[:, None] + num_k - num_q
        scores = torch.einsum("qhd,khd->hqk", q[here], k[keys]) * kw["scaling"]
        out[here] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[keys])
    return out.unsqueeze(0), None


def reward(completion_ids: Any, tag: Any = None, **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 17) for ids in completion_ids]


async def slow_reward(completion_ids: Any, **kwargs: Any) -> list[float | None]:
    return [None if len(ids) == 1 else float(len(ids)) for ids in completion_ids]


def config(**changes: Any) -> Any:
    given = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4,
        "max_completion_length": MAX_TOKENS, "max_steps": 3, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no",
        "learning_rate": 1e-2, "token_budget": 0, "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 1, **changes,
    }  # fmt: skip
    return AsyncGRPOConfig(**given)


class Noted:
    """Passes calls on to a part of a trainer, and notes their order."""

    def __init__(self, inner: Any, notes: list[Any]) -> None:
        self._inner, self._notes = inner, notes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name == "check_health":
            return found

        def call(*args: Any) -> Any:
            self._notes.append(f"v{args[0]}" if name == "update_model_version" else name)
            return found(*args)

        return call


def build(args: Any, notes: list[Any], **changes: Any) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    shared = {"train_dataset": chats(), "processing_class": tokenizer, "reward_funcs": [reward, slow_reward]}
    worker = changes.pop("worker", None) or rollout_worker(URL, args, **shared, reward_weights=[1.0, 0.5])
    trainer_module.get_peak_flops_per_device = lambda *a, **k: None
    parts = {"rollout_worker": Noted(worker, notes), "weight_transfer": Noted(weight_transfer(URL, model=FOLDER), notes)}
    trainer = AsyncGRPOTrainer(model=FOLDER, args=args, **shared, **parts, **changes)
    AttentionInterface.register("tree_fa3", attention)
    return trainer, worker


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if line.get(name) is not None]


def engine_weights_equal(trainer: Any) -> bool:
    """Whether the server's digests are those of the trainer's (merged) weights."""
    from rollsync.weight_sync.digest import tensor_digest

    model = trainer.accelerator.unwrap_model(trainer.model)
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    with RolloutClient(URL) as client:
        held = client.digests()["digests"]
    mine = {name: f"{tensor_digest(p.detach()):016x}" for name, p in merged.named_parameters()}
    return bool(mine == held)


def run(**changes: Any) -> dict[str, Any]:
    notes: list[Any] = []
    args = config(**{name: value for name, value in changes.items() if name != "peft_config"})
    trainer, worker = build(args, notes, **({"peft_config": changes["peft_config"]} if "peft_config" in changes else {}))
    queued: list[Any] = []
    put = worker.rollout_buffer.put_nowait
    worker.rollout_buffer.put_nowait = lambda sample: (put(sample), queued.append(sample))[0]
    trainer.train()
    threads = [t.name for t in threading.enumerate() if t.name == "rollsync rollouts"]
    return {
        "notes": notes, "ratio": logged(trainer, "ratio"), "kl": logged(trainer, "kl"), "loss": logged(trainer, "loss"),
        "stale": logged(trainer, "sample/staleness_max"), "dropped": logged(trainer, "sample/dropped_stale_total"),
        "rewards": sorted({key for line in trainer.state.log_history for key in line if key.startswith("rewards/")}),
        "tokens": logged(trainer, "rollout/generated_tok_s"), "equal": engine_weights_equal(trainer), "threads": threads,
        "versions_fit": all(
            s.model_version == s.weight_versions[s.completion_mask == 1].min() and (s.weight_versions[s.completion_mask == 0] == -1).all()
            and len(s.weight_versions) == len(s.input_ids) == len(s.old_log_probs) for s in queued
        ), "oldest": sorted({int(s.model_version) for s in queued}), "groups": len({s.group_id for s in queued}), "queued": len(queued),
        "advantage": float(np.abs(np.mean([s.advantage for s in queued]))),
    }  # fmt: skip


def case_plain() -> dict[str, Any]:
    return run()


def case_peft() -> dict[str, Any]:
    from peft import LoraConfig

    torch.manual_seed(1)
    return run(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), learning_rate=0.1)


def case_on_policy() -> dict[str, Any]:
    """No sample that an optimizer step has made older is used."""
    return run(max_staleness=0)


def case_in_flight() -> dict[str, Any]:
    """Samples are long and syncs are many: tokens of one sample come from several versions, and say so."""
    args = config(max_completion_length=200, temperature=1.0)
    worker = rollout_worker(URL, args, train_dataset=chats(), processing_class=AutoTokenizer.from_pretrained(FOLDER), reward_funcs=reward)
    transfer = weight_transfer(URL)
    model = load(FOLDER)
    transfer.init_weight_transfer()
    transfer.send_weights((n, p.detach()) for n, p in model.named_parameters())
    worker.update_model_version(1)
    worker.start()
    spans, lags, end = set(), [], time.monotonic() + 60
    while time.monotonic() < end and (len(lags) < 24 or max(map(len, spans)) < 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter))
        transfer.send_weights((n, p.detach()) for n, p in model.named_parameters())
        worker.update_model_version(transfer.version)
        while not worker.rollout_buffer.empty():
            sample = worker.rollout_buffer.get()
            spans.add(tuple(dict.fromkeys(sample.weight_versions[sample.completion_mask == 1].tolist())))
            lags.append(int(sample.weight_versions.max()) - sample.model_version)
        worker.check_health(60)
        time.sleep(0.02)
    with RolloutClient(URL) as client:
        worker.stop()
        before = time.monotonic()
        while client.status()["stats"]["running"] and time.monotonic() - before < 10:
            time.sleep(0.05)
        running = client.status()["stats"]["running"]
    syncs = transfer.version
    transfer.destroy()
    return {"most": max(map(len, spans)), "lags": lags, "syncs": syncs, "bound": args.max_staleness, "running": running}


def case_default_worker() -> dict[str, Any]:
    """TRL's own worker, by our server's vLLM dialect; weights by our weight_transfer."""
    import trl

    notes: list[Any] = []
    args = config(vllm_server_base_url=URL, vllm_server_timeout=20, max_inflight_tasks=8, token_budget=None, max_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    trainer_module.get_peak_flops_per_device = lambda *a, **k: None
    trainer = AsyncGRPOTrainer(
        model=FOLDER, args=args, train_dataset=chats(), processing_class=tokenizer, reward_funcs=reward,
        weight_transfer=Noted(weight_transfer(URL), notes),
    )  # fmt: skip
    AttentionInterface.register("tree_fa3", attention)
    trainer.train()
    stale = logged(trainer, "sample/staleness_max")
    return {"notes": notes, "budget": args.token_budget, "ratio": logged(trainer, "ratio"), "stale": stale}


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    print("FOUND " + json.dumps({case: globals()[f"case_{case}"]() for case in sys.argv[3:]}))
