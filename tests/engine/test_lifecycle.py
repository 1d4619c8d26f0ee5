"""The state machine alone: leases, memory, validity; every verb twice, and what is illegal changes nothing."""

from __future__ import annotations

import random

import pytest
from rollsync.rollout.engine.lifecycle import MEMORY_TAGS, PAUSE_MODES, SLEEP_OWNER, Lifecycle
from rollsync.rollout.errors import BadRequest, IllegalState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def life(clock: Clock) -> Lifecycle:
    return Lifecycle(clock)


def test_it_runs_again_only_when_nobody_holds_a_lease(life: Lifecycle) -> None:
    assert life.pause("a") and not life.pause("a") and life.pause("b")
    assert life.resume("a") and not life.resume("a")
    assert life.why_not_running() == "paused by b"
    assert life.resume("b") and life.why_not_running() is None


def test_a_lease_expires_and_can_be_renewed(life: Lifecycle, clock: Clock) -> None:
    life.pause("a", ttl_s=5.0)
    clock.now = 4.0
    life.pause("a", ttl_s=5.0)
    clock.now = 8.0
    assert life.expire() == [] and life.paused
    clock.now = 9.0
    assert [lease.owner for lease in life.expire()] == ["a"] and not life.paused


@pytest.mark.parametrize(
    ("verb", "args", "field"),
    [
        ("pause", {"mode": "stop"}, "mode"),
        ("pause", {"owner": ""}, "owner"),
        *(("pause", {"ttl_s": ttl}, "ttl_s") for ttl in (0, -1.0, float("inf"), float("nan"), True)),
        ("plan_sleep", {"tags": ["cuda_graph"]}, "tags"),
        ("plan_sleep", {"tags": None, "weights": "drop"}, "weights"),
        ("plan_wake", {"tags": ["kv"]}, "tags"),
    ],
)
def test_what_is_not_a_choice_is_refused_by_name(life: Lifecycle, verb: str, args: dict[str, object], field: str) -> None:
    before = life.status()
    with pytest.raises(BadRequest) as refused:
        getattr(life, verb)(**args)
    assert refused.value.field == field and life.status() == before


def test_discarded_weights_are_invalid_until_a_full_update(life: Lifecycle) -> None:
    for tag, state in life.plan_sleep(["weights"], "discard").items():
        life.moved(tag, state)
    with pytest.raises(IllegalState, match="wake"):
        life.open_update("u")
    for tag, state in life.plan_wake(None).items():
        life.moved(tag, state)
    assert "invalid" in str(life.why_not_running())
    life.open_update("u")
    assert life.commit("u", 4, full=False) == 1 and life.invalid
    life.open_update("v")
    assert life.commit("v", 5, full=True) == 2 and life.why_not_running() is None


def test_torn_weights_refuse_resume_until_a_full_update(life: Lifecycle) -> None:
    life.pause("me")
    life.open_update("u")
    life.close_update("u", torn="the sender died")
    with pytest.raises(IllegalState, match=r"torn.*legal: .*open an update"):
        life.resume("me")
    life.open_update("v")
    life.commit("v", 1, full=True)
    assert life.resume("me") and life.why_not_running() is None


def test_offloaded_weights_can_still_be_discarded_but_kv_has_one_way(life: Lifecycle) -> None:
    for tag, state in life.plan_sleep(None).items():
        life.moved(tag, state)
    assert life.memory == {"weights": "offloaded", "kv_cache": "discarded"}
    assert life.plan_sleep(None) == {}
    assert life.plan_sleep(None, "discard") == {"weights": "discarded"}


def test_random_walks_keep_the_facts_apart(clock: Clock) -> None:
    rng = random.Random(7)
    for _ in range(200):
        life, epoch = Lifecycle(clock), 0
        for _ in range(40):
            before = life.status()
            try:
                move = rng.randrange(8)
                if move == 0:
                    life.pause(rng.choice("ab"), rng.choice(PAUSE_MODES))
                elif move == 1:
                    life.resume(rng.choice("ab"))
                elif move in (2, 3):
                    plan = life.plan_sleep if move == 2 else life.plan_wake
                    for tag, state in plan(rng.sample(MEMORY_TAGS, rng.randint(0, 2))).items():
                        life.moved(tag, state)
                elif move == 4:
                    life.open_update("u")
                elif move == 5 and life.update:
                    epoch = life.commit("u", rng.randint(0, 9), full=rng.random() < 0.7)
                elif move == 6 and life.update:
                    life.close_update("u", torn=rng.choice([None, "test"]))
                elif move == 7:
                    life.hold(SLEEP_OWNER, "recompute")
                    life.release(SLEEP_OWNER)
            except IllegalState:
                assert life.status() == before
            assert life.epoch == epoch
            runs = not life.leases and life.invalid is None and set(life.memory.values()) == {"resident"}
            assert runs == (life.why_not_running() is None)
