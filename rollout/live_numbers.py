"""The few numbers of live weights, defined once: /metrics and wandb both show what `live_numbers` returns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LAGS = ((0, "0"), (1, "1"), (2, "2"), (3, "3"), (7, "4-7"))
"""(largest lag, label); anything beyond is "8+" """


@dataclass(frozen=True, slots=True)
class Number:
    """One value. In Prometheus "rollsync_<name>" (counters with "_total"), in wandb "rollsync/<name>/<label values>"."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        return f"rollsync_{self.name}" + ("_total" if self.kind == "counter" else "")

    @property
    def key(self) -> str:
        return "/".join(("rollsync", self.name, *self.labels.values()))


class TokenLags:
    """By how many versions the weights that drew a finished token were behind those in use when its sample ended."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.versions_behind = 0

    def count(self, spans: Iterable[Mapping[str, Any]], version: int) -> None:
        """Take in one finished sample's `weight_versions`."""
        for span in spans:
            tokens, lag = span["end"] - span["start"], max(0, version - span["version"])
            self.tokens[next((label for most, label in LAGS if lag <= most), "8+")] += tokens
            self.versions_behind += lag * tokens


def live_numbers(stats: Mapping[str, Any], lags: TokenLags) -> list[Number]:
    """The numbers, of the engine's stats as they came last and of finished samples."""
    found = [
        Number("finished_tokens_by_lag", "counter", "Tokens of finished samples by versions behind.", lags.tokens[label], {"lag": label})
        for label in [*(label for _, label in LAGS), "8+"]
    ]
    found.append(Number("finished_token_lag_versions", "counter", "Versions behind, summed over those tokens.", lags.versions_behind))
    if "weight_version" in stats:
        found.append(Number("weight_version", "gauge", "Version of the weights in use.", stats["weight_version"]))
    updates = stats.get("updates")
    return found + (_of_updates(updates) if updates else [])


def _of_updates(updates: Mapping[str, Any]) -> list[Number]:
    age_s = max(0.0, time.time() - updates["weights_since"])
    ended = {"committed": updates["commits"], **{f"aborted_{cause}": n for cause, n in updates["aborts"].items()}}
    text = "Seconds of committed updates: transfer, prepare (checks), commit (switch), total"
    return [
        Number("weight_age_seconds", "gauge", "Seconds since the weights in use became current.", age_s),
        *(Number("weight_updates", "counter", "Weight updates, by how they ended.", n, {"outcome": name}) for name, n in ended.items()),
        Number("weight_update_bytes", "counter", "Bytes of committed updates.", updates["bytes"]),
        *(Number("weight_update_seconds", "counter", f"{text}.", s, {"phase": phase}) for phase, s in updates["seconds"].items()),
        *(
            Number("weight_update_last_seconds", "gauge", f"{text}; of the last one.", s, {"phase": phase})
            for phase, s in updates["last_seconds"].items()
        ),
        Number("weight_update_stall_seconds", "counter", "Seconds in which no step could run because of an update.", updates["stall_s"]),
        Number("weight_update_last_stall_seconds", "gauge", "The same, of the last committed update.", updates["last_stall_s"]),
        Number("paused_seconds", "counter", "Seconds under a pause, a sleep's or an update's included.", updates["paused_s"]),
        Number("leases_expired", "counter", "Pauses that ended because their time was over.", updates["leases_expired"]),
    ]
