r"""Find the answer that a response puts in a LaTeX box (``\boxed{…}``), and the ground truth that it must equal."""

from __future__ import annotations

import re
from typing import Any

from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample


def text_truth(ground_truth: Any, rule: str) -> str:
    """Return the ground truth; raise ``DataError`` if it is not text.

    verl compares the answer with a ground truth of any type, and so scores such rows 0 or ends the run.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    raise DataError(f"ground_truth is {ground_truth!r} ({type(ground_truth).__name__}); {rule} needs it as text")


_OPENED = re.compile(r"<(?:think|thinking|thought|reasoning|reason|scratchpad)>\s*\Z")


def with_opened_thought(sample: Sample) -> str:
    """Return the response, with the ``<think>`` that the chat template wrote at the end of the prompt."""
    opened = None if sample.completion else _OPENED.search(sample.prompt[-100:])
    if opened is None or sample.response.lstrip().startswith(opened[0].strip()):
        return sample.response
    return opened[0] + sample.response


_BOXED = "\\boxed{"
_BRACE = re.compile(r"[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[^a-zA-Z\s])|\\boxed\s+(?=\S)")


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the first one from ``start`` on; None if it stays open."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0 and brace[0] == "}":
            return brace.start()
    return None


def last_braced(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{…}``; None without one, or if the last one is not closed."""
    start = text.rfind(_BOXED)
    end = closing_brace(text, start) if start >= 0 else None
    return None if end is None else text[start + len(_BOXED) : end]


def last_box(text: str) -> str | None:
    r"""Return the contents of the last box of any form: ``\boxed{5}``, ``\boxed {5}``, ``\boxed 5``, ``\fbox{5}``.

    Without braces the box ends at the next blank, ``$`` or line end. None if there is no box, or it stays open.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0]
    end = closing_brace(text, start)
    return None if end is None else text[start + 1 : end]
