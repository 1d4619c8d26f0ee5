"""Updates that are disturbed between their check and their switch, or within it: what is served is one checkpoint or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live import OPTIONS, begin, finish, request, sync, tensors_of, write_versions
from rollsync import Engine
from rollsync.rollout.engine.lanes import outcome
from rollsync.rollout.errors import BadRequest, IllegalState, UpdateRefused
from rollsync.weight_sync.manifest import ChunkError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
"""one of the parts of a fused parameter"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("half"), 2)


@pytest.fixture
def engine(folders: list[str]) -> Iterator[Engine]:
    with Engine(folders[0], **OPTIONS) as found:
        yield found


def answer(engine: Engine) -> tuple[list[int], list[float]]:
    engine.add_request(request("r"))
    (output,) = finish(engine)["r"]
    return output.token_ids, output.logprobs


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_switch_that_fails_half_way_is_never_served(
    folders: list[str], apply: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank it switched some parameters; of two ranks only the other switched."""
    with Engine(folders[0], tp=tp, **OPTIONS) as engine, Engine(folders[1], **OPTIONS) as fresh:
        own: Any = engine.runner.updates if tp == 1 else engine.runner.updates._own  # type: ignore[attr-defined]
        engine.add_request(request("running"))
        engine.step()
        update = begin(engine, folders[1], apply=apply)

        def flip_some(version: int) -> None:
            if tp == 1 and apply == "staged":
                own._weights.flip(list(own._weights.specs)[:2])
            raise OSError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(own, "commit", flip_some)
            with pytest.raises(OSError, match="injected"):
                engine.control.commit_update(update)
        state = engine.control.status()
        assert state["update"] is None and state["weights"]["version"] == 0
        assert not engine.has_work and "failed half way: OSError: injected" in state["why_not_running"]
        with pytest.raises(IllegalState, match="half way"):
            engine.add_request(request("new"))
        with pytest.raises(IllegalState, match="partial"):
            engine.control.open_update(mode="partial")
        assert sync(engine, folders[1], version=3)["changed"]
        (output,) = finish(engine)["running"]
        assert output.finish_reason == "length"
        assert answer(engine) == answer(fresh)
        assert engine.runner.updates.digests() == fresh.runner.updates.digests()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_nothing_comes_in_between_the_check_and_the_switch(
    engine: Engine, folders: list[str], apply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that goes on naming tensors while another call commits: what nobody checked is not live afterwards."""
    new, before = tensors_of(folders[1])[Q_PROJ], engine.control.digests()
    update = engine.control.open_update(apply=apply).id
    told: dict[str, Any] = {"name": Q_PROJ, "dtype": "float32", "shape": list(new.shape)}
    engine.control.extend_update(update, [told], {"kind": "tensors"})
    engine.control.take_chunk(update, 0, 0, {"data": new.numpy().tobytes()})
    commit, refused = engine.runner.updates.commit, []

    def late(version: int) -> None:
        for call in (
            lambda: engine.control.extend_update(update, [{**told, "name": Q_PROJ.replace("0", "1")}], {"kind": "tensors"}),
            lambda: engine.control.take_chunk(update, 0, 0, {"data": new.numpy().tobytes()}),
        ):
            with pytest.raises(ChunkError, match="is being committed"):
                call()
            refused.append(call)
        commit(version)

    monkeypatch.setattr(engine.runner.updates, "commit", late)
    assert engine.control.commit_update(update)["mode"] == "partial" and len(refused) == 2
    after = engine.control.digests()
    assert {name for name in after if after[name] != before[name]} == {Q_PROJ}


def test_a_commit_that_is_refused_goes_on_taking_in(engine: Engine, folders: list[str]) -> None:
    new = tensors_of(folders[1])[Q_PROJ]
    update = engine.control.open_update().id
    told = {"name": Q_PROJ, "dtype": "float32", "shape": list(new.shape)}
    engine.control.extend_update(update, [told], {"kind": "tensors"})
    with pytest.raises(UpdateRefused, match="have not come"):
        engine.control.commit_update(update)
    engine.control.take_chunk(update, 0, 0, {"data": new.numpy().tobytes()})
    assert engine.control.commit_update(update)["changed"]


def test_digests_are_never_of_weights_that_an_update_in_place_writes_to(engine: Engine, folders: list[str]) -> None:
    begin(engine, folders[1], apply="in_place")
    with pytest.raises(IllegalState, match="reading the weights"):
        engine.control.digests()


def test_digests_that_a_sleep_fell_into_are_taken_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: Any = engine.runner.updates
    wanted, whole, naps = engine.control.digests(), updates.digests, []

    def digests() -> dict[str, int]:
        if naps:
            return dict(whole())
        naps.append(engine.control.sleep(["weights"]))
        engine.control.wake()
        return dict.fromkeys(whole(), 0)  # as they were meanwhile

    monkeypatch.setattr(updates, "digests", digests)
    assert engine.control.digests() == wanted and naps


def test_digests_that_a_switch_falls_into_are_not_told(engine: Engine, folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    updates: Any = engine.runner.updates
    update, commit, found = begin(engine, folders[1]), updates.commit, []

    def slow(version: int) -> None:
        commit(version)  # live, but not recorded yet
        found.append(outcome(engine.control.digests))

    monkeypatch.setattr(updates, "commit", slow)
    engine.control.commit_update(update)
    assert isinstance(found[0], IllegalState)
    with Engine(folders[1], **OPTIONS) as fresh:
        assert engine.control.digests() == fresh.control.digests()


def test_an_update_that_grows_names_its_base_too(engine: Engine, folders: list[str]) -> None:
    sync(engine, folders[1], version=7)
    with pytest.raises(IllegalState, match="builds on version 6, but version 7"):
        engine.control.open_update(base_version=6)
    assert engine.control.open_update(base_version=7).mode is None


@pytest.mark.parametrize("deadline_s", [0, float("nan"), float("inf"), "soon", True])
def test_a_deadline_that_is_none_is_refused_and_nothing_is_open(engine: Engine, deadline_s: Any) -> None:
    with pytest.raises(BadRequest, match="deadline_s must be a finite number of seconds > 0"):
        engine.control.open_update(deadline_s=deadline_s)
    engine.poll()
    assert engine.control.status()["update"] is None and engine.control.open_update().state == "open"


def test_an_update_whose_group_is_gone_is_counted_as_that(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    update = engine.control.open_update()
    monkeypatch.setattr(engine.runner.updates, "lost", lambda: "the sender left")
    engine.poll()
    assert (update.state, update.reason) == ("aborted", "the sender left")
    assert engine.stats()["updates"]["aborts"]["group"] == 1


def test_a_wake_of_what_is_not_asleep_changes_nothing(folders: list[str]) -> None:
    """Of several ranks all are woken if one could not sleep, that one too."""
    with Engine(folders[0], **OPTIONS, kernels="reference") as engine:
        before = answer(engine)
        engine.runner.wake("weights")
        engine.runner.wake("kv_cache")
        assert answer(engine) == before
        assert torch.count_nonzero(torch.tensor(before[1])) > 0
