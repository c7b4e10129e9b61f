"""Judge the output of a program's process, which may be forged: pure functions of bytes and the row's own text."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any, Literal

from plaudit_reward.code.compare import equals, same_output, same_result

OutputForm = Literal["printed", "result", "literals", "printed beside", "same text"]
"""The form of the output: printed text; a function's result; answers to an assert's calls, compared with literals; the
printed text beside such answers; printed text that must be the same except for final line ends (Sandbox Fusion)."""


def judge(form: OutputForm, written: bytes, expected: str) -> bool:
    """Return True when a program wrote what is expected; never raises for what a program can write."""
    try:
        return _JUDGES[form](written, expected)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, MemoryError):
        return False


def _literals(written: bytes, expected: str) -> bool:
    answers = _answers(written)["answers"]
    return all(
        "value" in answers[number] and equals(answers[number]["value"], ast.literal_eval(source))
        for number, source in json.loads(expected)
    )


def _answers(written: bytes) -> Any:
    return json.loads(written)


def _same_text(written: bytes, expected: str) -> bool:
    return written.decode("utf-8", "surrogatepass").rstrip("\n") == expected.rstrip("\n")


_JUDGES: dict[OutputForm, Callable[[bytes, str], bool]] = {
    "printed": lambda written, expected: same_output(written.decode("utf-8", "replace"), expected),
    "result": lambda written, expected: same_result(json.loads(written), expected),
    "literals": _literals,
    "printed beside": lambda written, expected: same_output(_answers(written)["printed"], expected),
    "same text": _same_text,
}
