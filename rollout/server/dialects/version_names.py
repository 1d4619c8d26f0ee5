"""What trainers call weight versions. The engine counts them; a text is echoed and is never a key."""

from __future__ import annotations

from fastapi import Request

REMEMBERED = 1024


class VersionNames:
    """Texts by version; the last ones."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def text(self, version: int) -> str:
        """What a version was called; else its number."""
        return self._texts.get(version, str(version))

    def call(self, version: int, text: str | None) -> None:
        """None takes back what it was called before."""
        self._texts.pop(version, None)
        if text is not None:
            self._texts[version] = text
        for old in list(self._texts)[:-REMEMBERED]:
            del self._texts[old]


def names_of(request: Request) -> VersionNames:
    """Those of the server."""
    found: VersionNames = request.app.state.version_names
    return found
