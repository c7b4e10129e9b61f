"""Tell whether two expressions are the same number or the same function, and by which reason.

Integers and fractions are compared exactly, other constants to 50 digits, expressions with variables at points of the
plane where both have a value. A decimal fraction is a rounded number: what has more digits equals it if it rounds to
it.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import mpmath  # type: ignore[import-untyped]

from plaudit_reward.rules.expressions import (
    Node,
    NoValueError,
    decimal_digits,
    exact,
    functions,
    names_pi,
    number,
    numeric,
    renamed,
    symbols,
)

_SAME_DIGITS = 50
_ROUNDED_DIGITS = 3
"""A decimal fraction of so many significant digits may be a rounded value; a shorter one is taken as it stands."""
_APPROXIMATE_DIGITS = 6
"""A decimal fraction of so many significant digits may stand for a value that is not one."""
POINTS = tuple(
    tuple(
        (1, 4, 1, 16)[point % 4]
        * Fraction((37 * point * point + 53 * variable * (point + 2)) % 199 - 99, 41 + 2 * variable)
        for variable in range(12)
    )
    for point in range(1, 41)
)
"""Small and large values: some functions exist for small ones alone, and others, such as ``|x - 3|``, bend far out."""
ENOUGH_POINTS = 8


def same_node(given: Node, truth: Node) -> str | None:
    """Return why two expressions are equal, or None."""
    if given == truth:
        return "the same expression"
    try:
        ours, theirs = exact(given), exact(truth)
        if ours is not None and theirs is not None:
            return _same_rational(given, truth, ours, theirs)
        names = sorted(symbols(given) | symbols(truth))
        compare = partial(_same_function, names=names) if names else _same_constant
        reason = compare(given, truth)
        if reason is None and "log" in functions(given) | functions(truth):
            return compare(_with_log_10(given), _with_log_10(truth))
        return reason
    except (NoValueError, RecursionError):
        return None


def same_family(given: Node, truth: Node) -> str | None:
    """Return why two integrals, or two families of angles, are equal but for the names of their constants, or None."""
    ours, theirs = _counted_turns(given), _counted_turns(truth)
    constants = _added_symbol(given), _added_symbol(truth)
    if "C" in constants:
        ours, theirs = constants
    return same_node(renamed(given, ours, theirs), truth) if ours and theirs else None


def _counted_turns(node: Node) -> str | None:
    """Return the name of the integer of a family of angles, such as the k of ``pi/2 + k pi``."""
    names = symbols(node)
    return names.pop() if len(names) == 1 and names <= set("kmn") and names_pi(node) else None


def _added_symbol(node: Node) -> str | None:
    """Return the name of the constant of an integral: a single C or K that is added, and stands nowhere else."""
    parts = [node]
    while any(part.kind == "+" for part in parts):
        parts = [inner for part in parts for inner in (part.parts if part.kind == "+" else (part,))]
    names = [part.parts[0] for part in parts if part.kind == "symbol" and part.parts[0] in ("C", "c", "K", "k")]
    others = {name for part in parts if part.kind != "symbol" for name in symbols(part)}
    return names[0] if len(names) == 1 and len(parts) > 1 and names[0] not in others else None


def _with_log_10(node: Node) -> Node:
    """Return the expression with base 10 where ``log`` has none, as schools write it."""
    parts = tuple(_with_log_10(part) if isinstance(part, Node) else part for part in node.parts)
    if node.kind == "function" and parts[0] == "log":
        return Node("/", (Node("function", ("ln", parts[1])), Node("function", ("ln", number(10)))))
    return Node(node.kind, parts)


def _same_rational(given: Node, truth: Node, ours: Fraction, theirs: Fraction) -> str | None:
    if ours == theirs:
        integers = ours.denominator == 1
        return "equal as integers" if integers else "equal as rational numbers"
    return _rounded(given, truth, ours, theirs)


def _same_constant(given: Node, truth: Node) -> str | None:
    ours, theirs = numeric(given), numeric(truth)
    if is_infinite(ours) or is_infinite(theirs):
        return "both infinite" if ours == theirs else None
    if are_close(ours, theirs):
        return f"equal to {_SAME_DIGITS} digits"
    if is_complex(ours) or is_complex(theirs):
        return None
    return _rounded(given, truth, mpmath.re(ours), mpmath.re(theirs))


def is_infinite(value: Any) -> bool:
    """Return True for either infinity."""
    return bool(mpmath.isinf(value))


def are_close(ours: Any, theirs: Any, digits: int = _SAME_DIGITS) -> bool:
    """Return True for numbers that agree to so many significant digits."""
    with mpmath.workdps(digits + 20):
        largest = max(abs(ours), abs(theirs))
        difference = abs(ours - theirs)
        scale = largest if ours != 0 and theirs != 0 else mpmath.mpf(1)
        return bool(difference <= scale * mpmath.mpf(10) ** -digits)


def _rounded(given: Node, truth: Node, ours: Any, theirs: Any) -> str | None:
    """Return a reason if one is a decimal fraction to which the other rounds, with enough digits to tell."""
    given_digits, truth_digits = decimal_digits(given), decimal_digits(truth)
    if (
        truth_digits is not None
        and truth_digits >= _ROUNDED_DIGITS
        and (given_digits is None or given_digits > truth_digits)
    ):
        if _is_integer(given) or not _rounds_to(ours, theirs, truth_digits):
            return None
        return f"equal when rounded to {truth_digits} significant digits"
    if given_digits is None or given_digits < _APPROXIMATE_DIGITS or _is_integer(truth):
        return None
    shorter = truth_digits is None or truth_digits > given_digits
    return f"equal to {given_digits} significant digits" if shorter and _rounds_to(theirs, ours, given_digits) else None


def _is_integer(node: Node) -> bool:
    value = exact(node)
    return value is not None and value.denominator == 1 and decimal_digits(node) is None


def _rounds_to(precise: Any, rounded: Any, digits: int) -> bool:
    with mpmath.workdps(80):
        precise, rounded = _float(precise), _float(rounded)
        if rounded == 0 or precise * rounded <= 0:
            return False
        unit = mpmath.mpf(10) ** (mpmath.floor(mpmath.log10(abs(rounded))) - digits + 1)
        return bool(abs(precise - rounded) <= unit * (mpmath.mpf(1) / 2 + mpmath.mpf(10) ** -12))


def _float(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else mpmath.mpf(value)


def _same_function(given: Node, truth: Node, names: list[str]) -> str | None:
    """Compare expressions of variables at points; where one has no real value there, the point does not count."""
    if len(names) > len(POINTS[0]):
        return _same_function_of_many(given, truth, names)
    same = 0
    for point in POINTS:
        at = dict(zip(names, point, strict=False))
        try:
            ours, theirs = numeric(given, at), numeric(truth, at)
        except NoValueError:
            continue
        if is_infinite(ours) or is_infinite(theirs) or is_complex(ours) != is_complex(theirs):
            continue
        if not are_close(ours, theirs, 30):
            return None
        same += 1
        if same == ENOUGH_POINTS:
            return f"equal for {same} values of {', '.join(names)}"
    return None


def _same_function_of_many(given: Node, truth: Node, names: list[str]) -> str | None:
    for shift in range(ENOUGH_POINTS):
        at = {name: Fraction((index * 29 + shift * 17) % 83 - 40, 11 + shift) for index, name in enumerate(names)}
        if not are_close(numeric(given, at), numeric(truth, at), 30):
            return None
    return f"equal for {ENOUGH_POINTS} values of {len(names)} variables"


def is_complex(value: Any) -> bool:
    """Return True for a number with an imaginary part."""
    return isinstance(value, mpmath.mpc) and abs(value.imag) > mpmath.mpf(10) ** -40
