r"""Score mathematics by rules that compute. Each runs in a child process, which can be killed, under ``cpu_limit``."""

from __future__ import annotations

import ast
import logging
import math
import operator
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Annotated, Any, NoReturn

from msgspec import Meta

from plaudit_reward.rules.answer_comparison import equal
from plaudit_reward.rules.answer_types import Bracketed, Several
from plaudit_reward.rules.answer_values import read
from plaudit_reward.rules.final_answer import (
    FinalAnswer,
    closing_brace,
    final_answer,
    final_truth,
    last_box,
    last_braced,
    other_spellings,
    text_truth,
    with_opened_thought,
)
from plaudit_reward.rules.prm800k import MATHRULER, PRIME, same_answer
from plaudit_reward.scorer import Score
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample

_AGAIN_AFTER_S = 0.1
"""Raised where Python ignores exceptions (a finaliser, a callback of the garbage collector) it has to be raised again;
not so soon that a block which it ends has not been left by then."""

_KILLED_AFTER_S = 1.0
"""CPU seconds beyond its limit after which the kernel ends the process (``rule.KILLED_BY``)."""


class OutOfTimeError(BaseException):
    """The computation used up its CPU seconds. Not an ``Exception``, because mathematical libraries catch those."""


def shown_within(limit_s: float, claim: Callable[[], bool]) -> bool:
    """Return True if the claim is shown within ``limit_s`` CPU seconds."""
    try:
        with cpu_limit(limit_s):
            return claim()
    except OutOfTimeError:
        return False


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Raise ``OutOfTimeError`` inside the block after ``limit_s`` CPU seconds of this process.

    CPU seconds, so that a busy machine does not turn right answers into wrong ones. One call into C (a huge power)
    cannot be interrupted like this; ``rule.KILLED_BY`` ends the process instead, by which the scorer knows why.
    """
    before = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, limit_s, _AGAIN_AFTER_S)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s + _KILLED_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _out_of_time(_: int, __: FrameType | None) -> NoReturn:
    raise OutOfTimeError


_MAX_EXPONENT = 1000
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MANY: dict[type[ast.expr], Callable[[list[Any]], Any]] = {ast.Tuple: tuple, ast.List: list, ast.Set: set}


def evaluate(text: str) -> Any:
    """Return the value of an expression of numbers, ``+ - * / // % **`` and brackets, or a tuple, list or set of them.

    verl calls ``eval`` here, which runs any code that the model wrote. Raises ``ValueError`` for any other text.
    """
    try:
        return _value(ast.parse(text.lstrip(" \t"), mode="eval").body)
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not arithmetic: {error}") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            a, b = _value(left), _value(right)
            if not isinstance(a, int | float) or not isinstance(b, int | float):
                raise ValueError("arithmetic works on numbers only")
            if isinstance(sign, ast.Pow) and abs(b) > _MAX_EXPONENT:
                raise ValueError(f"the exponent {b} is too large")
            return _BINARY[type(sign)](a, b)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return _MANY[type(node)]([_value(item) for item in items])
    raise ValueError(f"{type(node).__name__} is not arithmetic")


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
    """Choose how answers are compared."""

    percentages: bool = True
    """A hundredth and the hundredfold of the truth are also right."""
    tolerance: float = 1e-4
    """The largest difference of equal numbers, relative to the larger one."""
    symbolic: bool = False
    """Expressions are compared by Math-Verify."""


def math_equal(given: str, truth: str, how: ComparisonOptions) -> bool:
    r"""Return True if ``given`` equals the answer ``truth`` like ToRA's grader: by text, by number, part by part.

    Gou et al. 2024, "ToRA: A Tool-Integrated Reasoning Agent for Mathematical Problem Solving". Numbers are the same
    when they differ by at most 1e-4 of the larger; verl's version also accepts a hundredth and the hundredfold of the
    truth (percentages). With a ``\pi`` in either, both π and 3.14 are tried, and the arithmetic around it is evaluated.
    An answer that cannot be parsed is wrong.

    The last step, comparison as expressions, never succeeds in verl 0.9.1: its ``symbolic_equal`` uses a decorator as a
    context manager, which raises, and takes the error for "cannot be parsed". Math-Verify does that step on request.
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
        if isinstance(truth, str) and (
            given.strip().lower() == truth.strip().lower() or given.replace(" ", "") == truth.replace(" ", "")
        ):
            return True
    given_number, truth_number = _number(given), _number(truth)
    if given_number is not None and truth_number is not None:
        truths = (truth_number / 100, truth_number, truth_number * 100) if how.percentages else (truth_number,)
        return any(math.isclose(item, given_number, rel_tol=how.tolerance) for item in truths)
    if not given and given not in (0, False):
        return False
    given, truth = _interval(str(given).strip()), str(truth).strip()
    if _same_without_brackets(given, truth) or _same_tuple(given, truth, how):
        return True
    if "," in given and "," in truth:
        given_parts, truth_parts = given.split(","), truth.split(",")
        if len(given_parts) == len(truth_parts):
            return _same_parts([part.strip() for part in given_parts], [part.strip() for part in truth_parts], how)
    return _same_matrix(given, truth, how) or (how.symbolic and verified(f"\\boxed{{{given}}}", truth))


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


