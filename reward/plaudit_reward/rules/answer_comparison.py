"""Compare two answers as a mathematician does, and say by which reason they are equal, or that they are not.

Numbers and expressions are compared by ``expression_equality``. Sets have no order, tuples have, intervals are neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import zip_longest
from typing import Any

import mpmath  # type: ignore[import-untyped]

from plaudit_reward.rules.answer_types import (
    COMPOUND_NAME,
    Based,
    Bracketed,
    Choice,
    Clock,
    Date,
    Division,
    Interval,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Reaction,
    Reading,
    Region,
    Relation,
    Residue,
    Roman,
    Scalar,
    Several,
    Shells,
    Value,
    Words,
)
from plaudit_reward.rules.chemistry import same_reaction
from plaudit_reward.rules.expression_equality import (
    ENOUGH_POINTS,
    POINTS,
    are_close,
    is_complex,
    is_infinite,
    same_family,
    same_node,
)
from plaudit_reward.rules.expressions import (
    Node,
    NoValueError,
    exact,
    names_pi,
    number,
    numeric,
    renamed,
    replaced,
    symbols,
)
from plaudit_reward.rules.units import DEGREE, GENERIC, PERCENT, RADIAN, Unit

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


def _scalars(given: Scalar, truth: Scalar) -> str | None:
    return same_node(given.node, truth.node) or same_family(given.node, truth.node)


def _times(node: Node, factor: Fraction) -> Node:
    return node if factor == 1 else Node("*", (node, number(factor)))


def _quantities(given: Quantity, truth: Quantity) -> str | None:
    ours, theirs = given.unit, truth.unit
    if ours.dimension is not None and theirs.dimension is not None:
        if {ours, theirs} == {DEGREE, RADIAN}:
            return _quantities(_in_degrees(given), _in_degrees(truth))
        if ours.dimension != theirs.dimension:
            return None
        reason = same_node(_times(given.node, ours.factor / theirs.factor), truth.node)
        return reason and f"{reason}, in the same unit"
    return same_node(given.node, truth.node) if _same_words(ours, theirs) else None


def _same_words(ours: Unit, theirs: Unit) -> bool:
    if ours.words & theirs.words:
        return True
    if ours.dimension or theirs.dimension:
        return (ours.words | theirs.words) <= {"unit"}
    return any(unit.dimension is None and unit.words <= GENERIC | _STEMS for unit in (ours, theirs))


_STEMS = frozenset(word.removesuffix("s") for word in GENERIC)


def _bare_given(given: Scalar, truth: Quantity) -> str | None:
    """Compare a number without unit: it is meant in the truth's unit. A percentage may also be the ratio."""
    unit = truth.unit
    if unit == PERCENT:
        ratio = same_node(given.node, _times(truth.node, unit.factor))
        return ratio or same_node(given.node, truth.node)
    if unit == DEGREE and names_pi(given.node) and not names_pi(truth.node):
        return same_node(_in_degrees(Quantity(given.node, RADIAN)).node, truth.node)
    return same_node(given.node, truth.node) if unit.spelled or unit.dimension is not None else None


def _in_degrees(angle: Quantity) -> Quantity:
    if angle.unit != RADIAN:
        return angle
    return Quantity(Node("/", (Node("*", (angle.node, number(180))), Node("constant", ("pi",)))), DEGREE)


def _bare_truth(given: Quantity, truth: Scalar) -> str | None:
    """Compare with a truth without unit: the question names it. A percentage is a ratio, or a percentage above 1."""
    if not given.unit.spelled:
        return None
    if given.unit == DEGREE and names_pi(truth.node):
        return None if names_pi(given.node) else _bare_given(truth, given)
    if given.unit == PERCENT:
        ratio = same_node(_times(given.node, given.unit.factor), truth.node)
        value = exact(truth.node)
        return ratio or (same_node(given.node, truth.node) if value is not None and abs(value) > 1 else None)
    return same_node(given.node, truth.node)


def _bare_numeral(given: Words, truth: Based) -> str | None:
    """Compare a numeral without its base, which only one with letters among its digits can be."""
    same = not truth.digits.isdecimal() and given.text.upper() == truth.digits
    return "the same numeral" if same else None


def _based_given(given: Based, truth: Scalar) -> str | None:
    return same_node(number(int(given.digits, given.base)), truth.node)


def _based_truth(given: Scalar, truth: Based) -> str | None:
    return same_node(given.node, number(int(truth.digits))) if truth.base == 10 else None


def _romans(given: Roman, truth: Roman) -> str | None:
    return "the same Roman numeral" if given.value == truth.value else None


def _roman_given(given: Roman, truth: Scalar) -> str | None:
    return same_node(number(given.value), truth.node) if given.names == "number" else None


def _roman_truth(given: Scalar, truth: Roman) -> str | None:
    return None if truth.names == "letters" else same_node(given.node, number(truth.value))


