r"""Compare two mathematical answers like ToRA's grader: by text, by number, part by part.

Gou et al. 2024, "ToRA: A Tool-Integrated Reasoning Agent for Mathematical Problem Solving". Numbers are the same when
they differ by at most 1e-4 of the larger; verl's version also accepts a hundredth and the hundredfold of the truth
(percentages). ``\pi`` becomes a number and the arithmetic around it is evaluated.

The last step, comparison as expressions, never succeeds in verl 0.9.1: its ``symbolic_equal`` uses a decorator as a
context manager, which raises, and takes the error for "cannot be parsed". Math-Verify does that step on request.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from plaudit_reward.rules.mathematics.arithmetic import evaluate

_TOLERANCE = 1e-4
_MAX_CHARACTERS = 1000
_DOLLARS = re.compile(r"\$\d+(\.\d+)?")
_PERCENT = re.compile(r"\d+(\.\d+)?(\\?)%$")
_PI = re.compile(r"\\pi")
_NO_BRACKETS = str.maketrans("", "", "{}()")
_INTERVALS = (
    (re.compile(r"^Interval\((.*)\)$"), "[{}]"),
    (re.compile(r"^Interval\.Ropen\((.*)\)$"), "[{})"),
    (re.compile(r"^Interval\.Lopen\((.*)\)$"), "({}]"),
    (re.compile(r"^Interval\.open\((.*)\)$"), "({})"),
)
_MATRIX = "\\begin{pmatrix}"
_MATRIX_ENDS = ("\\\\begin{pmatrix}", _MATRIX, "\\\\end{pmatrix}", "\\end{pmatrix}")
_UNREADABLE = (ValueError, IndexError, ArithmeticError, TypeError, RecursionError)


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of a comparison."""

    percentages: bool = True
    """A hundredth and the hundredfold of the truth are also right."""
    symbolic: bool = False
    """Expressions are compared by Math-Verify."""


def math_equal(given: str, truth: str, how: ComparisonOptions) -> bool:
    r"""Return True if ``given`` equals the answer ``truth``; never raises: an answer that cannot be parsed is wrong.

    With a ``\pi`` in either, both π and 3.14 are tried.
    """
    try:
        if "\\pi" in given or "\\pi" in truth:
            return any(_equal(given, truth, how, pi) for pi in (math.pi, 3.14))
        return _equal(given, truth, how)
    except _UNREADABLE:
        return False


def _equal(given: Any, truth: Any, how: ComparisonOptions, pi: float = math.pi) -> bool:
    given, truth = _plain(given, pi), _plain(truth, pi)
    if isinstance(given, str):
        given = given[:_MAX_CHARACTERS]
        if isinstance(truth, str) and _same_text(given, truth):
            return True
    given_number, truth_number = _number(given), _number(truth)
    if given_number is not None and truth_number is not None:
        return _same_number(given_number, truth_number, how)
    if not given and given not in (0, False):
        return False
    given, truth = _interval(str(given).strip()), str(truth).strip()
    if _same_without_brackets(given, truth) or _same_tuple(given, truth, how):
        return True
    if "," in given and "," in truth:
        given_parts, truth_parts = given.split(","), truth.split(",")
        if len(given_parts) == len(truth_parts):
            return _same_parts([part.strip() for part in given_parts], [part.strip() for part in truth_parts], how)
    return _same_matrix(given, truth, how) or (how.symbolic and _same_expression(given, truth))


def _plain(answer: Any, pi: float) -> Any:
    r"""Return the answer without dollars, percent and number base, and with the value of its ``\pi``."""
    if not isinstance(answer, str):
        return answer
    if _DOLLARS.match(answer):
        return answer[1:]
    if _PERCENT.match(answer):
        return answer.replace("\\%", "").replace("%", "")
    if "_" in answer:
        return int(float(answer.split("_")[0]))
    return _with_pi(answer, pi)


def _with_pi(answer: str, pi: float) -> Any:
    if "\\pi" not in answer:
        return answer

    def factor(found: re.Match[str]) -> str:
        before = answer[: found.start()]
        return f"*{pi}" if before[-1:].isdigit() or before.endswith("\\pi") else f"1*{pi}"

    text = _PI.sub(factor, answer)
    try:
        return evaluate(text)
    except ValueError:
        return text


def _same_text(given: str, truth: str) -> bool:
    return given.strip().lower() == truth.strip().lower() or given.replace(" ", "") == truth.replace(" ", "")


def _number(answer: Any) -> float | None:
    text = str(answer)
    try:
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


def _same_number(given: float, truth: float, how: ComparisonOptions) -> bool:
    truths = (truth / 100, truth, truth * 100) if how.percentages else (truth,)
    return any(math.isclose(item, given, rel_tol=_TOLERANCE) for item in truths)


def _interval(given: str) -> str:
    """Convert SymPy's ``Interval(0, 1)`` to ``[0, 1]``."""
    for pattern, form in _INTERVALS:
        found = pattern.match(given)
        if found:
            return form.format(found[1])
    return given


def _same_without_brackets(given: str, truth: str) -> bool:
    square = given.startswith("[") and given.endswith("]") and not truth.startswith("(")
    round_ = given.startswith("(") and given.endswith(")") and not truth.startswith("[")
    if square or round_:
        given, truth = given.strip("[]()"), truth.strip("[]()")
    return given.translate(_NO_BRACKETS) == truth.translate(_NO_BRACKETS)


def _same_tuple(given: str, truth: str, how: ComparisonOptions) -> bool:
    if not given or not truth or given[0] not in "([" or given[-1] not in ")]":
        return False
    if (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return _same_parts(given[1:-1].split(","), truth[1:-1].split(","), how)


def _same_parts(given: list[Any], truth: list[Any], how: ComparisonOptions) -> bool:
    return len(given) == len(truth) and all(_equal(a, b, how) for a, b in zip(given, truth, strict=True))


def _same_matrix(given: str, truth: str, how: ComparisonOptions) -> bool:
    """Compare a list of rows with a LaTeX matrix whose rows end with one backslash (verl's reading)."""
    if _MATRIX not in truth or not (given.startswith("[") and given.endswith("]")):
        return False
    for end in _MATRIX_ENDS:
        truth = truth.removeprefix(end).removesuffix(end)
    items = [row.split("&") if "&" in row else row for row in truth.split("\\")]
    try:
        return _same_parts(evaluate(given), items, how)
    except _UNREADABLE:
        return False


def _same_expression(given: str, truth: str) -> bool:
    from plaudit_reward.rules.mathematics.math_verify import verified

    return verified(f"\\boxed{{{given}}}", truth)
