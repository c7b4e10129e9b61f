r"""Check a row's ground truth for a rule.

Find the answer that a response puts in a LaTeX box (``\boxed{…}``).

DAPO's mathematics (data sources ``math_dapo``, ``math``, ``aime…``): ``Answer: …``, or else a box, at the very end.

1 when the answer equals the ground truth, else -1. Of the last 300 characters the line after the last ``Answer:``
counts, normalised as Minerva's answers are (Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with
Language Models", appendix D.1); without one, the last ``\boxed{…}`` of the last 100 characters, letter for letter.

The results are those of verl's ``math_dapo``, with its ``acc`` and ``pred`` as extras. That a box is compared letter
for letter, and is not seen when it is longer than 100 characters, is a flaw that ``normalize_boxed`` corrects.
"""

from __future__ import annotations

import re
from typing import Any

from plaudit_reward.scorer import Score
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample


def text_truth(ground_truth: Any, rule: str) -> str:
    """Return the ground truth; raise ``DataError`` if it is not text.

    verl compares the answer with a ground truth of any type, and so scores such rows 0 or ends the run.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    raise DataError(f"ground_truth is {ground_truth!r} ({type(ground_truth).__name__}); {rule} needs it as text")


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


NUM_TAIL_CHARACTERS = 300
"""Characters at the end of the response that are read."""
NUM_BOX_CHARACTERS = 100
"""Characters at the end of the response that must contain the box."""
INVALID = "[INVALID]"
"""The value of ``pred`` for a response without an answer."""
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)

_LEFT_OUT = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)

_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
        (r"(\\text\{)(.*?)(\})", r"\2"),
        (r"(\\textbf\{)(.*?)(\})", r"\2"),
        (r"(\\overline\{)(.*?)(\})", r"\2"),
        (r"(\\boxed\{)(.*)(\})", r"\2"),
        (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
        (r"(sqrt)([^{])", r"sqrt{\2}"),
    )
)


def math_dapo(sample: Sample, *, strict_boxed: bool = False, normalize_boxed: bool = False) -> Score:
    """Return 1.0 when the answer equals the ground truth, else -1.0; extras ``acc`` (1 or 0) and ``pred``.

    Args:
        strict_boxed: only a box counts (verl's ``strict_box_verify``).
        normalize_boxed: a boxed answer is searched for in all 300 characters and compared in normal form.
    """
    truth = text_truth(sample.ground_truth, "math_dapo")
    tail = sample.response[-NUM_TAIL_CHARACTERS:]
    marked = None if strict_boxed else _marked_answer(tail)
    if marked is not None:
        return _score(marked == normal_form(truth), marked)
    if normalize_boxed:
        boxed = last_braced(tail)
        boxed, truth = (None if boxed is None else normal_form(boxed)), normal_form(truth)
    else:
        boxed = last_braced(tail[-NUM_BOX_CHARACTERS:])
    if boxed is not None or strict_boxed:
        return _score(boxed == truth, boxed)
    return _score(normal_form(truth) == INVALID, INVALID)


def _score(correct: bool, answer: str | None) -> Score:
    extra: dict[str, float | str] = {"acc": float(correct)}
    if answer is not None:
        extra["pred"] = answer
    return Score.scored(1.0 if correct else -1.0, **extra)


def _marked_answer(tail: str) -> str | None:
    """Return the normal form of the text after the last ``Answer:``; None if there is none."""
    answers = _ANSWER.findall(tail)
    answer = normal_form(answers[-1]) if answers else INVALID
    return None if answer == INVALID else answer


def normal_form(answer: str) -> str:
    """Return the normal form of an answer: its right side, without units, articles, text commands and blanks."""
    answer = answer.rsplit("=", 1)[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for part in _LEFT_OUT:
        answer = answer.replace(part, "")
    for pattern, replacement in _REWRITTEN:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
