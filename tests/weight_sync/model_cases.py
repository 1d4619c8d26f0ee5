"""What holds of `weights_from` for a model of any kind (see model_kinds.py). As a script: one of two ranks that tries some of them.

    python model_cases.py RANK STORE OUT KIND...

It writes {kind: "ok" or what went wrong} to OUT.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import torch
import torch.distributed as dist
from model_kinds import LR, UNLIKE, V, make
from rollsync.weight_sync.checkpoint_writer import write_folder
from rollsync.weight_sync.control import UpdateError
from rollsync.weight_sync.ranks import Alone, DistRanks
from rollsync.weight_sync.sources import dtype_name, weights_from
from safetensors.torch import load_file
from torch import Tensor, nn


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
