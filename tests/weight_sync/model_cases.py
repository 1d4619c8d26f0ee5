"""Models in every wrapping, and what holds of `weights_from` for each. As a script: one of two ranks that tries some of them.

    python model_cases.py RANK STORE OUT KIND...

A kind is like "peft+fsdp2": parts of WRAPPINGS, applied in order. The script writes {kind: "ok" or what went wrong} to OUT.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollsync.weight_sync.checkpoint_writer import write_folder
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.ranks import Alone, DistRanks
from rollsync.weight_sync.sources import dtype_name, weights_from
from safetensors.torch import load_file
from torch import Tensor, nn

V, D, LAYERS = 67, 16, 2
LR = 0.5
UNLIKE = {"mixed"}
"""parts of a kind whose training is not that of the plain model"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.o_proj = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.self_attn(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(D, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Tiny(nn.Module):
    """Named like a Hugging Face model, in a few lines."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(), nn.Linear(D, V, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.lm_head(self.model(input_ids))


def tiny(tied: bool) -> nn.Module:
    torch.manual_seed(5)
    return Tiny(tied)


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, **sizes))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("Layer", "LlamaDecoderLayer")]


def peft(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    found = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], **options}))
    for name, parameter in found.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data.normal_(0, 0.3)
    return found


def peft_rows(model: nn.Module) -> nn.Module:
    """Over layers that keep their weight as [in, out]."""
    from transformers.pytorch_utils import Conv1D

    for layer in layers_of(model):
        torch.manual_seed(7)
        layer.self_attn.v_proj = Conv1D(D, D)  # type: ignore[union-attr, assignment]
    return peft(model, target_modules=["v_proj"], fan_in_fan_out=True)


def spread(model: nn.Module, replicas: int = 0, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    sizes = (replicas, size // replicas) if replicas else (size,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def partly(model: nn.Module) -> nn.Module:
    """FSDP2 that ignores some parameters, which stay plain tensors."""
    return spread(model, ignored_params={p for name, p in model.named_parameters() if "v_proj" in name or "model.norm" in name})


def fsdp2_mixed(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return spread(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layer) for layer in layers_of(model)})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, **{"auto_wrap_policy": policy, "use_orig_params": True, "device_id": device, **options})


def by_columns(model: nn.Module) -> nn.Module:
    from torch.distributed.tensor import Shard

    return spread(model, shard_placement_fn=lambda p: Shard(1 if p.dim() == 2 and p.shape[1] % 2 == 0 else 0))


def fsdp1_mixed(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    strategy = ShardingStrategy.SHARD_GRAD_OP
    return fsdp1(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), sharding_strategy=strategy)


def fsdp1_apart(model: nn.Module) -> nn.Module:
    """Every adapter in a unit of its own, and the base layers in others."""
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear) and m.weight.requires_grad)
    return fsdp1(model, auto_wrap_policy=policy)


def spread_apart(model: nn.Module) -> nn.Module:
    """FSDP2 with every adapter in a group of its own."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            fully_shard(module)
    return spread(model)


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    kinds = tuple({type(layer) for layer in layers_of(model)})
    wrapper.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kinds))
    return model


def regional(model: nn.Module) -> nn.Module:
    """torch.compile of every layer by itself: its segment stands in the middle of names."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = torch.compile(layer, backend="eager")
    return model


WRAPPINGS: dict[str, Any] = {
    "compile": lambda m: torch.compile(m, backend="eager"),
    "regional": regional,
    "ac": checkpointed,
    "ddp": lambda m: nn.parallel.DistributedDataParallel(m),
    "fsdp1": fsdp1,
    "fsdp2": spread,
    "fsdp2mixed": fsdp2_mixed,
    "partly": partly,
    "fsdp2columns": by_columns,
    "hsdp": lambda m: spread(m, replicas=2),
    "hsdp1": lambda m: spread(m, replicas=1),
    "fsdp2apart": spread_apart,
    "fsdp1mixed": fsdp1_mixed,
    "fsdp1apart": fsdp1_apart,
    "fsdp1flat": lambda m: fsdp1(m, use_orig_params=False),
    "peft": peft,
    "peftsave": lambda m: peft(m, modules_to_save=["lm_head"]),
    "peftembed": lambda m: peft(m, target_modules=["embed_tokens", "q_proj"]),
    "peftrows": peft_rows,
}


def make(kind: str) -> tuple[nn.Module, nn.Module]:
    """A wrapped model, and the same without wrappers."""
    parts = kind.split("+")

    def built(parts: list[str]) -> nn.Module:
        model = (llama if "llama" in kind else tiny)("tied" in kind)
        for part in parts:
            model = WRAPPINGS[part](model) if part in WRAPPINGS else model
        return model

    return built(parts), built([part for part in parts if part.startswith("peft")])


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """What an engine must get of a model without wrappers, adapters merged as peft does it."""
    if hasattr(model, "peft_config"):
        model = copy.deepcopy(model).merge_and_unload()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bits(model: nn.Module) -> list[Tensor]:
    """Everything a rank holds of a model."""
    held: list[Any] = list(model.parameters())
    return [(p.ds_tensor if hasattr(p, "ds_tensor") else p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in held]


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], exact: bool) -> None:
    assert sorted(got) == sorted(wanted), sorted(set(got) ^ set(wanted))
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, name
        if exact:
            assert torch.equal(got[name], tensor), name
        else:
            torch.testing.assert_close(got[name], tensor)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    before, seeds = bits(model), (torch.get_rng_state(), random.getstate())
    grads = [p.requires_grad for p in model.parameters()]
    yield
    assert torch.equal(torch.get_rng_state(), seeds[0]) and random.getstate() == seeds[1]
    after = bits(model)
    assert len(after) == len(before) and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert grads == [p.requires_grad for p in model.parameters()] and torch.is_grad_enabled()


def read(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All of a model's weights; the stream is as its metadata says."""
    source, got = weights_from(model, dtype=dtype), {}
    told = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    for name, tensor in source:
        assert torch.is_grad_enabled() and not tensor.requires_grad
        got[name] = tensor.clone()
    assert [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in got.items()] == told
    return got


