"""The GPU engine end to end without a GPU. One child runs all cases: Triton's interpreter is chosen for a whole process."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("interpreted_engine.py")
CASES = re.findall(r"^def (test_\w+)", PROGRAM.read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")


@pytest.fixture(scope="module")
def verdicts(interpreters: dict[str, Any]) -> dict[str, str | None]:
    out, err = interpreters["engine"].communicate(timeout=300)
    assert interpreters["engine"].returncode == 0, err[-4000:]
    return {name: problem for name, problem, _ in map(json.loads, out.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_on_the_interpreter(case: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts.get(case, "it did not run") is None, verdicts[case]
