r"""Compare two mathematical answers like PRM800K's grader: by normal forms, else by SymPy.

Lightman et al. 2023, "Let's Verify Step by Step". Answers are the same when their normal forms of the MATH benchmark
are, or those made here, or when each part of a tuple is, where SymPy shows that two parts' difference is 0. Fractions
must be reduced and integers written as integers. There are two versions of it in verl's scorers, its own in
``prime_math`` and the package ``mathruler`` in ``geo3k``; ``GraderVersion`` has their differences.

Needs SymPy, so it is slow to import and to run: call it in a child process, under ``cpu_limit``.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from dataclasses import dataclass

_LEFT_OUT = ("\n", "\\!")
_SPELLINGS = (("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
_DECORATION = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_UNIT = "\\text{ "
_RATIO = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class MalformedError(ValueError):
    """The text has no normal form: it has an empty fraction or root, or two units."""


def hendrycks_form(text: str, percents: tuple[str, ...] = ("\\\\%", "\\%")) -> str:
    r"""Return the normal form by which the MATH benchmark compares LaTeX answers; raise ``MalformedError`` without one.

    Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH Dataset" (``math_equivalence``): purely
    textual, so ``\frac12``, ``1/2`` and ``0.5`` are the same, and ``1/3`` and ``2/6`` are not. verl's scorers of MATH,
    NuminaMath and Geometry3K all begin with it. ``text`` is LaTeX without ``$``; ``percents`` are the spellings of the
    percent sign that are removed.
    """
    for part in _LEFT_OUT:
        text = text.replace(part, "")
    for before, after in _SPELLINGS:
        text = text.replace(before, after)
    for part in _DECORATION:
        text = text.replace(part, "")
    value, *units = text.split(_UNIT)  # only units begin with a blank in the text
    if len(units) > 1:
        raise MalformedError(f"{text!r} has {len(units)} units")
    text = value
    for percent in percents:
        text = text.replace(percent, "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # ``k = 5`` becomes 5, for names of at most two characters
        text = sides[1]
    text = _braced_roots(text).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = _RATIO.fullmatch(text)
    return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else text


def _braced_roots(text: str) -> str:
    r"""Add braces to roots: ``\sqrt3`` becomes ``\sqrt{3}``."""
    head, *parts = text.split("\\sqrt")
    if not all(parts):
        raise MalformedError(f"{text!r} has an empty root")
    return "\\sqrt".join([head, *(part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}" for part in parts)])


def _braced_fractions(text: str) -> str:
    r"""Add braces: ``\frac12`` becomes ``\frac{1}{2}``, ``\frac1{72}`` ``\frac{1}{72}``; ``\frac{72}1`` stays."""
    head, *parts = text.split("\\frac")
    braced = [head]
    for part in parts:
        if not part:
            raise MalformedError(f"{text!r} has an empty fraction")
        if part[0] == "{":
            braced.append(part)
        elif len(part) < 2:
            return text
        else:
            rest = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            braced.append(f"{{{part[0]}}}{rest}")
    return "\\frac".join(braced)


_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_REPLACED = (
    *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")),
    *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
)
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
_DEGREES = re.compile(r"\^ *\\circ")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_SPACED_COMMA = re.compile(r",\\! *")
_MINUS = re.compile(r"- *")
_MIXED_NUMBER = re.compile(r"([0-9]) +([0-9])")
_SYMBOLS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("\u222a", "U"), ("·", "*"), ("\u00d7", "*"))
_PRM800K_RATIO = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_BRACKETS = "()[]"
_POWERS_LEFT_ALONE = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_MAX_LETTERS = 2
"""Expressions with more distinct letters count as prose and never reach SymPy, which runs what it parses as Python."""


@dataclass(frozen=True)
class GraderVersion:
    """Describe the differences between the versions of this grader."""

    percents: tuple[str, ...]
    """Spellings of the percent sign that the MATH normal form removes."""
    units: tuple[str, ...]
    compact: bool
    """Remove blanks and braces at the end."""


PRIME = GraderVersion(percents=("\\\\%", "\\%"), units=(*_UNITS, "liter"), compact=False)
"""verl's ``prime_math``."""
MATHRULER = GraderVersion(percents=("\\%", "%"), units=_UNITS, compact=True)
"""``mathruler`` 0.1.0, which verl's ``geo3k`` calls."""