def _clocks(given: Clock, truth: Clock) -> str | None:
    if given.half and truth.half:
        return "the same time of day" if _of_day(given) == _of_day(truth) else None
    if given.seconds == truth.seconds or ((given.half or truth.half) and _of_day(given) == _of_day(truth)):
        return "the same time of day"
    return None


def _dates(given: Date, truth: Date) -> str | None:
    """Compare dates; the question may name the year that the truth leaves out."""
    same = given[1:] == truth[1:] and truth.year in (None, given.year)
    return "the same date" if same else None


def _of_day(clock: Clock) -> int:
    hours, rest = divmod(clock.seconds, 3600)
    if clock.half:
        hours = hours % 12 + (12 if clock.half == "pm" else 0)
    return hours * 3600 + rest


def _ratios(given: Ratio, truth: Ratio) -> str | None:
    if len(given.items) != len(truth.items):
        return None
    ours, theirs = ([_node(item) for item in ratio.items] for ratio in (given, truth))
    crossed = all(
        same_node(Node("*", (a, theirs[0])), Node("*", (b, ours[0]))) for a, b in zip(ours[1:], theirs[1:], strict=True)
    )
    return "the same ratio" if crossed and same_node(ours[0], number(0)) is None else None


def _node(reading: Reading) -> Node:
    (value,) = reading
    assert isinstance(value, Scalar)
    return value.node


def _quotient(ratio: Ratio) -> Node | None:
    return Node("/", (_node(ratio.items[0]), _node(ratio.items[1]))) if len(ratio.items) == 2 else None


def _ratio_given(given: Ratio, truth: Scalar) -> str | None:
    quotient = _quotient(given)
    return same_node(quotient, truth.node) if quotient else None


def _ratio_truth(given: Scalar, truth: Ratio) -> str | None:
    quotient = _quotient(truth)
    return same_node(given.node, quotient) if quotient else None


def _texts(given: Words, truth: Words) -> str | None:
    if given.is_prose != truth.is_prose:
        return None
    if not truth.is_prose:
        return "the same formula" if given.text == truth.text else None
    ours, theirs = (_compact(_LEADING_WORDS.sub("", words.text)) for words in (given, truth))
    if ours == theirs != "" or _is_same_predicate(given.text, truth.text):
        return "the same text"
    synonyms = next((names for names in _SYNONYMS if truth.text in names), None)
    if synonyms and given.text in synonyms:
        return "words of the same meaning"
    verdict = _verdict(given.text)
    reasoned = re.match(r"\w+ (?:because|since|as|it|they|this|that)\b", truth.text)
    same = verdict and verdict == (_verdict(truth.text) if reasoned else truth.text)
    return "the same verdict" if same else None


_NOUNS = "function|series|sequence|integral|statement|claim|matrix|graph|triangle|lines|planes|vectors|events"
_SUBJECT = re.compile(
    rf"^(?:(?:{_NOUNS})(?: [a-z])?|[a-z]) (?:is|are) (?=\w)|^(?:series|sequence|integral) (?=(?:con|di)verges)"
    rf"|(?<=\w) (?:{_NOUNS})$"
)


def _is_same_predicate(given: str, truth: str) -> bool:
    """Return True for ``f is odd`` and ``odd``, and False for ``f is odd`` and ``g is odd``."""
    return _SUBJECT.sub("", given) == truth or given == _SUBJECT.sub("", truth)


_LEADING_WORDS = re.compile(r"^(?:it is |it's |on |in )+(?=\w)")
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


def _verdict(text: str) -> str:
    """Return the yes, no, true or false with which a text begins, unless it names the opposite or a doubt too."""
    first, *others = re.findall(r"[\w']+", text) or [""]
    doubts = {_OPPOSITES.get(first), "or", "maybe", "perhaps"} & set(others)
    return first if first in _OPPOSITES and not doubts else ""


_DAYS_AND_MONTHS = re.findall(
    r"\w+",
    "monday tuesday wednesday thursday friday saturday sunday january february march april june july august september "
    "october november december",
)
_SYNONYMS = (
    {"dne", "does not exist", "doesn't exist", "it does not exist", "limit does not exist", "nonexistent"},
    {"undefined", "not defined", "is undefined"},
    *({name[:3], name} for name in _DAYS_AND_MONTHS),
    {"infinitely many", "infinitely many solutions", "infinite number of solutions", "infinite solutions"},
)


def _compact(text: str) -> str:
    return re.sub(r"(?<=\w)[\s-]+(?=\w)", "", text)


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
    if truth.kind == "set":
        if not given.items and not truth.items:
            return "both empty"
        same = bool(given.items) and _unordered(_distinct(given.items), _distinct(truth.items))
        return "the same set" if same else None
    return f"the same {truth.kind}" if _ordered(given.items, truth.items) else None


