"""`weights_from`: a model's weights whole and in slices, from whatever wraps it, on one rank and on two; what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync.weight_sync import gather, model_weights
from rollsync.weight_sync.lora import UnsupportedModel
from rollsync.weight_sync.manifest import ChunkError
from rollsync.weight_sync.sources import held_box, weights_from
from rollsync.weight_sync.transports import torch_handles
from torch import nn

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import model_cases
import model_kinds

RANKED = ("plain", "tied", "ddp", "fsdp2", "tied+fsdp2", "partly", "fsdp2mixed", "ac+fsdp2", "regional+fsdp2", "compile+ddp")


def run_ranks(script: str, kinds: tuple[str, ...], root: Path, timeout_s: float) -> list[dict[str, str]]:
    """Two ranks that try these kinds one after another; what each found."""
    outs = [root / f"{rank}.json" for rank in range(2)]
    command = [sys.executable, script]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(root / "store"), str(outs[rank]), *kinds], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            words, _ = rank.communicate(timeout=timeout_s)
            assert rank.returncode == 0, words
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(model_cases.__file__, RANKED, tmp_path_factory.mktemp("ranks"), 300)


@pytest.mark.parametrize("kind", RANKED)
def test_two_ranks(kind: str, ranks: list[dict[str, str]]) -> None:
    """Names, values, both dtypes, slices sent, metadata; before and after a forward; the model and the RNG; a consumer that fails."""
    assert [found.get(kind, "not reached") for found in ranks] == ["ok", "ok"]


@pytest.mark.parametrize("kind", ["plain", "tied", "compile", "regional", "ac"])
def test_alone(kind: str) -> None:
    model_cases.check(kind)


@pytest.mark.parametrize("kind", ["peft", "peftsave", "peftembed", "peftrows", "compile+peft", "peft+regional"])
def test_lora_is_merged_into_copies(kind: str) -> None:
    pytest.importorskip("peft")
    model_cases.check(kind)


def unsupported(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        weights_from(model)


def test_what_lora_is_refused() -> None:
    peft = pytest.importorskip("peft")
    unsupported(model_kinds.peft(model_kinds.tiny(False), use_dora=True), r"model.layers.0.self_attn.q_proj: adapter default is DoRA")
    unsupported(model_kinds.peft(model_kinds.tiny(False), lora_bias=True, target_modules=["q_proj"]), "lora_bias")
    tied = model_kinds.peft(model_kinds.tiny(True), target_modules=["embed_tokens"])
    unsupported(tied, "lm_head.weight is tied to model.embed_tokens.weight, and LoRA")
    model: Any = model_kinds.peft(model_kinds.tiny(False))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model_cases.same(model_cases.read(model), model_cases.plain_weights(model_kinds.peft(model_kinds.tiny(False))), True)  # one is active
    model.base_model.set_adapter(["default", "other"])
    unsupported(model, r"several adapters are active \(default, other\)")
    model.base_model.set_adapter("default")
    with model.disable_adapter():
        unsupported(model, "its adapters are disabled")
    source = weights_from(model)
    model.merge_adapter()
    with pytest.raises(UnsupportedModel, match="merged into the base weights already"):
        source.metadata()
    ia3 = peft.get_peft_model(model_kinds.tiny(False), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    unsupported(ia3, "IA3 cannot be merged here")


def test_quantised_weights_are_refused_by_name() -> None:
    class Params4bit(nn.Parameter):
        pass

    model: Any = model_kinds.tiny(False)
    packed = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].self_attn.v_proj.weight = packed
    unsupported(model, r"model.layers.1.self_attn.v_proj.weight is torch.uint8 \(Params4bit\): .*4-bit")


def test_the_text_tower_of_a_multimodal_model() -> None:
    """Its names are those of the text model; other towers are left out; names that nobody knows stay for the engine to refuse."""
    model: Any = nn.Module()
    model.model = nn.Module()
    text = model_kinds.tiny(False)
    model.model.language_model, model.model.visual, model.lm_head = text.model, nn.Linear(2, 2), text.lm_head
    model.value_head = nn.Linear(model_kinds.D, 1)
    names = [m.name for m in weights_from(model).metadata()]
    assert set(names) == {*dict(text.named_parameters()), "value_head.weight", "value_head.bias"}
    outer: Any = nn.Module()
    outer.module = text
    assert [m.name for m in weights_from(outer).metadata()] == list(dict(text.named_parameters()))
    old: Any = nn.Module()
    old.language_model, old.vision_tower = text, nn.Linear(2, 2)
    assert [m.name for m in weights_from(old).metadata()] == list(dict(text.named_parameters()))


def test_an_iteration_left_early_alone_computes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = model_weights._whole
    monkeypatch.setattr(model_weights, "_whole", lambda slot, *more: (read.append(slot.name), whole(slot, *more))[1])
    stream = iter(weights_from(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert len(read) == 1


def test_what_lies_in_no_boxes_is_put_together_by_torch() -> None:
    """A partial sum is not the sum, though nothing is cut."""
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", lambda self: torch.full((3,), 2.0))
            assert gather.joined(partial, partial.to_local()).tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(ValueError, match="cannot be sent: shard or replicate it"):
            held_box(partial, 0)
    finally:
        torch.distributed.destroy_process_group()


def test_kept_buffers_of_one_allocation_are_two() -> None:
    kept = torch_handles.KeptBuffers()
    opened = {0: torch.arange(16, dtype=torch.uint8), 64: torch.arange(100, 116, dtype=torch.uint8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_handles, "open_tensor", lambda buffer: opened[buffer["storage_at"]])

        def bytes_at(at: int, begin: int, dtype: str = "uint8") -> list[int]:
            buffer = {"kind": "cuda", "handle": b"one", "device": 0, "storage_at": at}
            return kept.tensor({"buffer": buffer, "dtype": dtype, "shape": [2], "begin": begin}).view(torch.uint8).tolist()

        assert bytes_at(0, 4) == [4, 5] and bytes_at(64, 4) == [104, 105] and len(bytes_at(0, 8, "float32")) == 8
        for begin, dtype, words in ((-4, "uint8", "begins at byte -4"), (2, "float32", "not aligned"), (15, "uint8", "beyond")):
            with pytest.raises(ChunkError, match=words):
                bytes_at(0, begin, dtype)
