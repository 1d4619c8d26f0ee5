"""What may be asked of an engine that a loop owns: the commands by name, those that run beside its thread, and how outputs leave it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..errors import BadRequest, RollsyncError, describe
from ..fields import did_you_mean
from .columns import VALUE_COLUMNS, empty_output
from .control import Control
from .types import RolloutRequest, SampleOutput

log = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the loop needs of an engine (`engine.Engine`, or a stand-in in tests)."""

    @property
    def has_work(self) -> bool: ...
    def add_request(self, request: RolloutRequest) -> Any: ...
    def abort(
        self,
        request_id: str | None = None,
        *,
        group: str | None = None,
        session: str | None = None,
        all: bool = False,
        reason: str = ...,
    ) -> list[SampleOutput]: ...
    def step(self) -> list[SampleOutput]: ...
    def poll(self) -> list[SampleOutput]:
        """Between two steps: carry out what time or a command brought about. Final outputs it caused."""

    def next_deadline(self) -> float | None:
        """time.monotonic() at which `poll` has work even if nothing comes in."""

    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Sink(Protocol):
    """Where the loop reports to. Called on the loop's thread; must not block. What it raises ends at most the request it was about."""

    def ready(self, engine: Any) -> None: ...
    def failed(self, error: BaseException) -> None:
        """The engine could not be built."""

    def outputs(self, outputs: list[SampleOutput]) -> None:
        """Take all of them, or raise and take none."""

    def rejected(self, request_id: str, error: RollsyncError) -> None: ...
    def stats(self, stats: dict[str, Any]) -> None: ...
    def dead(self, words: str) -> None:
        """A step raised; every waiter has lost its request."""


Reply = Callable[[Any], None]
"""called with the verb's value, or with the exception it raised"""


def deliver(engine: EngineLike, sink: Sink, outputs: list[SampleOutput]) -> None:
    """Hand outputs to the sink. One that it cannot take ends its request with an error; the others go their way."""
    try:
        sink.outputs(outputs)
        return
    except Exception:  # whose it was shows one by one
        pass
    ended: set[str] = set()
    for output in outputs:
        if output.request_id in ended and not output.finished:
            continue
        try:
            sink.outputs([output])
        except Exception as error:
            log.error("an output of request %r could not be sent", output.request_id, exc_info=error)
            lost = [output] if output.finished else engine.abort(output.request_id, reason="an output could not be sent")
            ended.update(o.request_id for o in lost)
            for o in lost:
                columns = [name for name in VALUE_COLUMNS if getattr(o, name) is not None]
                ends = {"seed": o.seed, "finish_reason": "error", "error": describe(error)}
                report(sink.outputs, [empty_output(o.request_id, o.sample_index, columns, **ends)])


def report(call: Callable[..., None], *args: Any) -> bool:
    """Call a sink's or a caller's function; what it raises is logged, and ends nobody's requests."""
    try:
        call(*args)
    except Exception as error:
        log.error("a report of the engine's loop failed", exc_info=error)
        return False
    return True


def _abort(
    engine: EngineLike,
    sink: Sink,
    *,
    request_ids: Iterable[str] | None = None,
    request_id: str | None = None,
    group: str | None = None,
    session: str | None = None,
    all: bool = False,
    reason: str = "aborted",
) -> dict[str, Any]:
    ids = [request_id] if request_ids is None else request_ids
    outputs = [o for i in ids for o in engine.abort(i, group=group, session=session, all=all, reason=reason)]
    value = {"samples": len(outputs), "request_ids": sorted({o.request_id for o in outputs})}
    if outputs:
        deliver(engine, sink, outputs)  # from here on they are the sink's
    return value


def _status(engine: EngineLike, sink: Sink) -> dict[str, Any]:
    return engine.stats()


class Later:
    """What a verb returns whose answer comes when it is true; `poll` calls `reply`."""

    def __init__(self) -> None:
        self.reply: Reply = lambda value: None


def _pause(engine: Any, sink: Sink, **args: Any) -> Any:
    later = Later()
    told = engine.control.pause(**args, reply=lambda value: later.reply(value))
    return later if told["draining"] else told


def _controlled(name: str) -> Callable[..., Any]:
    """A verb that is a method of `Control`, with its arguments."""

    def verb(engine: Any, sink: Sink, **args: Any) -> Any:
        return getattr(engine.control, name)(**args)

    return _takes(verb, name)


def _takes(verb: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give `verb` the signature of a method of `Control`, by which a caller's arguments are checked."""
    own = list(inspect.signature(verb).parameters.values())[:2]
    method = [p for p in inspect.signature(getattr(Control, name)).parameters.values() if p.name not in ("self", "reply")]
    verb.__signature__ = inspect.Signature([*own, *(p.replace(kind=p.KEYWORD_ONLY) for p in method)])  # type: ignore[attr-defined]
    return verb


def _open_update(engine: Any, sink: Sink, **args: Any) -> Any:
    return engine.control.open_update(**args).status()


def _reset_prefix_cache(engine: Any, sink: Sink) -> dict[str, Any]:
    return {"changed": (dropped := engine.reset_prefix_cache()) > 0, "blocks": dropped}


VERBS: dict[str, Callable[..., Any]] = {
    "abort": _abort,
    "status": _status,
    "pause": _takes(_pause, "pause"),
    "resume": _controlled("resume"),
    "renew_lease": _controlled("renew_lease"),
    "revoke_lease": _controlled("revoke_lease"),
    "sleep": _controlled("sleep"),
    "wake": _controlled("wake"),
    "state": _controlled("status"),
    "open_update": _takes(_open_update, "open_update"),
    "commit_update": _controlled("commit_update"),
    "abort_update": _controlled("abort_update"),
    "reset_prefix_cache": _reset_prefix_cache,
}
"""the commands; each runs between two steps on the thread that owns the engine"""
READS = ("status", "state")
"""commands that change nothing"""

ASIDE = {
    "chunk": "take_chunk",
    "extend": "extend_update",
    "digests": "digests",
    "shards": "shards",
    "update_status": "update_status",
    "bind_group": "groups.bind",
    "join_group": "groups.join",
    "leave_group": "groups.leave",
    "groups": "groups.status",
    "weight_values": "weight_values",
}
"""methods of `Control` that may wait or take long, or must not wait for a step: they run on a lane beside the engine's thread"""


def call_verb(verb: Callable[..., Any], engine: EngineLike, sink: Sink, args: dict[str, Any]) -> Any:
    """Run a command. BadRequest if it does not take these arguments: a TypeError that it raises itself is not the caller's."""
    takes = [name for name, p in inspect.signature(verb).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in args:
        if name not in takes:
            known = ", ".join(takes) or "none"
            raise BadRequest(f"{name} is not an argument of this command{did_you_mean(name, takes)} (known: {known})", field=name)
    return verb(engine, sink, **args)
