"""Sets of real numbers: build them from inequalities, and compare them piece by piece."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]

from plaudit_reward.rules.answer_types import Bracketed, Interval, Named, Reading, Region, Relation, Scalar, Value
from plaudit_reward.rules.expression_equality import are_close, is_infinite, same_node
from plaudit_reward.rules.expressions import INFINITY, Node, NoValueError, has_symbol, number, numeric, parsed, symbols

LINE = Interval(Node("neg", (INFINITY,)), INFINITY, False, False)
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


def combined(regions: list[Region], conjunction: bool) -> Region:
    """Join the inequalities of one variable; half-lines that point apart are a union, whatever joins them."""
    union = Region(tuple(piece for region in regions for piece in region.pieces))
    if not conjunction:
        return union
    if (both := _between(regions)) is not None:
        return both
    whole, *others = regions
    excluded = [other.without for other in others if other.pieces == (LINE,)]
    if len(excluded) == len(others):
        return Region(whole.pieces, (*whole.without, *(piece for pieces in excluded for piece in pieces)))
    return union


def _between(regions: list[Region]) -> Region | None:
    """Return what two half-lines have in common that point at each other."""
    pieces = [region.pieces[0] for region in regions if len(region.pieces) == 1 and not region.without]
    rays = [piece for piece in pieces if isinstance(piece, Interval)]
    up = [ray for ray in rays if ray.upper == INFINITY and ray.lower != LINE.lower]
    down = [ray for ray in rays if ray.lower == LINE.lower and ray.upper != INFINITY]
    if len(regions) != 2 or len(up) != 1 or len(down) != 1:
        return None
    try:
        inside = numeric(up[0].lower).real < numeric(down[0].upper).real
    except NoValueError:
        return None
    return Region((Interval(up[0].lower, down[0].upper, up[0].with_lower, down[0].with_upper),)) if inside else None


def region_of(reading: Reading) -> Region | None:
    """Return the set of real numbers among the readings of a text."""
    for value in reading:
        if isinstance(value, Region):
            return value
        if isinstance(value, Interval):
            return Region((value,))
    return None


def inequality(sides: list[str], signs: list[str]) -> list[Value]:
    r"""Read the sides of ``1 < x \le 3``, ``|x| > 2`` or ``x \ne 0`` as the numbers that they describe."""
    nodes = [parsed(side) for side in sides]
    if len(nodes) == 3:
        if (signs[0] in "<≤" and signs[1] in "<≤") or (signs[0] in ">≥" and signs[1] in ">≥"):
            if signs[0] in ">≥":
                nodes, signs = nodes[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
            if nodes[1].kind == "symbol":
                piece = Interval(nodes[0], nodes[2], signs[0] == "≤", signs[1] == "≤")
                return [Named(nodes[1].parts[0], (Region((piece,)),))]
        return []
    if len(nodes) != 2:
        return []
    (left, right), sign = nodes, signs[0]
    if right.kind == "symbol" and left.kind != "symbol":
        left, right, sign = right, left, _FLIPPED.get(sign, sign)
    if left.kind == "function" and left.parts[0] == "abs" and (centered := _center(left.parts[1])):
        return [Named(centered[0], (_around(sign, centered[1], right),))]
    if left.kind == "symbol" and not has_symbol(right, left.parts[0]):
        return [Named(left.parts[0], (half_line(sign, right),)), Relation(sign, left, right)]
    return [Relation(sign, left, right)]


def _center(node: Node) -> tuple[str, Node] | None:
    r"""Return the variable of ``x`` or ``x - a``, and the value at which it is zero."""
    if node.kind == "symbol":
        return node.parts[0], number(0)
    if node.kind == "+" and node.parts[0].kind == "symbol" and not symbols(node.parts[1]):
        return node.parts[0].parts[0], Node("neg", (node.parts[1],))
    return None


def _around(sign: str, center: Node, distance: Node) -> Region:
    r"""Return the numbers of ``|x - 1| < 3``, ``|x| \ge 3`` and the like."""
    lower, upper = Node("+", (center, Node("neg", (distance,)))), Node("+", (center, distance))
    if sign in "<≤":
        return Region((Interval(lower, upper, sign == "≤", sign == "≤"),))
    return Region((half_line(_FLIPPED[sign], lower).pieces[0], half_line(sign, upper).pieces[0]))


def half_line(sign: str, end: Node) -> Region:
    """Return the numbers on that side of the end; all others for ``≠``."""
    if sign == "≠":
        return Region((LINE,), (Bracketed("set", ((Scalar(end),),)),))
    if sign in "<≤":
        return Region((Interval(LINE.lower, end, False, sign == "≤"),))
    return Region((Interval(end, INFINITY, sign == "≥", False),))


def same_regions(given: Any, truth: Any) -> str | None:
    """Return why two intervals or regions are the same; ends that are no numbers are compared as expressions."""
    ours, theirs = _pieces_of(given), _pieces_of(truth)
    if ours is None or theirs is None:
        return _intervals(given, truth) if isinstance(given, Interval) and isinstance(truth, Interval) else None
    if len(ours) != len(theirs):
        return None
    same = all(
        a[1] == b[1] and a[3] == b[3] and _end(a[0], b[0]) and _end(a[2], b[2])
        for a, b in zip(ours, theirs, strict=True)
    )
    return "the same set of numbers" if same else None


def same_region_and_set(given: Any, truth: Any) -> str | None:
    """Return why a region and a set in braces, in either order, are the same."""
    both = [Region((item,)) if isinstance(item, Bracketed) else item for item in (given, truth)]
    kinds = {item.kind for item in (given, truth) if isinstance(item, Bracketed)}
    return same_regions(*both) if kinds == {"set"} else None


def _intervals(given: Interval, truth: Interval) -> str | None:
    ends = (given.with_lower, given.with_upper) == (truth.with_lower, truth.with_upper)
    same = ends and same_node(given.lower, truth.lower) and same_node(given.upper, truth.upper)
    return "the same interval" if same else None


def contains(region: Region, point: Fraction) -> bool:
    """Return whether a number belongs to a set of real numbers; not if an end of the set is no number."""
    at = mpmath.mpf(point.numerator) / point.denominator
    return any(_holds(_common(piece, (at, True, at, True))) for piece in _pieces_of(region) or ())


_Piece = tuple[Any, bool, Any, bool]
"""Lower end, whether it belongs to it, upper end, whether it belongs to it."""


def _end(ours: Any, theirs: Any) -> bool:
    return bool(ours == theirs) or (not is_infinite(ours) and not is_infinite(theirs) and are_close(ours, theirs, 40))


def _pieces_of(value: Any) -> list[_Piece] | None:
    """Return the disjoint pieces of a set of real numbers from left to right; None if an end is no number."""
    region = value if isinstance(value, Region) else Region((value,))
    try:
        pieces = [piece for part in region.pieces for piece in _flat(part)]
        holes = [piece for part in region.without for piece in _flat(part)]
    except (NoValueError, LookupError):
        return None
    for hole in holes:
        pieces = [rest for piece in pieces for rest in _minus(piece, hole)]
    for other in region.within:
        others = _pieces_of(other)
        if others is None:
            return None
        pieces = [both for piece in pieces for limit in others if _holds(both := _common(piece, limit))]
    return _merged(pieces)


def _common(piece: _Piece, other: _Piece) -> _Piece:
    """Return what two pieces have in common, which may hold nothing."""
    lower = max((piece[0], not piece[1]), (other[0], not other[1]))
    return (lower[0], not lower[1], *min((piece[2], piece[3]), (other[2], other[3])))


def _flat(part: Interval | Bracketed) -> list[_Piece]:
    if isinstance(part, Interval):
        lower, upper = (mpmath.re(numeric(end)) for end in (part.lower, part.upper))
        if lower > upper:
            raise LookupError("it is no interval")
        return [(lower, part.with_lower and not is_infinite(lower), upper, part.with_upper and not is_infinite(upper))]
    points = []
    for item in part.items:
        node = next((value.node for value in item if isinstance(value, Scalar)), None)
        if node is None:
            raise LookupError("it is no number")
        points.append(mpmath.re(numeric(node)))
    return [(point, True, point, True) for point in points]


def _minus(piece: _Piece, hole: _Piece) -> list[_Piece]:
    left = (piece[0], piece[1], *min((piece[2], piece[3]), (hole[0], not hole[1])))
    right = (*max((piece[0], not piece[1]), (hole[2], hole[3])), piece[2], piece[3])
    right = (right[0], not right[1], right[2], right[3])
    return [rest for rest in (left, right) if _holds(rest)]


def _holds(piece: _Piece) -> bool:
    return bool(piece[0] < piece[2] or (piece[0] == piece[2] and piece[1] and piece[3]))


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    merged: list[_Piece] = []
    for piece in sorted((piece for piece in pieces if _holds(piece)), key=lambda item: (item[0], not item[1])):
        if merged and (piece[0] < merged[-1][2] or (_end(piece[0], merged[-1][2]) and (piece[1] or merged[-1][3]))):
            last = merged[-1]
            upper, closed = max((last[2], last[3]), (piece[2], piece[3]))
            merged[-1] = (last[0], last[1] or (piece[1] and piece[0] == last[0]), upper, closed)
        else:
            merged.append(piece)
    return merged
