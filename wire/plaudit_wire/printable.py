"""Make untrusted text and values (a run's name, a response, a user's error message) safe to print on a terminal."""

from __future__ import annotations

import sys
from typing import Any, Final

MOST_SHOWN_CHARACTERS: Final = 60
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, *, keep: str = "") -> str:
    """Replace control characters, which could move the cursor, change the title or answer for the user.

    Escape sequences, line ends, bidirectional controls and lone surrogates are among them, unless ``keep`` has them.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _REPLACEMENT for each in text)


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """Print lines that may hold text of any origin: a response, a reason, a path. Only their line ends act."""
    print(printable(text, keep="\n\t"), file=sys.stderr if to_stderr else sys.stdout)


def type_name(value: Any) -> str:
    """Return the name of a value's type, as it was given: a metaclass may have a ``__name__`` of its own."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def shown(value: Any) -> str:
    """Return a value for a message, shortened and safe to print."""
    try:
        text = repr(value)
    except Exception:  # the value's own code
        text = f"a {type_name(value)}"
    text = printable(text)
    return text if len(text) <= MOST_SHOWN_CHARACTERS else text[: MOST_SHOWN_CHARACTERS - 1] + "…"