def _number(answer: Any) -> float | None:
    text = str(answer)
    try:
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


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


def math_verify(
    sample: Sample,
    *,
    limit_seconds: Annotated[float, Meta(gt=0)] = 30.0,
    strict: bool = True,
    float_rounding: Annotated[int, Meta(ge=0)] = 6,
    precision: Annotated[int, Meta(ge=1)] = 15,
    units: bool = True,
    last_box_wins: bool = False,
) -> float:
    """Return 1.0 when Math-Verify finds the ground truth and the response's answer to be the same expression, else 0.0.

    The results are those of verl's ``math_verify``: the ground truth is read as LaTeX in a box, the response as LaTeX
    or as a plain expression, and any pair of what was found may agree. A comparison that takes longer than its limit is
    0, as in verl.

    Args:
        sample: its ground truth is the answer, as LaTeX without a box.
        limit_seconds: CPU seconds of one comparison.
        strict: names of variables count, and sets are no tuples.
        float_rounding: decimal places to which numbers are rounded before they are compared.
        precision: digits to which expressions are evaluated.
        units: leave units out.
        last_box_wins: the last box alone is the answer, where the response has one.
    """
    truth = text_truth(sample.ground_truth, "math_verify")
    inside = last_box(sample.response) if last_box_wins else None
    response = sample.response if inside is None else f"\\boxed{{{inside}}}"
    claim = partial(
        verified, response, truth, strict=strict, float_rounding=float_rounding, precision=precision, units=units
    )
    return 1.0 if shown_within(limit_seconds, claim) else 0.0


