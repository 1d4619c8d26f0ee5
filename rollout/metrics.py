"""Prometheus text, written by hand: counters the front keeps, and the engine's own numbers as it sends them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .live_numbers import Number, TokenLags, live_numbers

# engine stat -> (metric name, type, help). A numeric stat not named here is exported as a gauge rollsync_engine_<stat>.
ENGINE_METRICS = {
    "running": ("rollsync_running_samples", "gauge", "Samples running."),
    "waiting": ("rollsync_waiting_samples", "gauge", "Samples waiting for admission."),
    "free_blocks": ("rollsync_kv_blocks_free", "gauge", "KV blocks free."),
    "total_blocks": ("rollsync_kv_blocks", "gauge", "KV blocks in the pool."),
    "cached_blocks": ("rollsync_kv_blocks_cached", "gauge", "KV blocks holding a reusable prefix."),
    "prompt_tokens": ("rollsync_prompt_tokens_total", "counter", "Prompt tokens of accepted requests."),
    "cached_tokens": ("rollsync_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    "cut_prefills": ("rollsync_cut_prefills_total", "counter", "Pieces of prefills that a step had no room to finish."),
    "preemptions": ("rollsync_preemptions_total", "counter", "Samples preempted and recomputed."),
    "nonfinite": ("rollsync_nonfinite_logits_total", "counter", "Samples ended because their logits were not finite."),
    "faults": ("rollsync_sample_faults_total", "counter", "Samples ended by an exception of their own."),
    "generated_tokens": ("rollsync_generated_tokens_total", "counter", "Tokens sampled, those of unfinished samples included."),
    "finished": ("rollsync_engine_samples_finished_total", "counter", "Samples the engine finished by itself."),
    "aborted": ("rollsync_engine_samples_aborted_total", "counter", "Samples aborted."),
    "steps": ("rollsync_steps_total", "counter", "Engine steps."),
    "fed_tokens": ("rollsync_fed_tokens_total", "counter", "Tokens fed to the model, recomputed ones included."),
    "trace_lines": ("rollsync_trace_lines_total", "counter", "Samples written to the trace."),
    "trace_dropped_lines": ("rollsync_trace_dropped_lines_total", "counter", "Samples left out of the trace, by a slow or full disk."),
    "plan_s": ("rollsync_step_plan_seconds_total", "counter", "Seconds spent planning steps."),
    "execute_s": ("rollsync_step_execute_seconds_total", "counter", "Seconds spent in forward passes."),
    "update_s": ("rollsync_step_update_seconds_total", "counter", "Seconds spent taking in results."),
}


NOT_GAUGES = ("weight_version",)
"""shown among the numbers of live weights"""


@dataclass(slots=True)
class FrontCounters:
    """What the front counts as messages pass."""

    samples: Counter[str] = field(default_factory=Counter)
    """finished samples by finish_reason"""
    output_tokens: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    """refused prompts by error code"""
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """HTTP responses by (route, status)"""
    lags: TokenLags = field(default_factory=TokenLags)

    def finished(self, output: dict[str, Any], version: int) -> None:
        """Count a finished sample; `version` is that of the weights in use."""
        self.lags.count(output.get("weight_versions") or (), version)
        self.samples[output["finish_reason"]] += 1
        self.output_tokens += int(output["token_ids"]["shape"][0])

    def rejected(self, code: str) -> None:
        self.rejections[code] += 1


def _sample(name: str, value: float, **labels: str) -> str:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    inner = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {float(value)!r}" if inner else f"{name} {float(value)!r}"


def _family(name: str, kind: str, text: str, samples: Iterable[str]) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]


def _engine_lines(stats: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for key, value in stats.items():
        if key in NOT_GAUGES or isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            continue
        name, kind, text = ENGINE_METRICS.get(key, (f"rollsync_engine_{key}", "gauge", f"Engine statistic {key}."))
        lines += _family(name, kind, text, [_sample(name, value)])
    return lines


def _live_lines(numbers: Iterable[Number]) -> list[str]:
    by_metric: dict[str, list[Number]] = {}
    for number in numbers:
        by_metric.setdefault(number.metric, []).append(number)
    return [
        line
        for name, group in by_metric.items()
        for line in _family(name, group[0].kind, group[0].help, [_sample(name, n.value, **n.labels) for n in group])
    ]


def own_memory_bytes() -> int:
    """Resident memory of this process; 0 where /proc is missing."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def render(front: FrontCounters, stats: dict[str, Any], engine_memory: dict[str, int], live: bool, ready: bool) -> str:
    """The whole /metrics page."""
    lines = _family("rollsync_up", "gauge", "1 while the engine's loop moves or idles.", [_sample("rollsync_up", live)])
    lines += _family("rollsync_ready", "gauge", "1 while requests are served.", [_sample("rollsync_ready", ready)])
    name = "rollsync_samples_finished_total"
    lines += _family(name, "counter", "Finished samples.", [_sample(name, n, finish_reason=r) for r, n in sorted(front.samples.items())])
    name = "rollsync_prompts_rejected_total"
    lines += _family(name, "counter", "Refused prompts.", [_sample(name, n, code=c) for c, n in sorted(front.rejections.items())])
    name = "rollsync_http_responses_total"
    rows = [_sample(name, n, route=r, status=str(s)) for (r, s), n in sorted(front.responses.items())]
    lines += _family(name, "counter", "HTTP responses.", rows)
    name = "rollsync_output_tokens_total"
    lines += _family(name, "counter", "Tokens of finished samples.", [_sample(name, front.output_tokens)])
    name = "rollsync_process_resident_bytes"
    rows = [_sample(name, own_memory_bytes(), process="front"), _sample(name, engine_memory.get("rss", 0), process="engine")]
    lines += _family(name, "gauge", "Resident memory.", rows)
    return "\n".join(lines + _engine_lines(stats) + _live_lines(live_numbers(stats, front.lags))) + "\n"