def same_answer(given: str, truth: str, version: GraderVersion) -> bool:
    """Return True if ``given`` equals the answer ``truth``; never raises: an answer that cannot be parsed is wrong."""
    if _math_form(given, version) == _math_form(truth, version):
        return True
    given, truth = prm800k_form(given, version), prm800k_form(truth, version)
    if given == truth:
        return True
    if not given:
        return False
    given_parts, truth_parts = _parts(given), _parts(truth)
    if len(given_parts) != len(truth_parts):
        return False
    if len(truth_parts) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return all(_same_part(a, b) for a, b in zip(given_parts, truth_parts, strict=True))


def prm800k_form(text: str, version: GraderVersion) -> str:
    """Return the answer without units, dollars, percents and LaTeX, mixed numbers as sums, in lower case."""
    enclosed = _TEXT.search(text)
    text = enclosed["text"] if enclosed else text
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for unit in version.units:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = _DEGREES.sub("", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = _SPACED_COMMA.sub("", text)
    number = _number(text)
    if number is not None and _is_near_integer(number):
        text = str(round(number))  # ``5.0`` becomes 5
    if "\\" in text:
        text = _from_latex(text)
    text = _MIXED_NUMBER.sub(r"\1+\2", _MINUS.sub("-", text))
    if version.compact:
        text = text.replace(" ", "").replace("{", "").replace("}", "")
    text = text.lower()
    return str(int(float(text.replace(",", "")))) if _is_integer(text) else text


def _math_form(text: str, version: GraderVersion) -> str:
    text = text.strip()
    enclosed = _TEXT.search(text)
    text = enclosed["text"].strip() if enclosed else text
    try:
        return hendrycks_form(text, version.percents)
    except MalformedError:
        return text


def _is_integer(text: str) -> bool:
    number = _number(_without_thousands(text))
    return number is not None and _is_near_integer(number)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_near_integer(number: float) -> bool:
    return math.isfinite(number) and abs(number - round(number)) <= 1e-7


def _without_thousands(text: str) -> str:
    """Remove thousands separators: ``1,234`` becomes 1234; commas of tuples stay."""
    while (shorter := _THOUSANDS.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


def _from_latex(text: str) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns about every malformed answer
    latex = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    try:
        plain = str(LatexNodes2Text().latex_to_text(latex))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # raised for malformed LaTeX
        return text
    for symbol, name in _SYMBOLS:
        plain = plain.replace(symbol, name)
    return plain.strip()


def _parts(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; any other text is a single part."""
    text = _without_thousands(text)
    inside = text[1:-1]
    is_tuple = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if is_tuple and not any(bracket in inside for bracket in _BRACKETS):
        return [part.strip() for part in inside.split(",")]
    return [text] if text else []


def _same_part(given: str, truth: str) -> bool:
    if _PRM800K_RATIO.search(truth) and _PRM800K_RATIO.search(given):
        return given == truth
    if _is_integer(truth) != _is_integer(given):
        return False
    return _difference_is_zero(given, truth)


def _difference_is_zero(given: str, truth: str) -> bool:
    difference = f"({truth})-({given})"
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > _MAX_LETTERS or _POWERS_LEFT_ALONE.search(difference):
        return False
    import sympy
    from sympy.parsing import sympy_parser

    transformations = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's warnings about the model's text
            parsed = sympy_parser.parse_expr(difference.replace("^", "**"), transformations=transformations)
            return bool(sympy.simplify(parsed) == 0)
    except Exception:  # the boundary to SymPy, which evaluates the text as Python: it may raise anything
        return False
