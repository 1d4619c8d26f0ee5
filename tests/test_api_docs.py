"""docs/api.md and /openapi.json say what the server does: made from its tables, complete, and valid."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi")
from rollsync.rollout.server.app import openapi
from rollsync.rollout.server.checks import decode_body
from rollsync.rollout.server.protocol import parse_rollouts

ROOT = Path(__file__).resolve().parent.parent


def generator(page: str = "api") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rollsync_docs_{page}", ROOT / "docs" / f"{page}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["api", "python"])
def test_the_page_is_that_of_the_code(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == generator(page).render(), f"run `make docs` (or python docs/{page}.py --write)"


def test_its_links_lead_somewhere_and_its_example_is_a_valid_call() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    headings = [re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.MULTILINE)]
    assert len(set(headings)) == len(headings), "two headings of one name"
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(headings)
    body = re.search(r"curl -s \S+/v1/rollouts .*? -d '(.*?)'\n", page, re.DOTALL)
    assert body is not None and parse_rollouts(decode_body(body[1].encode(), "application/json")).prompts


def test_openapi_is_valid_and_complete() -> None:
    validate = pytest.importorskip("openapi_spec_validator").validate
    found: dict[str, Any] = json.loads(json.dumps(openapi("1")))
    validate(found)
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(found)))
    assert named == found["components"]["schemas"].keys(), "schemas that nothing names, or names without a schema"
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"] and operation["tags"], where
            assert {"200", "401", "403", "500"} <= operation["responses"].keys(), where
            assert all(media["schema"] for r in operation["responses"].values() for media in r.get("content", {}).values()), where
            assert ("requestBody" in operation) == (method in ("post", "put")), where
            assert "requestBody" not in operation or {"400", "408", "413"} <= operation["responses"].keys(), where
    for name, schema in found["components"]["schemas"].items():
        for field, shown in schema.get("properties", {}).items():
            assert {"type", "$ref", "anyOf", "enum", "const"} & shown.keys(), f"{name}.{field} has no type"
            assert shown.get("description") or schema.get("additionalProperties") is not False, f"{name}.{field} is not explained"
