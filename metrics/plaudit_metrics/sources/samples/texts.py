"""Cut long texts, so that one sample with megabytes of output costs a reader and a browser little."""

from __future__ import annotations

import msgspec

MOST_CHARACTERS = 4_000_000
"""Characters of one sample that are returned when all of it is asked for."""


class CutText(msgspec.Struct, frozen=True):
    """The beginning of a text."""

    text: str
    characters: int
    """The length of the whole text; larger than that of ``text`` where it was cut."""


class TextBudget:
    """Cut the texts of one sample: each to ``characters``, all together to ``MOST_CHARACTERS``."""

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self._left = MOST_CHARACTERS

    def cut(self, text: str) -> CutText:
        """Return the beginning of a text."""
        kept = text[: min(self._characters, self._left)]
        self._left -= len(kept)
        return CutText(kept, len(text))