def _several_given(given: Several, truth: Bracketed) -> str | None:
    """Compare answers without brackets: the brackets of the truth say whether their order counts."""
    values = _values(given)
    if values is not None and truth.kind == "tuple":
        return "the same tuple" if _ordered(tuple(values[name] for name in sorted(values)), truth.items) else None
    if truth.kind == "set":
        same = not _have_own_names(given) and _unordered(_distinct(_bare(given.items)), _distinct(truth.items))
        return "the same set" if same else None
    return f"the same {truth.kind}" if _ordered(given.items, truth.items) else None


def _several_truth(given: Bracketed, truth: Several) -> str | None:
    values = _values(truth)
    if values is not None and given.kind == "tuple":
        return "the same tuple" if _ordered(given.items, tuple(values[name] for name in sorted(values))) else None
    if given.kind == "set":
        same = not _have_own_names(truth) and _unordered(_distinct(given.items), _distinct(_bare(truth.items)))
        return "the same set" if same else None
    return f"the same {given.kind}" if _ordered(given.items, truth.items) else None


def _single(given: Value, truth: Bracketed) -> str | None:
    return equal((given,), _only_item(truth))


def _single_given(given: Bracketed, truth: Value) -> str | None:
    return equal(_only_item(given), (truth,))


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
        ours, theirs = _equation(given), _equation(truth)
        return _equations(ours, theirs) if ours and theirs else None
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


def _equation_of_name(given: Named, truth: Relation) -> str | None:
    equation = _equation(given)
    return _equations(equation, truth) if equation else None


def _equation_by_name(given: Relation, truth: Named) -> str | None:
    equation = _equation(truth)
    return _equations(given, equation) if equation else None


def _regions(given: Any, truth: Any) -> str | None:
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


def _region_and_set(given: Any, truth: Any) -> str | None:
    both = [Region((item,)) if isinstance(item, Bracketed) else item for item in (given, truth)]
    kinds = {item.kind for item in (given, truth) if isinstance(item, Bracketed)}
    return _regions(*both) if kinds == {"set"} else None


def _intervals(given: Interval, truth: Interval) -> str | None:
    ends = (given.with_lower, given.with_upper) == (truth.with_lower, truth.with_upper)
    same = ends and same_node(given.lower, truth.lower) and same_node(given.upper, truth.upper)
    return "the same interval" if same else None


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


_Comparison = tuple[tuple[Any, Any], Callable[[Any, Any], str | None]]
_EXACT = {
    Based: "the same numeral in the same base",
    Residue: "the same remainder",
    Division: "the same quotient and remainder",
    Shells: "the same electron configuration",
}
"""Values that have one form, and why two of them are equal."""


def _exact(given: Value, truth: Value) -> str | None:
    return _EXACT[type(truth)] if given == truth else None


_COMPARISONS: tuple[_Comparison, ...] = (
    *(((kind, kind), _exact) for kind in _EXACT),
    ((Choice, Choice), _choices),
    ((Scalar, Scalar), _scalars),
    ((Quantity, Quantity), _quantities),
    ((Scalar, Quantity), _bare_given),
    ((Quantity, Scalar), _bare_truth),
    ((Words, Based), _bare_numeral),
    ((Based, Scalar), _based_given),
    ((Scalar, Based), _based_truth),
    ((Roman, Roman), _romans),
    ((Roman, Scalar), _roman_given),
    ((Scalar, Roman), _roman_truth),
    ((Clock, Clock), _clocks),
    ((Date, Date), _dates),
    ((Ratio, Ratio), _ratios),
    ((Ratio, Scalar), _ratio_given),
    ((Scalar, Ratio), _ratio_truth),
    ((Words, Words), _texts),
    ((Several, Several), _several),
    ((Bracketed, Bracketed), _groups),
    ((Several, Bracketed), _several_given),
    ((Bracketed, Several), _several_truth),
    ((Matrix, Matrix), _matrices),
    ((Bracketed, Matrix), _vector),
    ((Matrix, Bracketed), _vector_given),
    ((Scalar, Matrix), _identity_given),
    ((Matrix, Scalar), _identity_truth),
    ((Reaction, Reaction), same_reaction),
    ((Relation, Relation), _equations),
    ((Named, Relation), _equation_of_name),
    ((Relation, Named), _equation_by_name),
    ((Named, Named), _named),
    ((Interval | Region, Interval | Region), _regions),
    ((Region, Bracketed), _region_and_set),
    ((Bracketed, Region), _region_and_set),
    ((Named, object), _named_given),
    ((object, Named), _named_truth),
    ((Choice, object), _choice_given),
    ((object, Choice), _choice_truth),
    ((Scalar | Quantity | Words | Clock, Bracketed), _single),
    ((Bracketed, Scalar | Quantity | Words | Clock), _single_given),
)
