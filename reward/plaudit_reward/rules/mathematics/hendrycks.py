r"""Compute the normal form of LaTeX answers by which the MATH benchmark compares them.

Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH Dataset" (``math_equivalence``): purely
textual, so ``\frac12``, ``1/2`` and ``0.5`` are the same, and ``1/3`` and ``2/6`` are not. verl's scorers of MATH,
NuminaMath and Geometry3K all begin with it.
"""

from __future__ import annotations

import re

_LEFT_OUT = ("\n", "\\!")
_SPELLINGS = (("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
_DECORATION = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_UNIT = "\\text{ "
_RATIO = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class MalformedError(ValueError):
    """The text has no normal form: it has an empty fraction or root, or two units."""


def normal_form(text: str, percents: tuple[str, ...] = ("\\\\%", "\\%")) -> str:
    """Return the normal form of an answer; raise ``MalformedError`` if it has none.

    Args:
        text: LaTeX, without ``$``.
        percents: the spellings of the percent sign that are removed.
    """
    for part in _LEFT_OUT:
        text = text.replace(part, "")
    for before, after in _SPELLINGS:
        text = text.replace(before, after)
    for part in _DECORATION:
        text = text.replace(part, "")
    text = _without_unit(text)
    for percent in percents:
        text = text.replace(percent, "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    text = _braced_roots(_right_side(text)).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = _RATIO.fullmatch(text)
    return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else text


def _without_unit(text: str) -> str:
    r"""Remove units: ``5\text{ cm}`` becomes 5; only units begin with a blank in the text."""
    value, *units = text.split(_UNIT)
    if len(units) > 1:
        raise MalformedError(f"{text!r} has {len(units)} units")
    return value


def _right_side(text: str) -> str:
    """Remove the left side: ``k = 5`` becomes 5, for names of at most two characters."""
    sides = text.split("=")
    return sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text


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
