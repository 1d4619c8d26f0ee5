"""O2: OpenRLHF's own SamplesGenerator and executors, over Ray, with engines of Rollsync."""

from __future__ import annotations

from typing import Any

import pytest
from openrlhf_helpers import STAND_INS, make_generator, start

pytestmark = pytest.mark.adapters


@pytest.mark.parametrize("agent", [None, "two_turns.py"])
def test_samples(cluster: Any, folder: str, tokenizer: Any, agent: str | None) -> None:
    engines = start(folder, 2, agent_func_path=agent and str(STAND_INS / agent))
    generator = make_generator(tokenizer, engines)
    rows, _, consumed, exhausted = generator.generate_samples(max_len=64, max_new_tokens=8, temperature=0.7, top_p=1.0)
    assert (len(rows), consumed, exhausted) == (4, 2, False)
    assert rows[0].rollout_log_probs.shape == rows[0].action_mask.shape
