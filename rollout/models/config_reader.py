"""Reading values out of a config.json that anybody may have written: each is checked, every problem is kept, one error tells all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedModel

MAX_SIZE = 1 << 31
"""bound of every size in a config; far above any model, and small enough that products of a few fit"""
MAX_NUMBER = 1e30
"""bound of every other number; far above any model, and float32 holds it times another million"""


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or a ConfigError that names it."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(data).__name__}")
    return data


class ConfigReader:
    """Typed access to a JSON object. A key that is absent or null has its default.

    A value that cannot be used is noted in `malformed`, and the default (or a harmless value) is given in its place, so that one
    reading finds every problem. What is well-formed but not computed here is noted in `unsupported`. `check` raises for both.
    """

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = "") -> None:
        self.raw = raw
        self.where = where
        self.malformed: list[str] = []
        self.unsupported: list[str] = []
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def part(self, key: str) -> ConfigReader | None:
        """A reader of the object under `key`, which notes its problems here; None if it is absent, null or empty."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            self.bad(key, value, "an object")
        if not value or not isinstance(value, dict):
            return None
        part = ConfigReader(value, self.where, f"{self._prefix}{key}.")
        part.malformed, part.unsupported = self.malformed, self.unsupported
        return part

    def bad(self, key: str, got: Any, allowed: str) -> None:
        self.malformed.append(f"{self._prefix}{key} must be {allowed}, got {_shown(got)}")

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number in [least, most]; without a default it must be there."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                self.malformed.append(f"{self._prefix}{key} is missing")
            return least if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.bad(key, value, f"a whole number from {least} to {most}")
            return least if default is None else default
        return value

    def number(self, key: str, default: float | None = None, above: float = 0.0, most: float = MAX_NUMBER) -> float:
        """A number in (above, most]; without a default it must be there."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                self.malformed.append(f"{self._prefix}{key} is missing")
            return above + 1.0 if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:  # a NaN is not
            self.bad(key, value, f"a number above {above:g} and at most {most:g}")
            return above + 1.0 if default is None else default
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.bad(key, value, "true or false")
        return value if isinstance(value, bool) else default

    def text(self, key: str, default: str = "") -> str:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            self.bad(key, value, "a string")
        return value if isinstance(value, str) else default

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if absent."""
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.bad(key, value, "a list of strings")
            return []
        return value

    def token_ids(self, key: str) -> list[int]:
        """A token id or a list of them; empty if absent."""
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self.bad(key, value, "a token id, a list of them or null")
            return []
        return ids

    def check(self) -> None:
        """
        Raises:
            ConfigError: a value is malformed.
            UnsupportedModel: a value is well-formed but asks for what is not computed here.
        """
        problems = dict.fromkeys(self.malformed + self.unsupported)  # some values are read twice
        if problems:
            raise (ConfigError if self.malformed else UnsupportedModel)(f"{self.where}: {'; '.join(problems)}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits have no repr
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."
