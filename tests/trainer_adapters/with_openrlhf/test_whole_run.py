"""Stock OpenRLHF from its command line to its last step, on the CPU: two steps of REINFORCE, each followed by a sync of weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from openrlhf_helpers import STAND_INS
from rollsync import read_trace

pytestmark = pytest.mark.adapters


@pytest.mark.parametrize("mode", [[], ["--train.async_enable", "--train.partial_rollout_enable"]], ids=["sync", "partial"])
def test_two_steps(folder: str, tmp_path: Path, mode: list[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"input": f"say {i}", "label": ""}) for i in range(4)))
    ray_folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of its sockets must be short
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")]),
        "RAY_TMPDIR": ray_folder,
        "CUDA_VISIBLE_DEVICES": "0",  # of which Ray wants to see one for the GPU it is told of
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 8, "GPU": 1}),  # the trainer asks for a GPU; the hook has it use none
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"worker_process_setup_hook": "on_cpu.hook"}}),
    }
    arguments = [
        "--rollsync.device", "cpu", "--rollsync.threads", "1", "--rollsync.num_blocks", "64",
        "--rollsync.trace", str(tmp_path / "trace.jsonl"),
        "--actor.model_name_or_path", folder, "--vllm.num_engines", "1", "--actor.num_gpus_per_node", "1", "--algo.kl.init_coef", "0",
        "--algo.advantage.estimator", "reinforce_baseline", "--algo.advantage.is_correction_level", "token",
        "--reward.remote_url", str(STAND_INS / "vowels.py"), "--data.prompt_dataset", str(prompts), "--data.input_key", "input",
        "--data.max_len", "64", "--data.dataloader_num_workers", "0", "--rollout.max_new_tokens", "16", "--rollout.batch_size", "2",
        "--rollout.n_samples_per_prompt", "2", "--rollout.micro_batch_size", "2",
        "--train.batch_size", "4", "--train.micro_batch_size", "2",
        "--ds.attn_implementation", "eager", "--ds.zero_stage", "0", "--actor.adam.lr", "1e-3",
        "--ckpt.output_dir", str(tmp_path / "out"), "--ckpt.path", str(tmp_path / "checkpoints"),
    ]  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "rollsync.trainer_adapters.openrlhf", *arguments, *mode]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=tmp_path)
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
    words = done.stdout + done.stderr
    assert done.returncode == 0, words[-4000:]
    assert "Global step 2" in words and "'vllm_kl'" in words
    assert (tmp_path / "out" / "model.safetensors").is_file()
    versions = [span["version"] for record in read_trace(tmp_path / "trace.jsonl") for span in record.weight_versions]
    assert len(versions) >= 8 and 0 in versions
    assert mode or sorted(versions) == [0] * 4 + [1] * 4
