"""What all prompts of a call have in common is checked, sent and made ready for sampling once."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from rollsync import Engine, RolloutRequest, SamplingParams
from rollsync.rollout.engine import admission, batch, params
from rollsync.rollout.engine.process import serve_messages
from rollsync.rollout.errors import BadRequest
from rollsync.rollout.server.protocol import parse_rollouts

sys.path.append(str(Path(__file__).parent))
from lone_front import Front

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "dtype": "float32",
}  # fmt: skip
ALLOWED = [*range(20, 60), *range(20, 60)]


def sent_by(body: dict[str, Any]) -> list[Any]:
    """The messages to the engine that a call makes."""

    async def run() -> list[Any]:
        front = Front()
        ticket = front.service.open(parse_rollouts(body))
        await ticket.start()
        assert ticket.refused is None
        return front.sent

    return asyncio.run(asyncio.wait_for(run(), 10))


def received(messages: list[Any]) -> list[RolloutRequest]:
    """What the engine process makes of them."""
    found: list[RolloutRequest] = []
    frames = iter([msgpack.packb(message) for message in messages])
    polls = itertools.chain([True] * len(messages), [False])
    outbox: Any = SimpleNamespace(ended=SimpleNamespace(is_set=lambda: next(polls) is False), rejected=pytest.fail)
    serve_messages(SimpleNamespace(submit=found.append), outbox, SimpleNamespace(poll=lambda _: True, recv=lambda: next(frames)))  # type: ignore[arg-type]
    return found


def test_params_are_sent_once_per_call_and_shared_by_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(params, "check_ids", lambda name, ids, look=params.check_ids: looks.append(name) or look(name, ids))
    prompts = [{"token_ids": [i + 1], **({"seed": i, "max_tokens": 3} if i % 2 else {})} for i in range(8)]
    body = {"prompts": prompts, "sampling_params": {"allowed_token_ids": ALLOWED, "stop_token_ids": [7], "min_tokens": 2, "seed": 5}}
    messages = sent_by(body)
    assert looks.count("allowed_token_ids") == 1
    assert [m[0] for m in messages] == ["params", *["request"] * 8, "params"] and messages[-1][2] is None
    requests = received(messages)
    assert [(r.params.seed, r.params.max_tokens) for r in requests] == [(i, 3) if i % 2 else (5, None) for i in range(8)]
    plain = requests[0].params
    assert plain == SamplingParams(allowed_token_ids=tuple(range(20, 60)), stop_token_ids=(7,), min_tokens=2, seed=5), "each id once"
    assert all(r.params is plain for r in requests[::2]) and all(r.params.allowed_token_ids is plain.allowed_token_ids for r in requests)
    with pytest.raises(BadRequest, match=r"prompts\[0\].min_tokens"):
        parse_rollouts({**body, "prompts": [{"token_ids": [1], "max_tokens": 1}]})
    assert [m[0] for m in sent_by({**body, "prompts": prompts[:1]})] == ["request"]


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_lists_of_the_call_are_named_as_the_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"token_ids": [1]}] * 2

    async def opened(ids: list[int]) -> None:
        Front().service.open(parse_rollouts({"prompts": prompts, "sampling_params": {name: ids}}))

    with pytest.raises(BadRequest, match=rf"^sampling_params.{name}\[3\] must be a token id in \[0, 100\), got 100") as error:
        asyncio.run(opened([1, 1, 1, 100]))
    assert error.value.field == f"sampling_params.{name}[3]"
    for bound in ("rollsync.rollout.engine.params.MAX_IDS", "rollsync.rollout.server.protocol.MAX_IDS"):
        monkeypatch.setattr(bound, 3)
    with pytest.raises(BadRequest, match=f"^sampling_params.{name} must hold at most 3 ids, got 4") as error:
        asyncio.run(opened([1, 1, 1, "x"]))  # type: ignore[list-item]
    assert error.value.field == f"sampling_params.{name}"
    with pytest.raises(BadRequest, match=f"^{name} must hold at most 3 ids, got 4"):
        SamplingParams(**{name: (1, 1, 1, 1)})


def test_the_engine_makes_rules_and_mask_of_a_call_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    rules, words = admission.Rules, batch.allowed_words
    monkeypatch.setattr(admission, "Rules", lambda *args: made.append("Rules") or rules(*args))
    monkeypatch.setattr(batch, "allowed_words", lambda ids: made.append("allowed_words") or words(ids))
    shared = SamplingParams(n=2, max_tokens=3, allowed_token_ids=tuple(range(20, 60)), seed=1)
    other = SamplingParams(max_tokens=3, allowed_token_ids=(9,), seed=1)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with Engine(str(tmp_path), load_format="random", num_blocks=32, threads=1) as engine:
        for i in range(4):
            engine.add_request(RolloutRequest(request_id=f"a{i}", prompt_token_ids=(i + 1,), params=shared.varied(seed=i)))
        assert made == ["Rules"]
        for i in range(3):
            engine.add_request(RolloutRequest(request_id=f"b{i}", prompt_token_ids=(i + 1,), params=(other, shared)[i % 2]))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    assert made.count("allowed_words") == 2
    for output in outputs:
        assert set(output.token_ids) <= ({9} if output.request_id in ("b0", "b2") else set(range(20, 60)))
