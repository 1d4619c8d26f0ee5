"""A stock model under parity against a real engine, bit for bit. The models' sums cancel, so any other order of adding shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity_cases import FAMILIES, Case, equal_tokens, lay_out
from rollsync.trainer_adapters.parity import rollsync_parity

DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_has_the_engines_bits(family: str, dtype: str, make_case: Callable[..., Case]) -> None:
    case = make_case(family, dtype)
    model = case.model()
    for how in ("right", "left", "packed"):
        batch = lay_out(case, how)
        with torch.no_grad():
            with rollsync_parity(model):
                equal, total = equal_tokens(case, batch, model(**batch.inputs).logits)
            stock, _ = equal_tokens(case, batch, model(**batch.inputs).logits)
        assert equal == total, f"{how}: {equal} of {total} logprobs are the engine's"
        assert stock < total, f"{how}: the stock model has the same bits, so this shows nothing"
