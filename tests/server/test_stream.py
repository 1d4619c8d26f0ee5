"""Token streams: deltas add up to the sample, in both encodings, whatever the reader's pace."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import struct
from typing import Any

import httpx
import msgpack
import pytest
from rollsync import AsyncRolloutClient, RolloutClient, SamplingMask, SamplingParams
from rollsync.rollout import wire
from rollsync.rollout.errors import UnknownRequest
from rollsync.rollout.server.mailbox import Mailbox, join_spans, output_from
from rollsync.rollout.server.rollouts import mask_words
from rollsync.rollout.wire import MSGPACK, pack_array, unpack_array

COLUMNS = ("token_ids", "logprobs", "model_logprobs")


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return unpack_array(value) if value.keys() == {"dtype", "shape", "data"} else {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def frames(data: bytes) -> list[dict[str, Any]]:
    events, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        events.append(plain(msgpack.unpackb(data[at + 4 : at + 4 + size])))
        at += 4 + size
    return events


def server_sent(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, content = block.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['event']}"
    return events


def check_sums(events: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """The finished samples by (prompt, index); asserts that the deltas before each add up to it."""
    sums: dict[tuple[int, int], dict[str, Any]] = {}
    done = {}
    for event in events:
        if event["event"] not in ("delta", "sample"):
            continue
        sample = event["sample"]
        key = (event["prompt_index"], sample["index"])
        assert key not in done, "nothing comes after the sample"
        if event["event"] == "sample":
            done[key] = sample
            for name, value in sums.get(key, {}).items():
                assert sample[name] == value, name
            continue
        so_far = sums.setdefault(key, {**{name: [] for name in COLUMNS}, "weight_versions": []})
        assert sample["finish_reason"] is None and sample["start"] == len(so_far["token_ids"])
        for name in COLUMNS:
            so_far[name] += sample[name]
        join_spans(so_far["weight_versions"], sample["weight_versions"], 0)
    return done


@pytest.mark.parametrize("binary", [True, False])
def test_deltas_add_up_to_the_sample(server: Any, binary: bool) -> None:
    lengths = {1: 40, 2: 1, 3: 0}
    prompts = [{"token_ids": []}, *({"token_ids": [i, 7], "max_tokens": most} for i, most in lengths.items())]
    asked = {"prompts": prompts, "n": 2, "include": ["model_logprobs", "prompt_logprobs"], "stream": "tokens"}
    headers = {"Accept": MSGPACK if binary else "text/event-stream"}
    answer = httpx.post(f"{server.url}/v1/rollouts", json=asked, headers=headers)
    events = frames(answer.content) if binary else server_sent(answer.content)
    assert [e["event"] for e in (events[0], events[-1])] == ["start", "done"]
    assert sum(e["event"] == "delta" and e["prompt_index"] == 1 for e in events) > 4, "tokens came as they were made"
    assert [e["prompt_index"] for e in events if e["event"] == "error"] == [0]
    samples = check_sums(events)
    assert {key: len(s["token_ids"]) for key, s in samples.items()} == {(i, k): most for i, most in lengths.items() for k in (0, 1)}
    whole = httpx.post(f"{server.url}/v1/rollouts", json={**asked, "stream": False}).json()
    for (i, k), sample in samples.items():
        wanted = whole["results"][i]["samples"][k]
        assert sample.keys() == wanted.keys()
        for name in ("token_ids", "weight_versions", "finish_reason", "prompt_logprobs"):
            assert sample[name] == wanted[name]


def test_both_clients_give_deltas_and_re_attach(server: Any, client: RolloutClient) -> None:
    call: dict[str, Any] = {"n": 2, "sampling_params": {"max_tokens": 20}, "include": ["model_logprobs"]}

    def check(items: list[Any]) -> None:
        sums: dict[int, list[int]] = {0: [], 1: []}
        done = {}
        for item in items:
            if item.delta is not None:
                assert item.delta.start == len(sums[item.delta.index]) and item.delta.model_logprobs is not None
                sums[item.delta.index] += item.delta.token_ids
            else:
                done[item.sample.index] = item.sample.token_ids
        assert sums == done and {item.id for item in items} == {"mine"}

    check(list(client.stream([[3]], tokens=True, request_id="mine", detach_s=5, **call)))
    check(list(client.reattach_stream("mine", tokens=True)))
    whole = client.reattach("mine")
    with pytest.raises(UnknownRequest, match="theirs"):
        client.reattach("theirs")

    async def run() -> None:
        async with AsyncRolloutClient(server.url) as other:
            check([item async for item in other.stream([[3]], tokens=True, request_id="mine", detach_s=5, **call)])
            check([item async for item in other.reattach_stream("mine", tokens=True)])
            assert (await other.reattach("mine")).results == whole.results

    asyncio.run(run())


def output(start: int, end: int, **end_fields: Any) -> dict[str, Any]:
    """A fake's tokens [start, end): its version changes every 7 tokens."""
    spans: list[dict[str, int]] = []
    for t in range(start, end):
        join_spans(spans, [{"version": t // 7, "start": t - start, "end": t - start + 1}], 0)
    columns = {"token_ids": pack_array("<i4", range(start, end)), "logprobs": pack_array("<f4", [-1.0 * t for t in range(start, end)])}
    pairs = b"".join(struct.pack("<2i", t, -t) for t in range(start, end))  # a column with two values per token
    return {"sample_index": 0, **columns, "weight_versions": spans, **end_fields, "pairs": pairs}


def test_what_a_slow_reader_missed_is_one_delta() -> None:
    async def run() -> None:
        rng = random.Random(3)
        mailbox = Mailbox()
        mailbox.rewind(deltas=True)
        tokens: list[int] = []
        spans: list[dict[str, int]] = []
        end = reads = 0

        def check(delta: dict[str, Any]) -> None:
            assert delta["start"] == len(tokens)
            tokens.extend(unpack_array(delta["token_ids"]))
            assert unpack_array(delta["logprobs"]) == [-1.0 * t for t in tokens[delta["start"] :]]
            join_spans(spans, delta["weight_versions"], 0)

        for _ in range(50):
            for _ in range(rng.randrange(1, 40)):
                mailbox.put(0, output(end, end + 1))
                end += 1
            if rng.random() < 0.5:
                check((await mailbox.get())[1])
                reads += 1
        final = output(0, end + 1, finish_reason="length")
        mailbox.put(0, final)
        _, last, sent = await mailbox.get()
        assert last is final
        check(output_from(last, sent))
        assert tokens == list(range(end + 1)) and spans == final["weight_versions"] and reads < 40

    asyncio.run(run())


def test_a_reader_that_stands_still_stalls_nobody(until: Any, server: Any, client: RolloutClient) -> None:
    asked = {"prompts": [{"token_ids": [1]}], "n": 64, "sampling_params": {"max_tokens": 200}, "include": ["model_logprobs"]}
    host, port = server.url.removeprefix("http://").split(":")
    still = http.client.HTTPConnection(host, int(port))
    still.request("POST", "/v1/rollouts", json.dumps({**asked, "stream": "tokens"}), {"Accept": MSGPACK})
    until(lambda: server.running() == 64)
    assert len(client.rollouts([[5]], sampling_params={"max_tokens": 250}).results[0].samples[0].token_ids) == 250
    assert server.running() == 0
    assert len(check_sums(frames(still.getresponse().read()))) == 64
    still.close()


def test_masks_wait_joined_and_are_cut_at_tokens() -> None:
    rows = [[1], None, [*range(50, 250)], [*range(1, 300)], [7, 8], None]
    whole = SamplingMask.of(300, rows)

    def part(first: int, end: int) -> dict[str, Any]:
        ids = pack_array("<i4", list(range(first, end)))
        spans = [{"version": 0, "start": 0, "end": end - first}]
        return {"sample_index": 0, "token_ids": ids, "sampling_mask": whole[first:end].to_wire(), "weight_versions": spans}

    box = Mailbox(keep=True)
    box.rewind(deltas=True)
    for first, end in ((0, 1), (1, 4)):
        box.put(0, part(first, end))
    _, delta, _ = asyncio.run(box.get())
    assert SamplingMask.from_wire(delta["sampling_mask"]) == whole[:4]
    box.put(0, part(4, 6))
    _, delta, sent = asyncio.run(box.get())
    assert sent == 4 and SamplingMask.from_wire(delta["sampling_mask"]) == whole[4:]
    final = {**part(0, 6), "finish_reason": "length"}
    for start in range(8):
        assert SamplingMask.from_wire(output_from(final, start)["sampling_mask"]) == whole[start:]


def test_a_kept_mask_is_not_walked_through_for_every_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SamplingMask.of(300, [None if t % 3 else [*range(t, 300)] for t in range(60)])
    walked: list[int] = []
    monkeypatch.setattr(wire, "rows_end", lambda data, vocab, rows: walked.append(rows) or 0)
    box = Mailbox(keep=True)

    def read(first: int, end: int) -> None:
        ids, spans = pack_array("<i4", list(range(first, end))), [{"version": 0, "start": 0, "end": end - first}]
        assert unpack_array((delta := asyncio.run(box.get())[1])["token_ids"]) == unpack_array(ids)  # type: ignore[index]
        assert SamplingMask.from_wire(delta["sampling_mask"]) == whole[first:end]  # type: ignore[index]
        assert delta["weight_versions"] == [{**spans[0], "start": first, "end": end}]  # type: ignore[index]

    for readers in range(2):  # the second begins amid the sample, with what the first had read
        box.rewind(deltas=True)
        if readers:
            read(0, 30)
        for t in range(30 * readers, 30 * readers + 30):
            ids, spans = pack_array("<i4", [t]), [{"version": 0, "start": 0, "end": 1}]
            box.put(0, {"sample_index": 0, "token_ids": ids, "sampling_mask": whole[t : t + 1].to_wire(), "weight_versions": spans})
            read(t, t + 1)
    assert not walked


def test_the_room_of_a_mask_is_what_bounds_it() -> None:
    vocab = 49152
    for params, words in (
        ({}, 1), ({"logit_bias": {3: 1.0}}, 1), ({"top_k": 50}, 51), ({"temperature": 0.0}, 2), ({"allowed_token_ids": (1, 2, 3)}, 4),
        ({"top_p": 0.9}, 1537), ({"top_k": 40000}, 1537), ({"min_tokens": 3, "max_tokens": 9}, 1537), ({"top_k": 9, "top_p": 0.9}, 10),
    ):  # fmt: skip
        assert mask_words(SamplingParams(**params), vocab) == words, params  # type: ignore[arg-type]
