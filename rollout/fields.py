"""Names of fields, and the docstring under each field of a dataclass: help texts and the OpenAPI schema come from it."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """" (did you mean X?)" for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def is_message(value: Any) -> bool:
    """Whether a prompt is one message of a chat, which was meant to be a list of them."""
    return isinstance(value, dict) and "role" in value and not value.keys() & {"token_ids", "text", "messages"}


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows its annotation in the source of `cls`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for here, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[here.target.id] = inspect.cleandoc(after.value.value).strip()
    return docs
