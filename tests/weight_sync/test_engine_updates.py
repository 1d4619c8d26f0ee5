"""A weight update into a live engine: afterwards it is, bit for bit, a fresh engine of the new checkpoint."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.engine.lanes import Lanes
from rollsync.rollout.errors import BadRequest, IllegalState, UpdateRefused
from rollsync.rollout.selftest.model import write_model
from rollsync.weight_sync.boxes import Box
from rollsync.weight_sync.digest import tensor_digest
from rollsync.weight_sync.manifest import DTYPE_BYTES, Bucket, Manifest, ManifestError, TensorEntry, TensorSlice, plan
from rollsync.weight_sync.transports import links
from safetensors.torch import load_file, save_file

OPTIONS: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_model_len": 64, "max_batch_tokens": 16, "threads": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, changes in {"untied": {}, "tied": {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}}.items():
        made[name] = write_model(root / name, "llama", **changes)
        other = Path(write_model(root / f"{name}-new", "llama", **changes))
        tensors = load_file(other / "model.safetensors")
        generator = torch.Generator().manual_seed(5)
        new = {k: (v.float() + 0.05 * torch.randn(v.shape, generator=generator)).to(v.dtype) for k, v in tensors.items()}
        save_file(new, other / "model.safetensors")
        made[f"{name}-new"] = str(other)
    return made


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def manifest_of(tensors: dict[str, torch.Tensor], bucket_bytes: int = 1000) -> Manifest:
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    entries = [TensorEntry(n, names[t.dtype], tuple(t.shape), (TensorSlice(0, Box.whole(t.shape)),)) for n, t in tensors.items()]
    return plan(entries, bucket_bytes)


def packed(manifest: Manifest, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> bytearray:
    data = bytearray(bucket.nbytes)
    for piece in bucket.pieces:
        tensor = manifest.tensors[piece.tensor]
        raw = tensors[tensor.name][piece.box.slices()].contiguous().view(torch.uint8).numpy().tobytes()
        assert len(raw) == piece.box.elements * DTYPE_BYTES[tensor.dtype]
        data[piece.start : piece.start + len(raw)] = raw
    return data


def take(engine: Engine, update_id: str, sequence: int, data: bytes | bytearray) -> bool:
    return bool(engine.control.take_chunk(update_id, 0, sequence, {"data": data})["changed"])


def sync(engine: Engine, tensors: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    manifest = manifest_of(tensors)
    update = engine.control.open_update(manifest, **options)
    buckets = list(manifest.buckets)
    random.Random(1).shuffle(buckets)
    for bucket in buckets:
        take(engine, update.id, bucket.sequence, packed(manifest, bucket, tensors))
    return engine.control.commit_update(update.id, {n: tensor_digest(t) for n, t in tensors.items()})


PROMPTS = [tuple(random.Random(i).randint(3, 250) for _ in range(5 + 9 * i)) for i in range(4)]


def run(engine: Engine) -> list[tuple[list[int], list[float]]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(
            RolloutRequest(request_id=f"r{i}", prompt_token_ids=prompt, params=SamplingParams(seed=i, max_tokens=12, ignore_eos=True))
        )
    return finish(engine)


def finish(engine: Engine) -> list[tuple[list[int], list[float]]]:
    outputs = []
    while engine.has_work:
        outputs += [o for o in engine.step() if o.finished]
    return [(o.token_ids, o.logprobs) for o in sorted(outputs, key=lambda o: o.request_id)]


def engine_of(folder: str, **options: Any) -> Engine:
    return Engine(folder, **{**OPTIONS, **options})


CASES = [(None, apply, tied, dtype) for apply in ("staged", "in_place") for tied in ("tied", "untied") for dtype in ("float32", "bfloat16")]


ONE_RANK = [(*case, 1) for case in [*CASES, ("reference", "staged", "tied", "bfloat16")]]
TWO_RANKS = [(None, "staged", "tied", "bfloat16", 2), (None, "in_place", "untied", "float32", 2)]


@pytest.mark.parametrize(("kernels", "apply", "tied", "dtype", "tp"), [*ONE_RANK, *TWO_RANKS])
def test_after_a_sync_the_engine_is_a_fresh_one(
    folders: dict[str, str], kernels: str | None, apply: str, tied: str, dtype: str, tp: int
) -> None:
    old, new = folders[tied], folders[f"{tied}-new"]
    with engine_of(new, dtype=dtype, kernels=kernels) as fresh, engine_of(old, dtype=dtype, kernels=kernels, tp=tp) as engine:
        expected, before = run(fresh), run(engine)
        assert expected != before
        sent = {n: t.float() for n, t in tensors_of(new).items()}  # fp32 masters, cast by the engine
        report = sync(engine, sent, version=7, apply=apply)
        assert report["changed"] and engine.control.status()["weights"]["version"] == 7
        assert run(engine) == expected
        assert engine.runner.updates.digests() == fresh.runner.updates.digests()
        sync(engine, tensors_of(old), apply=apply)
        assert run(engine) == before
        part = {n: t for n, t in tensors_of(new).items() if "q_proj" in n or "down_proj" in n}
        sync(engine, part, apply=apply, mode="partial")
        rest = {n: t for n, t in tensors_of(new).items() if n not in part}
        sync(engine, rest, apply=apply, mode="partial")
        assert run(engine) == expected


def begin(engine: Engine, tensors: dict[str, torch.Tensor], **options: Any) -> tuple[Manifest, str]:
    manifest = manifest_of(tensors)
    return manifest, engine.control.open_update(manifest, **options).id


def give(engine: Engine, update_id: str, manifest: Manifest, tensors: dict[str, torch.Tensor], count: int | None = None) -> None:
    for bucket in manifest.buckets[:count]:
        take(engine, update_id, bucket.sequence, packed(manifest, bucket, tensors))


@pytest.fixture
def engine(folders: dict[str, str]) -> Iterator[Engine]:
    with engine_of(folders["untied"]) as found:
        yield found


def test_what_does_not_fit_is_refused_with_all_of_it_and_the_old_weights_stay(engine: Engine, folders: dict[str, str]) -> None:
    before, new = run(engine), tensors_of(folders["untied-new"])
    wrong = {f"x.{n}": t for n, t in new.items()}
    with pytest.raises(UpdateRefused) as refused:
        sync(engine, wrong)
    assert all(n in str(refused.value) for n in list(wrong)[:3]) and f"{2 * len(wrong)} problems" in str(refused.value)
    name = "model.layers.0.mlp.gate_proj.weight"
    for change in (lambda t: t[:-1], lambda t: t.t().contiguous(), lambda t: t.reshape(-1)):
        with pytest.raises(UpdateRefused, match=f"{name} is .* must be"):
            sync(engine, {**new, name: change(new[name])})
    half = dict(list(new.items())[: len(new) // 2])
    with pytest.raises(UpdateRefused, match="is missing"):
        sync(engine, half)
    done = sync(engine, half, mode="partial")
    assert done["changed"] and (done["tensors"], done["names"]) == (len(half), list(half))
    with pytest.raises(UpdateRefused, match="no tensor came"):
        sync(engine, {}, mode="partial")
    engine.control.abort_update(str(engine.control.lifecycle.update))
    sync(engine, tensors_of(folders["untied"]))
    assert run(engine) == before


@pytest.mark.parametrize("fault", ["missing chunk", "flipped bit", "nan", "wrong size", "unknown chunk"])
def test_a_bad_transfer_never_commits(engine: Engine, folders: dict[str, str], fault: str) -> None:
    before, new = run(engine), tensors_of(folders["untied-new"])
    digests = {n: tensor_digest(t) for n, t in new.items()}
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "nan":
        new[name] = new[name].clone()
        new[name][0, 0] = float("nan")
    elif fault == "flipped bit":
        new[name] = new[name].clone()
        new[name].view(torch.int32)[1, 1] ^= 1
    manifest, update = begin(engine, new)
    give(engine, update, manifest, new, len(manifest.buckets) - (fault == "missing chunk"))
    if fault in ("wrong size", "unknown chunk"):
        data, sequence = (b"x", 0) if fault == "wrong size" else (b"", 10**6)
        with pytest.raises(ValueError, match="chunk"):
            take(engine, update, sequence, data)
    else:
        words = {"missing chunk": "1 of .* chunks have not come", "flipped bit": f"{name}: digest", "nan": f"{name}: "}[fault]
        with pytest.raises(UpdateRefused, match=words):
            engine.control.commit_update(update, digests)
    engine.control.abort_update(update)
    assert run(engine) == before
    sync(engine, tensors_of(folders["untied-new"]))
    assert engine.control.status()["weights"]["version"] == 1


def test_a_repeated_chunk_changes_nothing(engine: Engine, folders: dict[str, str]) -> None:
    new = tensors_of(folders["untied-new"])
    manifest, update = begin(engine, new)
    give(engine, update, manifest, new)
    assert not take(engine, update, 0, packed(manifest, manifest.buckets[0], new))
    assert engine.control.commit_update(update, {n: tensor_digest(t) for n, t in new.items()})["changed"]
    assert not engine.control.commit_update(update)["changed"]


def test_in_place_torn_weights_are_refused_until_a_full_update(engine: Engine, folders: dict[str, str]) -> None:
    new = tensors_of(folders["untied-new"])
    manifest, update = begin(engine, new, apply="in_place")
    assert "paused" in str(engine.control.lifecycle.why_not_running())
    give(engine, update, manifest, new, 2)
    engine.control.abort_update(update, "test")
    assert "torn" in str(engine.control.lifecycle.why_not_running())
    with pytest.raises(IllegalState):
        begin(engine, dict(list(new.items())[:1]), mode="partial")
    sync(engine, new, apply="in_place")
    with engine_of(folders["untied-new"]) as fresh:
        assert run(engine) == run(fresh)


def test_a_tied_head_must_be_the_embedding_it_comes_with(folders: dict[str, str]) -> None:
    with engine_of(folders["tied"]) as engine, engine_of(folders["tied-new"]) as fresh:
        new, before = tensors_of(folders["tied-new"]), run(engine)
        other = {**new, "lm_head.weight": new["model.embed_tokens.weight"] + 1}
        with pytest.raises(UpdateRefused, match="tied"):
            sync(engine, other)
        engine.control.abort_update(str(engine.control.lifecycle.update))
        assert run(engine) == before
        sync(engine, {**new, "lm_head.weight": new["model.embed_tokens.weight"].clone()})
        assert run(engine) == run(fresh)


def test_versions_go_back_only_by_force_and_partial_updates_name_their_base(engine: Engine, folders: dict[str, str]) -> None:
    new = tensors_of(folders["untied-new"])
    sync(engine, new, version=7)
    with pytest.raises(ValueError, match="must not go back from 7 to 3"):
        begin(engine, new, version=3)
    with pytest.raises(IllegalState, match="version 7"):
        begin(engine, new, mode="partial", base_version=6)
    assert sync(engine, new, version=3, force=True)["version"] == 3
    assert sync(engine, new)["version"] == 4


@pytest.mark.parametrize("policy", ["recompute", "keep", "abort"])
def test_tokens_say_which_weights_made_them(folders: dict[str, str], policy: str) -> None:
    """Under `recompute` the later tokens are those the new weights give on that sequence."""
    new, prompt = tensors_of(folders["untied-new"]), PROMPTS[2]
    params = SamplingParams(seed=3, max_tokens=14, ignore_eos=True)
    with engine_of(folders["untied"]) as engine, engine_of(folders["untied-new"]) as fresh:
        engine.add_request(RolloutRequest(request_id="r", prompt_token_ids=prompt, params=params))
        made = 0
        while made < 6:
            engine.step()
            made = len(engine.scheduler.running[0].columns.logprobs) if engine.scheduler.running else 0
        sync(engine, new, version=5, kv_policy=policy)
        outputs = engine.poll()
        while engine.has_work:
            outputs += engine.step()
        (output,) = (o for o in outputs if o.finished)
        if policy == "abort":
            assert (output.finish_reason, len(output.token_ids)) == ("abort", 6)
            return
        mixed = {"mixed_kv": 1} if policy == "keep" else {}
        assert output.weight_versions == [{"version": 0, "start": 0, "end": 6}, {"version": 5, "start": 6, "end": 14, **mixed}]
        if policy == "recompute":
            resumed = RolloutRequest(request_id="r", prompt_token_ids=prompt, params=params, continue_from=tuple(output.token_ids[:6]))
            fresh.add_request(resumed)
            finals = []
            while fresh.has_work:
                finals += fresh.step()
            assert finals[-1].token_ids == output.token_ids and finals[-1].logprobs[6:] == output.logprobs[6:]


def test_sleep_gives_memory_back_and_wake_the_same_bits(folders: dict[str, str]) -> None:
    with engine_of(folders["untied"]) as engine:
        before = run(engine)
        for tags in (["weights"], ["kv_cache"], None):
            assert engine.control.sleep(tags)["changed"] and not engine.control.sleep(tags)["changed"]
            assert not engine.has_work and "asleep" in str(engine.control.lifecycle.why_not_running())
            engine.control.wake(tags)
            assert run(engine) == before
        engine.control.sleep(weights="discard")
        assert not engine.control.wake()["running"]
        sync(engine, tensors_of(folders["untied"]))
        assert run(engine) == before


def test_a_paused_engine_makes_no_step(engine: Engine) -> None:
    engine.control.pause(owner="me")
    with pytest.raises(IllegalState, match="paused by me"):
        engine.generate([list(PROMPTS[0])], SamplingParams(max_tokens=2))
    engine.abort(all=True)
    engine.control.resume("me")
    assert run(engine)


def test_a_drain_ends_with_the_requests_it_found(engine: Engine) -> None:
    def add(name: str, new: int) -> None:
        params = SamplingParams(seed=1, max_tokens=new, ignore_eos=True)
        engine.add_request(RolloutRequest(request_id=name, prompt_token_ids=PROMPTS[0], params=params))

    add("first", 5)
    reports: list[dict[str, Any]] = []
    assert engine.control.pause(mode="drain", reply=reports.append)["draining"]
    add("later", 40)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        outputs += engine.poll()
    assert [o.request_id for o in outputs] == ["first"] and [r["drained"] for r in reports] == [1]
    engine.control.resume()
    assert [len(ids) for ids, _ in finish(engine)] == [40]


@pytest.mark.parametrize("layout", [{"kind": "tensors"}, {"kind": "concatenated"}, {"kind": "packed", "bytes": 3000}])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_an_update_may_name_its_tensors_as_it_goes(folders: dict[str, str], layout: dict[str, Any], apply: str) -> None:
    """As trainers written for other engines do: names come with each message, and the end alone says that it was all."""
    new = list(tensors_of(folders["untied-new"]).items())
    random.Random(2).shuffle(new)
    new[0] = (new[0][0], new[0][1].bfloat16())  # what follows lies unaligned

    def grow(engine: Engine, update_id: str, some: list[tuple[str, torch.Tensor]]) -> None:
        names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
        told = [{"name": n, "dtype": names[t.dtype], "shape": list(t.shape)} for n, t in some]
        sizes = [t.numel() * t.element_size() for _, t in some]
        stream = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for _, t in some)
        chunks = engine.control.extend_update(update_id, told, layout)["chunks"]
        for sender, sequence in chunks:
            used, limit = 0, {"tensors": 0, "concatenated": len(stream), "packed": layout.get("bytes", 0)}[layout["kind"]]
            while sizes and (used == 0 or used < limit):
                used += sizes.pop(0)
            assert engine.control.take_chunk(update_id, sender, sequence, {"data": stream[:used]})["changed"]
            stream = stream[used:]
        assert not stream

    with engine_of(folders["untied"]) as engine:
        before, half = run(engine), len(new) // 2
        update = engine.control.open_update(apply=apply).id
        with pytest.raises(ManifestError, match="nobody"):
            engine.control.extend_update(update, [{"name": "nobody", "dtype": "float32", "shape": [2]}], layout)
        grow(engine, update, new[:half])
        with pytest.raises(ManifestError, match="more than once"):
            grow(engine, update, new[:1])
        grow(engine, update, new[half:])
        assert engine.control.commit_update(update)["mode"] == "full"
        after = run(engine)
        assert after != before
        sync(engine, tensors_of(folders["untied"]))
        assert run(engine) == before
        update = engine.control.open_update(apply=apply).id
        grow(engine, update, new[:half])
        assert engine.control.commit_update(update)["mode"] == "partial"
        update = engine.control.open_update(apply=apply, mode="full").id
        grow(engine, update, new[:half])
        with pytest.raises(UpdateRefused, match="is missing"):
            engine.control.commit_update(update)
        grow(engine, update, new[half:])
        engine.control.commit_update(update)
        assert run(engine) == after


def test_an_abort_does_not_wait_for_a_sender(engine: Engine, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that is stuck in its transport ends when the update does, and what it then brings is not taken."""
    waiting, let_go = threading.Event(), threading.Event()
    view = links.BodyLink.view

    def slow(self: links.BodyLink, bucket: Bucket, where: dict[str, Any]) -> memoryview:
        if bucket.sequence == 1:
            waiting.set()
            assert let_go.wait(20)
        return view(self, bucket, where)

    monkeypatch.setattr(links.BodyLink, "view", slow)
    before, new = run(engine), tensors_of(folders["untied-new"])
    manifest, update = begin(engine, new)
    replies: queue.Queue[Any] = queue.Queue()
    lanes = Lanes()
    lanes.submit(update, lambda: take(engine, update, 1, packed(manifest, manifest.buckets[1], new)), replies.put)
    assert waiting.wait(20)
    engine.control.abort_update(update)
    manifest, second = begin(engine, new)
    let_go.set()
    assert isinstance(replies.get(timeout=20), BadRequest)
    engine.control.abort_update(second)
    assert run(engine) == before
    lanes.close()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"])
