"""Make untrusted text (a run's name, a response, a user's error message) safe to print on a terminal."""

from __future__ import annotations

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, keep: str = "") -> str:
    """Replace control characters, which could move the cursor, change the title or answer for the user.

    Escape sequences, line ends, bidirectional controls and lone surrogates are among them, unless ``keep`` has them.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _REPLACEMENT for each in text)
