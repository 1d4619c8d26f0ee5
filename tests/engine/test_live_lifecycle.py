"""Pauses, sleep and weight updates around requests in flight, as a trainer meets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import OPTIONS, PROMPT, begin, finish, request, steps, sync, versions, write_versions
from rollsync import Engine, SampleOutput
from rollsync.rollout.engine import host_memory
from rollsync.rollout.engine.host_memory import resident_bytes
from rollsync.rollout.errors import BadRequest, ConfigError, IllegalState, Overloaded, UpdateRefused, VersionUnavailable
from rollsync.rollout.selftest.model import tiny_config


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("live"), 4)


@pytest.fixture
def engine(folders: list[str]) -> Iterator[Engine]:
    with Engine(folders[0], **OPTIONS) as found:
        yield found


@pytest.fixture
def clock(engine: Engine) -> Clock:
    clock = Clock()
    engine.control._clock = engine.control.lifecycle._clock = clock
    return clock


def fresh(folder: str, **kw: Any) -> Any:
    with Engine(folder, **OPTIONS) as found:
        found.add_request(request("r", **kw))
        return [(o.token_ids, o.logprobs) for o in finish(found)["r"]]


# Weights that must not be used


def test_dummy_weights_serve_nobody_before_a_full_update(folders: list[str]) -> None:
    with Engine(folders[0], load_format="dummy", **OPTIONS) as engine:
        state = engine.control.status()
        assert not state["weights"]["valid"] and state["weights"]["reason"] == "dummy: commit a full update first"
        for how in ("queue", "refuse"):
            with pytest.raises(IllegalState, match=r"dummy: commit a full update first.*legal: .*open an update"):
                engine.add_request(request("r", on_unavailable=how))
        with pytest.raises(IllegalState, match="partial"):
            begin(engine, folders[1], mode="partial")
        sync(engine, folders[1], version=5)
        engine.add_request(request("r"))
        (output,) = finish(engine)["r"]
        assert [(output.token_ids, output.logprobs)] == fresh(folders[1]) and versions(output) == [(5, 0, 12, False)]


@pytest.mark.parametrize("how", ["discard", "torn"])
def test_requests_inside_when_weights_become_invalid_wait_for_the_next_full_ones(engine: Engine, folders: list[str], how: str) -> None:
    engine.add_request(request("r", n=3))
    outputs = steps(engine, 5)
    if how == "discard":
        engine.control.sleep(weights="discard")
        engine.control.wake()
    else:
        engine.control.abort_update(begin(engine, folders[1], apply="in_place"), "the trainer died")
    assert not engine.has_work
    with pytest.raises(IllegalState, match=how):
        engine.add_request(request("new"))
    with pytest.raises(UpdateRefused, match=r"lm_head\.weight .* is missing"):  # frozen, and nobody sends it
        frozen = engine.control.open_update(mode="full", apply="in_place" if how == "torn" else None)
        names = {"name": "model.norm.weight", "dtype": "float32", "shape": [64]}
        engine.control.extend_update(frozen.id, [names], {"kind": "tensors"})
        engine.control.commit_update(frozen.id)
    engine.control.abort_update(frozen.id)
    sync(engine, folders[2], version=3)
    samples = finish(engine, outputs)["r"]
    assert len(samples) == 3
    for output in samples:
        assert [v for v, *_ in versions(output)] == [0, 3] and not any(mixed for *_, mixed in versions(output))


# Versions a request asks for


@pytest.mark.parametrize("n", [1, 3])
def test_min_version_waits_for_its_commit_or_is_refused_at_once(engine: Engine, folders: list[str], n: int) -> None:
    with pytest.raises(VersionUnavailable, match="min_version is 2, and version 0 is served") as refused:
        engine.add_request(request("now", min_version=2, on_unavailable="refuse"))
    assert refused.value.status == 503
    engine.add_request(request("r", min_version=2, n=n, stream=True))
    engine.add_request(request("prefix", max_tokens=0, min_version=2))  # nothing to compute, and yet not before its version
    engine.add_request(request("gone", min_version=2))
    assert not engine.has_work and engine.scheduler.num_waiting == n + 2
    sync(engine, folders[1])
    assert not engine.has_work
    assert [o.abort_reason for o in engine.abort("gone", reason="deadline")] == ["deadline"]
    sync(engine, folders[2])
    finals = finish(engine)
    assert finals["prefix"][0].finish_reason == "length"
    assert [(o.token_ids, o.logprobs) for o in finals["r"]] == fresh(folders[2], n=n)
    assert all(versions(o) == [(2, 0, 12, False)] for o in finals["r"])


def test_weights_that_go_back_end_what_asked_for_newer_ones(engine: Engine, folders: list[str]) -> None:
    sync(engine, folders[1], version=4)
    engine.add_request(request("new", min_version=4))
    engine.add_request(request("any"))
    outputs = steps(engine, 5)
    assert sync(engine, folders[0], version=1, force=True)["outdated"] == 1
    finals = finish(engine, outputs)
    assert (finals["new"][0].finish_reason, finals["new"][0].abort_reason) == ("abort", "min_version")
    assert {v for v, *_ in versions(finals["new"][0])} == {4} and [v for v, *_ in versions(finals["any"][0])] == [4, 1]


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_max_version_lag_ends_a_sample_with_what_it_has(engine: Engine, folders: list[str], policy: str) -> None:
    for lag in (0, 1, 9):
        engine.add_request(request(f"lag{lag}", n=2, max_version_lag=lag, stream=True))
    engine.add_request(request("waits", tuple(range(40, 60)), max_version_lag=0, min_version=2))
    outputs = steps(engine, 4)
    lengths = []
    for lag, folder in enumerate((folders[1], folders[2])):
        lengths.append([len(engine.scheduler.requests[f"lag{lag}"].sequences[i].columns.logprobs) for i in range(2)])
        assert sync(engine, folder, kv_policy=policy)["outdated"] == 2
        outputs += steps(engine, 3)
    finals = finish(engine, outputs)
    ends = {rid: [(o.finish_reason, o.abort_reason, len(o.token_ids)) for o in found] for rid, found in finals.items()}
    assert ends["lag0"] == [("abort", "max_version_lag", length) for length in lengths[0]]
    assert ends["lag1"] == [("abort", "max_version_lag", length) for length in lengths[1]]
    assert ends["lag9"] == [("length", None, 12)] * 2 == [*ends["waits"], ends["lag9"][0]]
    assert [versions(o) for o in finals["waits"]] == [[(2, 0, 12, False)]]


@pytest.mark.parametrize("name", ["min_version", "max_version_lag", "on_unavailable"])
def test_odd_values_of_them_are_refused_by_name(name: str) -> None:
    for value in (-1, 1 << 63, "3", True, 1.0):
        with pytest.raises(BadRequest) as refused:
            request("r", **{name: value})
        assert refused.value.field == name


# While nothing runs


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_newcomers_wait_up_to_a_bound_or_are_refused(folders: list[str], state: str) -> None:
    with Engine(folders[0], max_waiting=3, **OPTIONS) as engine:
        verbs = engine.control
        verbs.pause() if state == "paused" else verbs.sleep()
        for i in range(3):
            engine.add_request(request(f"r{i}"))
        with pytest.raises(Overloaded, match=r"scheduler\.max_waiting = 3") as full:
            engine.add_request(request("r3"))
        assert full.value.status == 503
        with pytest.raises(IllegalState, match=rf"{state}.*legal: .*{'resume' if state == 'paused' else 'wake'}"):
            engine.add_request(request("now", on_unavailable="refuse"))
        verbs.resume() if state == "paused" else verbs.wake()
        assert finish(engine).keys() == {f"r{i}" for i in range(3)}
        engine.add_request(request("now", on_unavailable="refuse"))
        assert finish(engine).keys() == {"now"}


def test_a_drain_waits_for_those_it_found_and_newcomers_for_its_end(engine: Engine, clock: Clock) -> None:
    for i in range(2):
        engine.add_request(request(f"old{i}", n=2))
    reports: list[Any] = []
    assert engine.control.pause(mode="drain", owner="a", reply=reports.append)["draining"]
    assert engine.control.pause(mode="drain", owner="b", timeout_s=5.0, reply=reports.append)["draining"]
    engine.add_request(request("old0-", priority=-5))
    steps(engine, 3)
    assert {seq.request.id for seq in engine.scheduler.running} == {"old0", "old1"}
    with pytest.raises(IllegalState, match="paused by a, b"):
        engine.add_request(request("now", on_unavailable="refuse"))
    assert finish(engine).keys() == {"old0", "old1"}
    assert [(r["drained"], r["queued"], r["request_ids"]["drained"]) for r in reports] == [(4, 1, ["old0", "old1"])] * 2
    engine.control.resume("a")
    assert not engine.has_work
    engine.control.resume("b")
    assert finish(engine).keys() == {"old0-"}


@pytest.mark.parametrize("then", ["abort", "keep"])
def test_what_a_drain_has_not_finished_in_time_is_aborted_or_kept(engine: Engine, clock: Clock, folders: list[str], then: str) -> None:
    engine.add_request(request("short", max_tokens=2))
    engine.add_request(request("long"))
    reports: list[Any] = []
    engine.control.pause(mode="drain", timeout_s=5.0, at_timeout=then, reply=reports.append)
    engine.add_request(request("new"))
    outputs = steps(engine, 4)
    clock.now = 5.0
    outputs += engine.poll()
    (report,) = reports
    assert (report["drained"], report["aborted"], report["kept"]) == (1, then == "abort", then == "keep")
    assert report["request_ids"] == {"drained": ["short"], "aborted" if then == "abort" else "kept": ["long"]}
    assert not engine.has_work
    sync(engine, folders[1], kv_policy="recompute")  # what the pause froze keeps its KV, whatever the policy
    engine.control.resume()
    finals = finish(engine, outputs)
    assert finals["long"][0].finish_reason == ("abort" if then == "abort" else "length")
    assert [mixed for *_, mixed in versions(finals["long"][0])] == ([False] if then == "abort" else [False, True])
    assert versions(finals["new"][0]) == [(1, 0, 12, False)]


@pytest.mark.parametrize("other", ["pause", "sleep", "update in place"])
def test_a_drain_makes_no_step_while_something_else_holds_the_engine(engine: Engine, folders: list[str], other: str) -> None:
    engine.add_request(request("r"))
    reports: list[Any] = []
    engine.control.pause(mode="drain", reply=reports.append)
    steps(engine, 3)
    update = ""
    if other == "pause":
        assert engine.control.pause(owner="b")["kept"] == 1
    elif other == "sleep":
        engine.control.sleep()
    else:
        update = begin(engine, folders[1], apply="in_place")
    assert not engine.has_work and not engine.poll() and not reports
    if other == "pause":
        engine.control.resume("b")
    elif other == "sleep":
        engine.control.wake()
    else:
        engine.control.commit_update(update)
    assert finish(engine)["r"][0].finish_reason == "length"
    assert [r["drained"] for r in reports] == [1] and not engine.has_work


@pytest.mark.parametrize(("mode", "fate"), [("keep", "kept"), ("recompute", "recomputed"), ("abort", "aborted")])
def test_a_pause_says_what_became_of_whom(engine: Engine, mode: str, fate: str) -> None:
    engine.add_request(request("r", n=2))
    outputs = steps(engine, 4)
    engine.add_request(request("queued"))
    report = engine.control.pause(mode=mode)
    counts = {name: report[name] for name in ("kept", "recomputed", "aborted", "drained", "queued") if report[name]}
    aborts = mode == "abort"
    assert counts == {fate: 3} if aborts else {fate: 2, "queued": 3 if mode == "recompute" else 1}
    assert report["request_ids"] == {fate: ["queued", "r"] if aborts else ["r"]}
    assert engine.control.pause(mode=mode)["changed"] is False
    engine.control.resume()
    finals = finish(engine, outputs)
    assert {o.finish_reason for found in finals.values() for o in found} == {"abort" if aborts else "length"}


# Leases


def test_leases_are_listed_renewed_revoked_and_expire_with_a_count(engine: Engine, clock: Clock, folders: list[str]) -> None:
    verbs = engine.control
    verbs.pause(owner="a", ttl_s=5.0)
    verbs.pause(owner="b", mode="recompute")
    assert verbs.leases() == {
        "leases": [{"owner": "a", "mode": "keep", "expires_in_s": 5.0}, {"owner": "b", "mode": "recompute", "expires_in_s": None}]
    }
    clock.now = 4.0
    assert verbs.renew_lease("a")["lease"]["expires_in_s"] == 5.0
    clock.now = 8.0
    verbs.poll()
    assert verbs.revoke_lease("b")["changed"] and not verbs.revoke_lease("b")["changed"] and len(verbs.leases()["leases"]) == 1
    clock.now = 9.0
    verbs.poll()
    assert verbs.update_stats.leases_expired == 1 and engine.control.lifecycle.why_not_running() is None
    with pytest.raises(IllegalState, match="'a', who has none"):
        verbs.renew_lease("a")
    update = begin(engine, folders[1], apply="in_place")
    verbs.sleep(["kv_cache"])
    for owner in ("sleep", f"update {update}"):
        for verb in (verbs.pause, verbs.resume, verbs.renew_lease, verbs.revoke_lease):
            with pytest.raises(BadRequest if verb == verbs.pause else IllegalState):
                verb(owner=owner)
    verbs.resume(None)
    assert [lease["owner"] for lease in verbs.leases()["leases"]] == [f"update {update}", "sleep"]


def test_a_pause_without_a_ttl_gets_the_one_configured(folders: list[str]) -> None:
    with Engine(folders[0], default_pause_ttl_s=7.0, **OPTIONS) as engine:
        engine.control.pause()
        engine.control.pause(owner="b", ttl_s=3.0)
        assert [round(lease["expires_in_s"]) for lease in engine.control.leases()["leases"]] == [7, 3]


# The prefix cache


def test_the_cache_is_reset_under_running_requests(engine: Engine) -> None:
    for i in range(4):
        engine.add_request(request(f"long{i}", (i + 3, *PROMPT), max_tokens=40))
    outputs = steps(engine, 2)
    for i in range(20):
        engine.add_request(request(f"r{i}", max_tokens=1))
        while f"r{i}" in engine.scheduler.requests:
            outputs += engine.step()
        assert engine.reset_prefix_cache() > 0 and engine.scheduler.blocks.num_cached == 0
    assert {o.cached_tokens for o in outputs if o.request_id.startswith("r")} == {0}
    finals = finish(engine, outputs)
    assert len(finals) == 24 and {o.finish_reason for found in finals.values() for o in found} == {"length"}


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_no_prefix_of_other_weights_is_hit_also_under_a_number_used_before(engine: Engine, folders: list[str], policy: str) -> None:
    engine.add_request(request("running", max_tokens=40))
    outputs = steps(engine, 3)
    for i, folder in enumerate((folders[1], folders[0], folders[1], folders[1])):
        sync(engine, folder, version=1, force=True, kv_policy=policy)  # a resumed trainer counts from its checkpoint
        for j in range(2):
            engine.add_request(request(f"{i}.{j}", max_tokens=4))
            while f"{i}.{j}" in engine.scheduler.requests:
                outputs += engine.step()
    finals = finish(engine, outputs)
    wanted = {folder: fresh(folder, max_tokens=4) for folder in folders[:2]}
    for i, folder in enumerate((folders[1], folders[0], folders[1], folders[1])):
        first, second = finals[f"{i}.0"][0], finals[f"{i}.1"][0]
        assert [(o.token_ids, o.logprobs) for o in (first, second)] == wanted[folder] * 2
        # under recompute the running request has filled the blocks anew by then
        assert second.cached_tokens == 16 and (first.cached_tokens == 0 or policy == "recompute")


# Which weights made which token


def rescored(folder: str, output: SampleOutput) -> list[float]:
    """Logprobs that the weights of `folder` give to the tokens of a sample."""
    with Engine(folder, **OPTIONS) as found:
        (score,) = found.score([list(PROMPT)], [output.token_ids], {"temperature": 1.0})
        assert score.model_logprobs is not None
        return score.model_logprobs


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_every_token_is_of_the_weights_its_span_names(engine: Engine, folders: list[str], policy: str) -> None:
    """Three updates under requests at every stage, streams and siblings among them; `recompute` is pure to the bit."""
    outputs = []
    for i, folder in enumerate([*folders[1:], None]):
        engine.add_request(request(f"r{i}", n=2, max_tokens=24, stream=bool(i % 2), include=("model_logprobs",)))
        outputs += steps(engine, 5)
        if folder is not None:
            sync(engine, folder, kv_policy=policy)
    finals = finish(engine, outputs)
    spread = 0
    for rid, samples in finals.items():
        for output in samples:
            spans = versions(output)
            assert [start for _, start, _, _ in spans] + [24] == [0] + [end for _, _, end, _ in spans]
            spread = max(spread, len(spans))
            again = {version: rescored(folders[version], output) for version, *_ in spans}
            assert output.model_logprobs is not None
            for place, (version, start, end, mixed) in enumerate(spans):
                same = again[version][start:end] == output.model_logprobs[start:end]
                assert same or mixed, (rid, output.sample_index, spans[place])
                assert mixed == (policy == "keep" and place > 0) and (policy == "recompute" or not (mixed and same))
        deltas = [o for o in outputs if o.request_id == rid and o.sample_index == 0 and not o.finished]
        streamed = [s["version"] for d in deltas for s in d.weight_versions for _ in range(s["start"], s["end"])]
        assert streamed == [v for v, start, end, _ in versions(samples[0]) for _ in range(start, end)][: len(streamed)]
    assert spread == 4


def test_a_request_that_is_preempted_after_a_keep_is_pure_from_then_on(engine: Engine, folders: list[str]) -> None:
    engine.add_request(request("r", max_tokens=15, include=("model_logprobs",)))
    outputs = steps(engine, 5)
    sync(engine, folders[1], kv_policy="keep")
    outputs += steps(engine, 5)
    engine.control.pause(mode="recompute")
    engine.control.resume()
    (output,) = finish(engine, outputs)["r"]
    assert versions(output) == [(0, 0, 5, False), (1, 5, 10, True), (1, 10, 15, False)]
    assert output.model_logprobs is not None and rescored(folders[1], output)[10:] == output.model_logprobs[10:]


def test_prompt_logprobs_are_of_one_set_of_weights(folders: list[str]) -> None:
    """A prompt that an update finds half scored is scored anew."""
    with Engine(folders[0], **{**OPTIONS, "max_batch_tokens": 8}) as engine, Engine(folders[1], **OPTIONS) as wanted:
        prompt = tuple(range(3, 43))
        engine.add_request(request("r", prompt, max_tokens=4, include=("prompt_logprobs",)))
        outputs = steps(engine, 2)
        assert 1 < engine.scheduler.requests["r"].num_prompt_scored < len(prompt)
        sync(engine, folders[1])
        wanted.add_request(request("r", prompt, max_tokens=4, include=("prompt_logprobs",)))
        assert finish(engine, outputs)["r"][0].prompt_logprobs == finish(wanted)["r"][0].prompt_logprobs


PAUSES = {"running": None, "keep": "keep", "recompute": "recompute", "abort": "abort"}


@pytest.mark.parametrize("policy", ["recompute", "keep", "abort"])
@pytest.mark.parametrize("pause", PAUSES)
def test_a_commit_leaves_to_a_pause_what_it_froze_and_rules_what_runs(
    engine: Engine, folders: list[str], pause: str, policy: str
) -> None:
    engine.add_request(request("r"))
    outputs = steps(engine, 4)
    if PAUSES[pause] is not None:
        engine.control.pause(mode=PAUSES[pause])
        outputs += engine.poll()
    engine.add_request(request("queued", tuple(range(40, 60))))
    sync(engine, folders[1], kv_policy=policy)
    engine.control.resume()
    finals = finish(engine, outputs)
    fate = pause if pause != "running" else policy
    spans = {"recompute": [(0, 0, 4, False), (1, 4, 12, False)], "keep": [(0, 0, 4, False), (1, 4, 12, True)], "abort": [(0, 0, 4, False)]}
    assert versions(finals["r"][0]) == spans[fate]
    assert versions(finals["queued"][0]) == [(1, 0, 12, False)]  # no token of it is lost: it had none


# Where updates land


def test_where_updates_land_is_chosen_at_the_start(folders: list[str]) -> None:
    with Engine(folders[0], apply="in_place", **OPTIONS) as engine:
        with pytest.raises(BadRequest, match="started with apply = in_place") as refused:
            begin(engine, folders[1], apply="staged")
        assert refused.value.field == "apply" and engine.control.status()["weights"]["update"] is None
        begin(engine, folders[1])
        assert "paused by update" in str(engine.control.lifecycle.why_not_running())
    with Engine(folders[0], **OPTIONS) as engine:
        begin(engine, folders[1])
        assert engine.control.lifecycle.why_not_running() is None


def test_a_second_copy_that_will_not_fit_is_refused_at_the_start(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(folders[0], **OPTIONS) as engine:
        weights, kv = engine.info.weight_bytes, engine.info.kv_bytes
    monkeypatch.setattr(host_memory, "total_memory", lambda: int(1.5 * weights) + kv)
    with pytest.raises(ConfigError, match=r"2 x .* bytes of weights .* start with apply = in_place"):
        Engine(folders[0], **OPTIONS)
    Engine(folders[0], apply="in_place", **OPTIONS).close()
    monkeypatch.setattr(host_memory, "total_memory", lambda: 3 * weights)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 3 * weights)
    options = {name: value for name, value in OPTIONS.items() if name != "num_blocks"}
    pools = {}
    for apply in ("staged", "in_place"):
        with Engine(folders[0], apply=apply, **options) as engine:
            pools[apply] = engine.info.kv_bytes
    assert pools["staged"] < pools["in_place"] and 2 * weights + pools["staged"] <= 3 * weights


def test_the_second_copy_costs_nothing_before_the_first_staged_update(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(vocab_size=4096, hidden_size=512, head_dim=64)))
    grown = {}
    for apply in ("in_place", "staged"):
        before = resident_bytes()
        with Engine(str(tmp_path), load_format="random", apply=apply, **OPTIONS) as engine:
            grown[apply] = resident_bytes() - before
            weights = engine.info.weight_bytes
    assert grown["staged"] < grown["in_place"] + 0.5 * weights