def verified(
    response: str, truth: str, *, strict: bool = True, float_rounding: int = 6, precision: int = 15, units: bool = True
) -> bool:
    """Return True if Math-Verify finds the truth among the response's answers; call it under ``cpu_limit``.

    Arguments as ``math_verify``; the defaults are Math-Verify's own, and verl's.
    """
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
    from math_verify.grader import verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    normal = NormalizationConfig(
        basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    latex = LatexExtractionConfig(normalization_config=normal)
    golden = parse(f"\\boxed{{{truth}}}", (latex,), parsing_timeout=None)
    given = parse(response, (ExprExtractionConfig(), latex), parsing_timeout=None)
    how = {"float_rounding": float_rounding, "numeric_precision": precision, "strict": strict}
    return bool(golden and given and verify(golden, given, **how, timeout_seconds=None))


_COMPUTED_BY_SYMPY = re.compile(r"\\(?:int|iint|oint|sum|prod|lim)(?![a-z])")


def math_answer(sample: Sample, *, limit_seconds: Annotated[float, Meta(gt=0)] = 10.0) -> Score:
    """Score mathematics: 1.0 when the response's final answer equals the ground truth, else 0.0.

    The extra ``pred`` is the answer that was found, ``reason`` says by which mark it was found and why it is right or
    wrong ("last box: 15; equal as rational numbers"). ``final_answer`` finds it, ``answer_values`` reads it,
    ``answer_comparison`` compares.

    Args:
        sample: its ground truth is the answer, in LaTeX or as plain text, or a worked solution that ends with it.
        limit_seconds: CPU seconds of one comparison; an answer not shown to be right by then is wrong.
    """
    truth = text_truth(sample.ground_truth, "math")
    try:
        with cpu_limit(limit_seconds):
            found = final_answer(sample.response)
            why = why_equal(found, truth) if found else None
        if found and not why and _COMPUTED_BY_SYMPY.search(truth + found.text):
            with cpu_limit(limit_seconds * _SYMPY_SHARE):
                why = _equal_for_sympy(found, truth)
    except OutOfTimeError:
        return Score.scored(0.0, reason=f"not shown to be equal within {limit_seconds:g} CPU seconds")
    if found is None or not found.text:
        return Score.scored(0.0, reason="the last box is empty" if found else "the response gives no final answer")
    answer = found.text[:_SHOWN]
    reason = f"{found.mark}: {answer}; {why or 'not equal to the ground truth'}"
    return Score.scored(1.0 if why else 0.0, reason=reason, pred=answer)


_SHOWN = 200


def why_equal(found: FinalAnswer, truth: str) -> str | None:
    """Return the reason for which the answer equals the truth, or None."""
    golden = final_truth(truth)
    if golden is None:
        return None
    expected = read(golden.text)
    several = any(isinstance(value, Several | Bracketed) and len(value.items) > 1 for value in expected)
    for text in (found.adjacent, *other_spellings(found)) if found.adjacent and several else other_spellings(found):
        if reason := equal(read(text), expected):
            return reason
    return None


_SYMPY_SHARE = 0.2
"""Part of the limit for sympy: a response may write a sum of a billion items."""


def _equal_for_sympy(found: FinalAnswer, truth: str) -> str | None:
    golden = final_truth(truth)
    same = golden is not None and verified(f"\\boxed{{{found.text}}}", golden.text)
    return "the same expression for Math-Verify" if same else None


_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_VERBS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def prime_math(
    sample: Sample,
    *,
    symbolic: bool = False,
    percentages: bool = True,
    tolerance: Annotated[float, Meta(ge=0)] = 1e-4,
    last_box_wins: bool = False,
    limit_seconds: Annotated[float, Meta(gt=0)] = 10.0,
) -> float:
    """Score NuminaMath: 1.0 when PRM800K's grader or ToRA's accepts the answer, else 0.0.

    The answer is the text after the last ``answer:``, ``answer is`` or ``answers are``, or in the last box. Cui et al.
    2025, "Process Reinforcement through Implicit Rewards". The results are those of verl's ``prime_math``; two flaws of
    it can be corrected: its comparison of expressions never succeeds (``symbolic``), and a hundredth and the
    hundredfold of the truth are right (``percentages``).

    Args:
        symbolic: compare expressions by Math-Verify if no other step finds them equal.
        tolerance: the largest difference of equal numbers, relative to the larger one.
        last_box_wins: the last box alone is the answer, where the response has one.
        limit_seconds: CPU seconds of each of the two graders; an answer not shown to be right by then is wrong.
    """
    truth = sample.ground_truth
    if not isinstance(truth, str | int | float) or isinstance(truth, bool):
        raise DataError(f"ground_truth is {truth!r}; prime_math needs the answer as text or number")
    inside = last_box(sample.response) if last_box_wins else None
    answer, truth = extracted_answer(sample.response) if inside is None else inside.strip(), str(truth)
    how = ComparisonOptions(percentages, tolerance, symbolic)
    graders = (partial(same_answer, answer, truth, PRIME), partial(math_equal, answer, truth, how))
    return 1.0 if any(shown_within(limit_seconds, grader) for grader in graders) else 0.0


def extracted_answer(response: str) -> str:
    """Return the response's answer; the whole response if no answer is marked."""
    for marker in _BEFORE:
        response = _behind(response, marker)
    for marker in _AFTER:
        start = response.lower().rfind(marker)
        response = response[:start].strip() if start >= 0 else response
    response = _box(response) or response
    if ". " in response:
        response = response[: response.lower().rfind(". ")].strip()
    for marker in _VERBS:
        response = _behind(response, marker)
    return response


def _behind(response: str, marker: str) -> str:
    start = response.lower().rfind(marker)
    return response[start + len(marker) :].strip() if start >= 0 else response


def _box(response: str) -> str | None:
    start = response.rfind("\\boxed")
    start = start if start >= 0 else response.rfind("\\fbox")
    end = closing_brace(response, start) if start >= 0 else None
    return None if end is None else response[response.index("{", start) + 1 : end].strip()


_FORM = ("</think>", "\\boxed{", "}")
_NO_ANSWER = "None"
"""mathruler's result for a response without a box."""


def geo3k(
    sample: Sample,
    *,
    boxed: bool = True,
    format_score: Annotated[float, Meta(ge=0, le=1)] = 0.1,
    limit_seconds: Annotated[float, Meta(gt=0)] = 10.0,
) -> Score:
    r"""Score Geometry3K: the boxed answer, and a small share for thinking first; extras ``acc``, ``format``.

    ``(1 - format_score) * right + format_score * formed``: right when PRM800K's grader finds the ground truth in the
    last ``\boxed{…}``; formed when the response is ``<think>…</think>…\boxed{…}…``. The results are those of verl's
    ``geo3k`` with ``mathruler`` 0.1.0.

    Args:
        boxed: only the box is the answer, else the whole response (verl's ``use_boxed``).
        limit_seconds: CPU seconds of the comparison; an answer that is not shown to be right by then is wrong.
    """
    truth = text_truth(sample.ground_truth, "geo3k")
    answer = sample.response
    if boxed:
        inside = last_braced(answer)
        answer = _NO_ANSWER if inside is None else inside.strip()
    right = float(shown_within(limit_seconds, partial(same_answer, answer, truth, MATHRULER)))
    formed = float(is_formed(with_opened_thought(sample)))
    return Score.scored((1.0 - format_score) * right + format_score * formed, acc=right, format=formed)


def is_formed(response: str) -> bool:
    r"""Return True if it begins with ``<think>``, and ``</think>``, ``\boxed{`` and ``}`` follow in this order."""
    if not response.startswith("<think>"):
        return False
    position = len("<think>")
    for part in _FORM:
        found = response.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True
