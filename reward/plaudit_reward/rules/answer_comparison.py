"""Compare two answers as a mathematician does, and say by which reason they are equal, or that they are not.

Sets have no order, tuples have, intervals are neither. Values that hold no other answers are compared by
``value_equality``.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple

import mpmath  # type: ignore[import-untyped]

from plaudit_reward.rules.answer_types import (
    COMPOUND_NAME,
    Bracketed,
    Choice,
    Clock,
    Interval,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Reading,
    Region,
    Relation,
    Roman,
    Scalar,
    Several,
    Shells,
    Value,
    Words,
)
from plaudit_reward.rules.expression_equality import ENOUGH_POINTS, POINTS, are_close, is_complex, same_node
from plaudit_reward.rules.expressions import Node, NoValueError, exact, number, numeric, renamed, replaced, symbols
from plaudit_reward.rules.regions import contains, region_of
from plaudit_reward.rules.value_equality import COMPARISONS, Comparison

_MAX_COMPARED = 400


def equal(given: Reading, truth: Reading) -> str | None:
    """Return why two answers are equal; None if no reading of one equals a reading of the other."""
    unlikely = tuple(
        other
        for kind, other in _LIKELIER
        if all(any(isinstance(value, kind) for value in reading) for reading in (given, truth))
    )
    for expected in truth:
        for value in given:
            if isinstance(value, unlikely):
                continue
            reason = _same(value, expected)
            if reason is not None:
                return reason
    return None


_LIKELIER = ((Clock, Ratio), (Roman, Scalar), (Shells, Scalar), (Quantity, Roman))
"""Where both texts can be read as the first type, they are not read as the second: ``IV`` is no product."""


def _same(given: Value, truth: Value) -> str | None:
    for kinds, compare in _COMPARISONS:
        if isinstance(given, kinds[0]) and isinstance(truth, kinds[1]):
            try:
                return compare(given, truth)
            except (NoValueError, RecursionError):  # too large to compute
                return None
    return None


def _choices(given: Choice, truth: Choice) -> str | None:
    if given.letter != truth.letter:
        return None
    if given.says and truth.says and not equal(given.says, truth.says) and _is_mathematics(given.says):
        return None
    return f"the same choice, {truth.letter}"


def _is_mathematics(reading: Reading) -> bool:
    return not isinstance(reading[0], Words)


def _choice_truth(given: Value, truth: Choice) -> str | None:
    return equal((given,), truth.says) if truth.says else None


def _choice_given(given: Choice, truth: Value) -> str | None:
    return equal(given.says, (truth,)) if given.says else None


def _unordered(given: tuple[Reading, ...], truth: tuple[Reading, ...]) -> bool:
    """Match the items one to one in any order."""
    if len(given) != len(truth) or len(given) ** 2 > _MAX_COMPARED * 10:
        return False
    left = list(given)
    for item in truth:
        found = next((index for index, candidate in enumerate(left) if _same_item(candidate, item)), None)
        if found is None:
            return False
        del left[found]
    return True


def _ordered(given: tuple[Reading, ...], truth: tuple[Reading, ...]) -> bool:
    return len(given) == len(truth) and all(_same_item(a, b) for a, b in zip(given, truth, strict=True))


def _same_item(given: Reading, truth: Reading) -> bool:
    """Compare two items of a group, where a set of one element is not the element."""
    sets = [any(isinstance(value, Bracketed) and value.kind == "set" for value in item) for item in (given, truth)]
    return sets[0] == sets[1] and equal(given, truth) is not None


def _distinct(items: tuple[Reading, ...]) -> tuple[Reading, ...]:
    kept: list[Reading] = []
    for item in items:
        if not any(equal(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _several(given: Several, truth: Several) -> str | None:
    ours, theirs = _values(given), _values(truth)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        same = ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
        return "the same value of each name" if same else None
    if (_have_own_names(truth) and ours is None) or (_have_own_names(given) and theirs is None):
        return "the same values" if _ordered(given.items, truth.items) else None
    return "the same answers" if _unordered(_bare(given.items), _bare(truth.items)) else None


def _have_own_names(several: Several) -> bool:
    """Return True for the values of different variables, and not for the roots ``x_1`` and ``x_2``."""
    return len({name.partition("_")[0] for name in _values(several) or {}}) > 1


def _values(several: Several) -> dict[str, Reading] | None:
    """Return the values by name, if all have names of their own."""
    named = [value for item in several.items for value in item if isinstance(value, Named)]
    values = {value.name: value.value for value in named}
    return values if len(values) == len(several.items) == len(named) > 1 else None


def _bare(items: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """Return the values of several answers to the same name, such as ``x = 1 or x = 2``."""
    named = [next((value for value in item if isinstance(value, Named)), None) for item in items]
    names = {value.name for value in named if value is not None}
    if len(names) != 1:
        return items
    return tuple(item if value is None else value.value for item, value in zip(items, named, strict=True))


def _groups(given: Bracketed, truth: Bracketed) -> str | None:
    if given.kind != truth.kind:
        return None
    ours, theirs = _cases(given), _cases(truth)
    if ours and theirs:
        return _same_cases(ours, theirs)
    if truth.kind == "set":
        if not given.items and not truth.items:
            return "both empty"
        if _same_but_otherwise(given, truth) or _same_but_otherwise(truth, given):
            return "the same cases"
        same = bool(given.items) and _unordered(_distinct(given.items), _distinct(truth.items))
        return "the same set" if same else None
    return f"the same {truth.kind}" if _ordered(given.items, truth.items) else None


def _several_and_group(given: Several | Bracketed, truth: Several | Bracketed) -> str | None:
    """Compare answers without brackets with a group, whose brackets say whether the order counts."""
    several, group = (given, truth) if isinstance(given, Several) else (truth, given)
    assert isinstance(several, Several)
    assert isinstance(group, Bracketed)
    items = _bare(several.items) if group.kind == "set" else several.items
    if group.kind == "tuple" and (values := _values(several)) is not None:
        items = tuple(values[name] for name in sorted(values))
    ours, theirs = (items, group.items) if several is given else (group.items, items)
    if group.kind == "set":
        same = not _have_own_names(several) and _unordered(_distinct(ours), _distinct(theirs))
    else:
        same = _ordered(ours, theirs)
    return f"the same {group.kind}" if same else None


def _single(given: Value, truth: Bracketed) -> str | None:
    cases = _cases(truth)
    if cases and isinstance(given, Scalar):
        return _same_cases(_Cases(cases.name, [(given.node, None)]), cases)
    return equal((given,), _only_item(truth))


def _single_given(given: Bracketed, truth: Value) -> str | None:
    cases = _cases(given)
    if cases and isinstance(truth, Scalar):
        return _same_cases(cases, _Cases(cases.name, [(truth.node, None)]))
    return equal(_only_item(given), (truth,))


class _Cases(NamedTuple):
    """A piecewise function of one variable: its expressions and where each holds (None: wherever none before does)."""

    name: str
    pieces: list[tuple[Node, Region | None]]

    def at(self, point: Fraction) -> tuple[int, Any]:
        """Return which piece holds at a number, and the value there; None where no piece holds."""
        for index, (node, region) in enumerate(self.pieces):
            if region is None or contains(region, point):
                return index, numeric(node, {self.name: point})
        return len(self.pieces), None


def _cases(group: Bracketed) -> _Cases | None:
    """Return the piecewise function that a set of values with their conditions is."""
    pieces: list[tuple[Node, Region | None]] = []
    names = set()
    for item in group.items:
        pair = _pair(item)
        node = next((value.node for value in pair[0] if isinstance(value, Scalar)), None)
        named = next((value for value in pair[1] if isinstance(value, Named)), None)
        region = region_of(named.value) if named else None
        if named and region:
            names.add(named.name)
        elif len(pieces) < len(group.items) - 1 or not any(value in _OTHERWISE for value in pair[1]):
            return None
        if node is None:
            return None
        pieces.append((node, region))
    return _Cases(names.pop(), pieces) if len(names) == 1 else None


def _pair(item: Reading) -> tuple[Reading, ...]:
    return next((value.items for value in item if isinstance(value, Bracketed) and len(value.items) == 2), ((), ()))


def _same_but_otherwise(given: Bracketed, truth: Bracketed) -> bool:
    """Return whether the last case of the truth is "otherwise", for a condition that the answer writes out."""
    if len(given.items) != len(truth.items) or len(truth.items) < 2:
        return False
    value, condition = _pair(truth.items[-1])
    return any(word in _OTHERWISE for word in condition) and any(
        equal(_pair(item)[0], value) is not None
        and _unordered((*given.items[:index], *given.items[index + 1 :]), truth.items[:-1])
        for index, item in enumerate(given.items)
    )


_OTHERWISE = (Words("otherwise", True), Words("else", True))


def _same_cases(given: _Cases, truth: _Cases) -> str | None:
    """Compare two functions, of which one is piecewise, at points of each piece and at their ends."""
    pieces = [*given.pieces, *truth.pieces]
    if (
        len(pieces) > _MOST_PIECES
        or given.name != truth.name
        or any(symbols(node) - {given.name} for node, _ in pieces)
    ):
        return None
    points = [point for point, *_ in POINTS]
    for part in (part for _, region in pieces for part in (region.pieces if region else ())):
        ends = [exact(end) for end in (part.lower, part.upper)] if isinstance(part, Interval) else []
        points += [end + step for end in ends if end is not None for step in (-_NEAR, 0, _NEAR)]
    met: tuple[set[int], set[int]] = (set(), set())
    for point in points:
        (our_index, ours), (their_index, theirs) = given.at(point), truth.at(point)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None or is_complex(ours) or is_complex(theirs) or not are_close(ours, theirs, 30):
            return None
        met[0].add(our_index)
        met[1].add(their_index)
    every = len(met[0]) == len(given.pieces) and len(met[1]) == len(truth.pieces)
    return f"equal for {len(points)} values of {truth.name}" if every else None


_NEAR = Fraction(1, 7)
_MOST_PIECES = 24


def _only_item(group: Bracketed) -> Reading:
    """Return the only item of a set, which may stand for the set; nothing if that is a set itself."""
    if group.kind != "set" or len(group.items) != 1:
        return ()
    return () if any(isinstance(value, Bracketed) for value in group.items[0]) else group.items[0]


def _vector(given: Bracketed, truth: Matrix) -> str | None:
    rows = [next((value for value in item if isinstance(value, Bracketed)), None) for item in given.items]
    if given.kind != "set" and all(row is not None for row in rows):
        return _matrices(Matrix("matrix", tuple(row.items for row in rows if row is not None)), truth)
    items = _column(truth)
    return "the same vector" if items and given.kind != "set" and _ordered(given.items, items) else None


def _vector_given(given: Matrix, truth: Bracketed) -> str | None:
    items = _column(given)
    return "the same vector" if items and truth.kind != "set" and _ordered(items, truth.items) else None


def _column(matrix: Matrix) -> tuple[Reading, ...]:
    if matrix.kind != "matrix" or not (len(matrix.rows) == 1 or all(len(row) == 1 for row in matrix.rows)):
        return ()
    return tuple(item for row in matrix.rows for item in row)


def _matrices(given: Matrix, truth: Matrix) -> str | None:
    pairs = zip_longest(given.rows, truth.rows, fillvalue=())
    same = given.kind == truth.kind and all(_ordered(ours, theirs) for ours, theirs in pairs)
    return "the same matrix" if same else None


def _identity_given(given: Scalar, truth: Matrix) -> str | None:
    """Compare ``I_2`` or ``5I`` with a matrix that is written out."""
    names = [name for name in symbols(given.node) if re.fullmatch(r"I(_\w+)?", name)]
    size = len(truth.rows)
    if truth.kind != "matrix" or len(names) != 1 or names[0][2:] not in ("", "n", str(size)):
        return None
    factor, rest = (replaced(given.node, names[0], number(value)) for value in (1, 0))
    zero: Reading = (Scalar(number(0)),)
    rows = tuple(tuple((Scalar(factor),) if row == column else zero for column in range(size)) for row in range(size))
    return _matrices(Matrix("matrix", rows), truth) if same_node(rest, number(0)) else None


def _identity_truth(given: Matrix, truth: Scalar) -> str | None:
    return None if truth.node == Node("symbol", ("I",)) else _identity_given(truth, given)  # it may be anything


def _named(given: Named, truth: Named) -> str | None:
    if COMPOUND_NAME in (given.name, truth.name):  # their relations are compared
        return None
    given = _of_same_argument(given, truth.name)
    functions = {"y", "f(x)"}
    if given.name and truth.name and given.name != truth.name and {given.name, truth.name} - functions:
        return _name_and_equation(given, truth)
    return equal(given.value, truth.value)


_FUNCTION = re.compile(r"(\w+)\(([a-z])\)")


def _of_same_argument(given: Named, name: str) -> Named:
    """Return ``f(t) = 3t`` as ``f(x) = 3x`` where the truth names its argument x."""
    ours, theirs = _FUNCTION.fullmatch(given.name), _FUNCTION.fullmatch(name)
    if not ours or not theirs or ours[1] != theirs[1] or ours[2] == theirs[2]:
        return given
    nodes = [value.node for value in given.value if isinstance(value, Scalar) and theirs[2] not in symbols(value.node)]
    return Named(name, tuple(Scalar(renamed(node, ours[2], theirs[2])) for node in nodes))


def _named_given(given: Named, truth: Value) -> str | None:
    return equal(given.value, (truth,))


def _named_truth(given: Value, truth: Named) -> str | None:
    if truth.name == COMPOUND_NAME:
        return None
    return equal((given,), truth.value)


def _equations(given: Relation, truth: Relation) -> str | None:
    """Compare relations: the same ones are multiples of each other (positive ones where the sides differ in size)."""
    if (given.sign in "<≤" and truth.sign in ">≥") or (given.sign in ">≥" and truth.sign in "<≤"):
        flipped = {"<": ">", "≤": "≥", ">": "<", "≥": "≤"}[given.sign]
        given = Relation(flipped, given.right, given.left)
    if given.sign != truth.sign:
        return None
    ours, theirs = (Node("+", (item.left, Node("neg", (item.right,)))) for item in (given, truth))
    names = sorted(symbols(ours) | symbols(theirs))
    if symbols(ours) != symbols(theirs) or len(names) > len(POINTS[0]):
        return None
    factor, same = None, 0
    for point in POINTS:
        try:
            a, b = (numeric(side, dict(zip(names, point, strict=False))) for side in (ours, theirs))
        except NoValueError:
            continue
        if is_complex(a) or is_complex(b) or abs(b) < mpmath.mpf(10) ** -30 or abs(a) < mpmath.mpf(10) ** -30:
            continue
        factor = a / b if factor is None else factor
        if not are_close(a / b, factor, 30):
            return None
        same += 1
    positive = factor is not None and (truth.sign in "=≠" or factor.real > 0)
    return "the same relation, but for a factor" if positive and same >= ENOUGH_POINTS else None


def _equation(named: Named) -> Relation | None:
    """Return the equation that names the value, if it does so by one variable."""
    node = next((value.node for value in named.value if isinstance(value, Scalar)), None)
    single = len(named.name) == 1 or named.name.startswith("\\")
    return Relation("=", Node("symbol", (named.name,)), node) if node is not None and single else None


def _name_and_equation(given: Named | Relation, truth: Named | Relation) -> str | None:
    ours, theirs = (_equation(value) if isinstance(value, Named) else value for value in (given, truth))
    return _equations(ours, theirs) if ours and theirs else None


_COMPARISONS: tuple[Comparison, ...] = (
    *COMPARISONS,
    ((Choice, Choice), _choices),
    ((Several, Several), _several),
    ((Bracketed, Bracketed), _groups),
    ((Several, Bracketed), _several_and_group),
    ((Bracketed, Several), _several_and_group),
    ((Matrix, Matrix), _matrices),
    ((Bracketed, Matrix), _vector),
    ((Matrix, Bracketed), _vector_given),
    ((Scalar, Matrix), _identity_given),
    ((Matrix, Scalar), _identity_truth),
    ((Relation, Relation), _equations),
    ((Named, Relation), _name_and_equation),
    ((Relation, Named), _name_and_equation),
    ((Named, Named), _named),
    ((Named, object), _named_given),
    ((object, Named), _named_truth),
    ((Choice, object), _choice_given),
    ((object, Choice), _choice_truth),
    ((Scalar | Quantity | Words | Clock, Bracketed), _single),
    ((Bracketed, Scalar | Quantity | Words | Clock), _single_given),
)