def sent(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What a sender sends: every rank its share, written to a folder."""
    ranks = DistRanks() if dist.is_initialized() else Alone()
    with tempfile.TemporaryDirectory() as root:
        root = ranks.gather(root)[0]
        folder = write_folder(Path(root) / "out", weights_from(model, dtype=dtype), ranks=ranks)
        got = load_file(folder / "model.safetensors")
        ranks.gather(None)
    return got


def train(model: Any, ids: Tensor) -> None:
    """One step of SGD."""
    found = model(input_ids=ids)
    loss = (found if isinstance(found, Tensor) else found.logits).float().square().mean()
    if hasattr(model, "backward"):  # DeepSpeed
        model.backward(loss)
        return model.step()
    loss.backward()
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR).step()


def check(kind: str) -> None:
    """All that holds of a kind."""
    torch.manual_seed(2 + (dist.get_rank() if dist.is_initialized() else 0))
    model, plain = make(kind)
    wanted = plain_weights(plain)
    exact = "peft" not in kind or "fsdp2" not in kind  # there the merge is one of slices, whose products may round otherwise
    ids = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(0))
    half = {name: tensor.to(torch.bfloat16) for name, tensor in wanted.items()}
    with untouched(model):  # before its first forward
        same(read(model), wanted, exact)
        same(sent(model, torch.bfloat16), half, exact)
        same(read(model, torch.bfloat16), half, exact)
    with torch.no_grad():
        model(input_ids=ids)  # a forward without a backward, after which some wrappers keep whole parameters
    same(read(model), wanted, exact)
    same(sent(model), wanted, exact)
    train(model, ids)
    train(plain, ids)
    with untouched(model):
        got, trained = read(model), plain_weights(plain)
        assert not all(torch.equal(got[name], tensor) for name, tensor in wanted.items()), "the step changed nothing"
        if not any(part in kind for part in UNLIKE):
            same(got, trained, False)
        same(sent(model), got, exact)
    check_failure(model)


def check_failure(model: nn.Module) -> None:
    """A consumer that raises on one rank: nobody waits for ever, all are told."""
    last = dist.get_rank() == dist.get_world_size() - 1 if dist.is_initialized() else True
    ranks = DistRanks() if dist.is_initialized() else Alone()

    def consume(name: str, tensor: Tensor) -> None:
        if last and name.endswith("layers.0.self_attn.q_proj.weight"):
            raise OSError("no room")

    said = ""
    try:
        weights_from(model, ranks=ranks).feed(consume)
    except UpdateError as error:
        said = str(error)
    assert "q_proj.weight: OSError: no room" in said and ranks.gather(said) == [said] * ranks.size
    outcome: Any = None
    try:
        for name, tensor in weights_from(model, ranks=ranks):
            consume(name, tensor)
    except (OSError, UpdateError) as error:
        outcome = type(error)
    assert ranks.gather(outcome) == [UpdateError] * (ranks.size - 1) + [OSError]


def main(rank: int, store: str, out: str, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for kind in kinds:
        try:
            check(kind)
            found[kind] = "ok"
        except Exception:
            found[kind] = traceback.format_exc()
            break  # the ranks may differ in where they are
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
