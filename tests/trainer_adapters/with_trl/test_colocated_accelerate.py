"""Two ranks with a model that accelerate's FSDP2 has prepared, and an engine in each."""

from __future__ import annotations

from typing import Any

import colocated_runs
import pytest

pytestmark = pytest.mark.adapters


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return colocated_runs.run(tmp_path_factory.mktemp("colocated"), "accelerate")


@pytest.mark.parametrize(("mixed", "dtype"), [("no", "float32"), ("bf16", "bfloat16")])
def test_every_rank_samples_the_trainers_bits(mixed: str, dtype: str, ranks: list[dict[str, Any]]) -> None:
    colocated_runs.check_phases([found[mixed] for found in ranks], dtype)


def test_a_rank_that_does_not_come_is_waited_for_so_long(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["late"].startswith("TargetError: at generate: trainer rank 0 waited for the others (at most 5 s)")
