"""`rollsync selftest`: all yes here, and a no or an error where something is wrong or was not really tested."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from itertools import combinations, product
from typing import Any

import pytest
from rollsync.rollout import selftest
from rollsync.rollout.cli import main
from rollsync.rollout.engine.batch import BatchBuilder
from rollsync.rollout.engine.model_runner import ModelRunner
from rollsync.rollout.engine.types import StepPlan, StepResult
from rollsync.rollout.selftest import matrix
from rollsync.rollout.selftest.cells import PATHS, Cell, cells, pairwise

ROW = re.compile(r"^(sampled|re-prefilled) .*$", re.MULTILINE)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves a few cells of the matrix (the others print "-"), no further runs and no times."""

    def keep(*chosen: Cell) -> None:
        every, full = list(cells()), list(cells(PATHS, (False, True), (1, 2, 4)))
        assert len(every) == 32 == len(set(every)) and len(full) == 384 == len(set(full)) and set(every) < set(full)
        monkeypatch.setattr(selftest, "_cells", lambda *_: list(chosen))
        monkeypatch.setattr(selftest, "_run_others", lambda *_: {})
        monkeypatch.setattr(selftest, "_print_timings", lambda *_: None)

    return keep


def test_every_cell_is_a_yes(capsys: pytest.CaptureFixture[str], cancelling: dict[str, str]) -> None:
    assert main(["selftest", "--dtype", "bfloat16", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    rows = [match[0] for match in ROW.finditer(out)]
    assert len(rows) == 8 and all(row.split()[-4:] == ["yes"] * 4 for row in rows)
    assert "all the same, bit by bit" in out and re.search(r"^fingerprint  v1-k4-[0-9a-f]{12}, as", out, re.MULTILINE)
    assert not re.search(r"\bNO\b|error|WRONG", out)


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], cancelling: dict[str, str], few: Callable[..., None]) -> None:
    few(Cell(), Cell(batch=True, preempted=True, chunked=True), Cell(path="re-prefilled", cached=True, preempted=True, batch=True))
    assert main(["selftest", cancelling["qwen2"], "--dtype", "float32", "--threads", "1", "--k-shards", "2"]) == 0
    out = capsys.readouterr().out
    assert cancelling["qwen2"] in out and "v1-k2-" in out and len(ROW.findall(out)) == 8


def test_other_bits_are_a_no(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, few: Callable[..., None]) -> None:
    few(Cell(), Cell(batch=True))
    execute = ModelRunner.execute

    def nudged(self: Any, plan: StepPlan) -> StepResult:
        result = execute(self, plan)
        if len(plan.slots) > 1:
            result.entropy[0] += 2.0**-30
        return result

    monkeypatch.setattr(ModelRunner, "execute", nudged)
    assert main(["selftest", "--dtype", "float32", "--threads", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^sampled +yes +- +NO", out, re.MULTILINE)
    assert "WRONG  float32, batch: request 0 from token 48 on: entropy" in out


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Cell]]:
    """Leaves of the full matrix what covers every pair of conditions."""
    chosen = pairwise(("float32", "bfloat16"))
    monkeypatch.setattr(selftest, "_cells", lambda dtype, *_: chosen[dtype])
    monkeypatch.setattr(selftest, "_run_others", lambda *_: {})
    monkeypatch.setattr(selftest, "_print_timings", lambda *_: None)
    return chosen


def test_every_pair_of_conditions_is_a_yes(capsys: pytest.CaptureFixture[str], pairs: dict[str, list[Cell]]) -> None:
    assert main(["selftest", "--full", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"\byes\b", out)) == sum(map(len, pairs.values())) and not re.search(r"\bNO\b|error|WRONG", out)


def test_pairs_are_all_there(pairs: dict[str, list[Cell]]) -> None:
    names = [field.name for field in fields(Cell)]
    met = set()
    for dtype, chosen in pairs.items():
        for cell in chosen:
            met |= set(combinations([("dtype", dtype), *((name, getattr(cell, name)) for name in names)], 2))
    values = {"dtype": tuple(pairs), "path": PATHS, "tp": (1, 2, 4)}
    for a, b in combinations(["dtype", *names], 2):
        for x, y in product(values.get(a, (False, True)), values.get(b, (False, True))):
            assert ((a, x), (b, y)) in met


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [None, "avx2"])
def test_every_cell_of_the_full_matrix_is_a_yes(capsys: pytest.CaptureFixture[str], kernels: str | None) -> None:
    assert main(["selftest", "--full", "--threads", "1", *(["--kernels", kernels] if kernels else [])]) == 0
    out = capsys.readouterr().out
    matrix_part = out[: out.index("kernels  ", out.index("after a sync"))]
    assert len(re.findall(r"\byes\b", matrix_part)) == 768 and not re.search(r"\bNO\b|error|WRONG", out)


def test_a_row_that_reads_another_token_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, few: Callable[..., None]
) -> None:
    few(Cell(batch=True, chunked=True))
    monkeypatch.setattr(BatchBuilder, "_rows", _shifted(BatchBuilder._rows))
    assert main(["selftest", "--dtype", "float32", "--threads", "1"]) == 1
    assert "batch, chunked: request" in capsys.readouterr().out


def _shifted(rows: Callable[..., None]) -> Callable[..., None]:
    """Reads the second logits row's hidden state one token too early, in steps of several sequences."""

    def wrong(self: Any, plan: StepPlan, entry_first: Any) -> None:
        rows(self, plan, entry_first)
        if len(plan.slots) > 2 and self._arrays.num_rows > 1:
            row = self._arrays["hidden_row"]
            row[1] -= 1

    return wrong


def test_a_condition_that_did_not_occur_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, few: Callable[..., None]
) -> None:
    few(Cell(batch=True, preempted=True), Cell(chunked=True), Cell(cached=True))
    monkeypatch.setattr(Cell, "num_blocks", 64)
    monkeypatch.setattr(matrix, "CHUNK", 4096)
    assert main(["selftest", "--dtype", "float32", "--threads", "1"]) == 1
    out = capsys.readouterr().out
    assert "batch, preempted" not in out and "preempted, batch: not tested: 0 preemptions" in out
    assert "chunked: not tested: only 0 prefills were cut" in out and len(re.findall("WRONG", out)) == 2


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["selftest", "--dtype", "float16"])
    assert main(["selftest", "/nowhere/at/all"]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err
