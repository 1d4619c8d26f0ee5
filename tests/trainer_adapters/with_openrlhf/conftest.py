"""Needs OpenRLHF and Ray, which have an environment of their own: `make test-adapters FRAMEWORKS=openrlhf`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frameworks import leave_out

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from openrlhf_helpers import OWN, STAND_INS  # noqa: E402

if importlib.util.find_spec("openrlhf") is not None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    sys.path.append(str(STAND_INS))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file here is left out."""
    return (collection_path.name.startswith("test_") and leave_out(config, HERE, "ray", "openrlhf")) or None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in float32, with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("model")
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 256, 8)]  # so that samples end
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(folder: str) -> Any:
    """The trainer's."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="session")
def reference(folder: str) -> Any:
    """The model as transformers has it: log-probabilities of all ids but the first at a temperature.

    `begins` are the places whose id could end nothing: OpenRLHF asks for one token at least.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    def logprobs(ids: list[int], temperature: float, weights: dict[str, Any] | None = None, begins: Any = ()) -> Any:
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if weights is not None:
            model.load_state_dict(weights)
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].float() / temperature
        for place in begins:
            rows[place, model.generation_config.eos_token_id] = -torch.inf
        return torch.log_softmax(rows, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    return logprobs


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, Any]]:
    """Ray as the launcher starts it for a job of somebody who has a runtime_env of his own; that runtime_env."""
    import ray
    from rollsync.trainer_adapters.openrlhf import install
    from rollsync.trainer_adapters.openrlhf.launch import runtime_env

    paths = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    job = {"runtime_env": {"env_vars": {"PYTHONPATH": paths, "OF_THE_JOB": "1"}, "worker_process_setup_hook": "own_hook.hook"}}
    env = runtime_env({**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
    install(OWN)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of its sockets must be short
    quiet = {"include_dashboard": False, "log_to_driver": False, "_temp_dir": folder, "object_store_memory": 80 << 20}
    ray.init(num_cpus=8, num_gpus=0, runtime_env=env, **quiet)
    yield env
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