def test_values_that_the_engines_dtype_cannot_hold_refuse_the_commit(folders: dict[str, str], name: str) -> None:
    with engine_of(folders["untied"], dtype="bfloat16") as engine:
        before, new = engine.control.digests(), {n: t.float() for n, t in tensors_of(folders["untied-new"]).items()}
        new[name].view(-1)[5] = -3.4e38  # finite in float32, infinite in bfloat16
        with pytest.raises(UpdateRefused, match=f"{name}: 1 values are not finite"):
            sync(engine, new)
        assert engine.control.digests() == before


def test_a_tied_head_alone_is_refused_and_not_dropped_in_silence(folders: dict[str, str]) -> None:
    with engine_of(folders["tied"]) as engine:
        head = {"lm_head.weight": tensors_of(folders["tied-new"])["model.embed_tokens.weight"]}
        with pytest.raises(UpdateRefused, match=r"tied to model\.embed_tokens\.weight, which must come along"):
            sync(engine, head, mode="partial")


@pytest.mark.parametrize("bad", [{"deadline_s": float("nan")}, {"deadline_s": -1.0}, {"version": -1}, {"version": 1.5}])
def test_numbers_of_an_update_are_checked_in_process_too(engine: Engine, bad: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(bad))):
        engine.control.open_update(manifest_of({}), mode="partial", **bad)
