"""Rewards of one group's samples, by the functions a trainer was given, and the advantages that follow from them."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..rollout.errors import describe
from .errors import TargetError

RewardFunc = Callable[..., Any]


class LateRewards(TargetError):
    """Nothing is wrong but that functions took too long: another group may do better."""


class _Late(Exception):
    """The deadline passed, which a function's own TimeoutError does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of the samples of a group, in order."""

    rewards: list[float]
    """weighted sums; NaN where no function gave any"""
    advantages: list[float]
    """(reward - mean) / (std + 1e-8), as TRL's asynchronous trainers have it; 0 where there is no reward"""
    by_func: dict[str, list[float]]
    """NaN where a function gave None"""
    mean: float
    std: float


async def score(
    funcs: Sequence[RewardFunc], weights: Sequence[float], columns: Mapping[str, list[Any]], count: int, timeout_s: float
) -> Scores:
    """All functions at once: those that are `async` on this loop, the others each in a thread.

    Args:
        columns: what each is called with: prompts, completions, completion_ids, and the dataset's own.
        count: of samples.

    Raises:
        LateRewards: no function failed, but some took longer than `timeout_s`.
        TargetError: a function failed, or gave other than `count` finite numbers (NaN and None are no reward). All are named.
    """
    tried = await asyncio.gather(*(_called(func, columns, timeout_s) for func in funcs), return_exceptions=True)
    by_func: dict[str, list[float]] = {}
    problems, late = [], []
    for func, found in zip(funcs, tried, strict=True):
        name = func_name(func)
        if isinstance(found, _Late):
            late.append(f"the reward function {name} gave nothing within {timeout_s:g} s")
        elif isinstance(found, BaseException):  # a CancelledError too is its own: if we are cancelled, `gather` raises
            problems.append(f"the reward function {name} failed: {describe(found)}")
        else:
            try:
                by_func[_fresh(name, by_func)] = _numbers(found, count)
            except ValueError as error:
                problems.append(f"the reward function {name} gave {error}")
    if problems:
        raise TargetError(problems + late) from next((e for e in tried if isinstance(e, Exception)), None)
    if late:
        raise LateRewards(late)
    return _weighed(by_func, weights, count)


def _numbers(found: Any, count: int) -> list[float]:
    """ValueError with what was given in place of `count` numbers, None among them."""
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping | Set):
        raise ValueError(f"{found!r:.100} for {count} samples")
    try:
        values = list(found)
    except Exception as error:  # a tensor without dimensions, for instance, or a generator that fails
        raise ValueError(f"{found!r:.100} for {count} samples: {describe(error)}") from error
    if len(values) != count:
        raise ValueError(f"{values!r:.100} for {count} samples")
    try:
        if any(isinstance(v, str | bytes) for v in values):
            raise TypeError
        numbers = [math.nan if v is None else float(v) for v in values]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{values!r:.100}, which are not all numbers") from None
    if any(map(math.isinf, numbers)):
        raise ValueError(f"{values!r:.100}, which are not all finite")
    return numbers


def _weighed(by_func: dict[str, list[float]], weights: Sequence[float], count: int) -> Scores:
    rewards = []
    for i in range(count):
        given = [(w, column[i]) for w, column in zip(weights, by_func.values(), strict=True) if not math.isnan(column[i])]
        rewards.append(sum(w * value for w, value in given) if given else math.nan)
    known = [r for r in rewards if not math.isnan(r)]
    mean = sum(known) / len(known) if known else math.nan
    std = math.sqrt(sum((r - mean) * (r - mean) for r in known) / len(known)) if known else math.nan
    if known and not math.isfinite(std):
        raise TargetError([f"the rewards {rewards!r:.100} are too large to be compared"])
    advantages = [0.0 if math.isnan(r) else (r - mean) / (std + 1e-8) for r in rewards]
    return Scores(rewards=rewards, advantages=advantages, by_func=by_func, mean=mean, std=std)


def check_funcs(funcs: Any, weights: Any) -> tuple[list[RewardFunc], list[float]]:
    """A list of functions and one weight for each. TypeError, ValueError: they are not."""
    found = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
    if wrong := [f for f in found if not callable(f)]:
        raise TypeError(f"reward_funcs must be functions, got {wrong[0]!r:.100}")
    if not found:
        raise ValueError("reward_funcs is empty: without a reward there is no advantage")
    weighed = [1.0] * len(found) if weights is None else [float(w) for w in weights]
    if wrong_weights := [w for w in weighed if not math.isfinite(w)]:
        raise ValueError(f"reward_weights must be finite, got {wrong_weights[0]}")
    if len(weighed) != len(found):
        raise ValueError(f"reward_weights has {len(weighed)} for {len(found)} reward functions ({', '.join(map(func_name, found))})")
    return found, weighed


def func_name(func: RewardFunc) -> str:
    """As a metric calls it."""
    inner = getattr(func, "func", func)  # of functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))


def _fresh(name: str, taken: Mapping[str, Any]) -> str:
    number = 1 + sum(known == name or known.startswith(f"{name}#") for known in taken)
    return name if number == 1 else f"{name}#{number}"


async def _called(func: RewardFunc, columns: Mapping[str, list[Any]], timeout_s: float) -> Any:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None)):  # noqa: B004
                return await func(**columns)
            return await in_thread(lambda: func(**columns))
    except TimeoutError as error:
        if deadline.expired():
            raise _Late from error
        raise


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """What `work` gives, computed in a thread that keeps neither a stop nor the interpreter's end waiting, should it hang."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:  # it is raised where the future is awaited
            error = caught if not isinstance(caught, StopIteration | SystemExit | KeyboardInterrupt) else RuntimeError(describe(caught))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="rollsync reward", daemon=True).start()
    return future
