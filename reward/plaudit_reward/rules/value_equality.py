"""Compare two values that hold no other answers, and say why they are equal.

Such are numbers, quantities, numerals, times, texts, and sets of real numbers. Numbers and expressions are compared by
``expression_equality``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from plaudit_reward.rules.answer_types import (
    Based,
    Bracketed,
    Clock,
    Date,
    Division,
    Interval,
    Quantity,
    Ratio,
    Reaction,
    Reading,
    Region,
    Residue,
    Roman,
    Scalar,
    Shells,
    Value,
    Words,
)
from plaudit_reward.rules.chemistry import same_reaction
from plaudit_reward.rules.expression_equality import same_family, same_node
from plaudit_reward.rules.expressions import PI, Node, exact, names_pi, number, scaled
from plaudit_reward.rules.quantities import MONTHS
from plaudit_reward.rules.regions import same_region_and_set, same_regions
from plaudit_reward.rules.units import DEGREE, GENERIC, HOUR, PERCENT, RADIAN, Unit


def _scalars(given: Scalar, truth: Scalar) -> str | None:
    return same_node(given.node, truth.node) or same_family(given.node, truth.node)


def _quantities(given: Quantity, truth: Quantity) -> str | None:
    ours, theirs = given.unit, truth.unit
    if ours.dimension is not None and theirs.dimension is not None:
        if {ours, theirs} == {DEGREE, RADIAN}:
            return _quantities(_in_degrees(given), _in_degrees(truth))
        if ours.dimension != theirs.dimension or (ours.words and theirs.words and ours.words != theirs.words):
            return None
        reason = same_node(scaled(given.node, ours.factor / theirs.factor), truth.node)
        return reason and f"{reason}, in the same unit"
    return same_node(given.node, truth.node) if _same_words(ours, theirs) else None


def _same_words(ours: Unit, theirs: Unit) -> bool:
    if ours.words & theirs.words:
        return True
    if dimension := ours.dimension or theirs.dimension:
        lengths = {f"unit^{power}" for base, power in dimension if base == "length"} if len(dimension) == 1 else set()
        return (ours.words | theirs.words) <= {"unit"} | lengths
    return any(unit.dimension is None and unit.words <= GENERIC | _STEMS for unit in (ours, theirs))


_STEMS = frozenset(word.removesuffix("s") for word in GENERIC)


def _bare_given(given: Scalar, truth: Quantity) -> str | None:
    """Compare a number without unit: it is meant in the truth's unit. A percentage may also be the ratio."""
    unit = truth.unit
    if _is_percentage(unit):
        ratio = same_node(given.node, scaled(truth.node, unit.factor))
        return ratio or same_node(given.node, truth.node)
    if unit == DEGREE and names_pi(given.node) and not names_pi(truth.node):
        return same_node(_in_degrees(Quantity(given.node, RADIAN)).node, truth.node)
    return same_node(given.node, truth.node) if unit.spelled or unit.dimension is not None else None


def _is_percentage(unit: Unit) -> bool:
    return unit._replace(words=frozenset()) == PERCENT


def _in_degrees(angle: Quantity) -> Quantity:
    if angle.unit != RADIAN:
        return angle
    return Quantity(Node("/", (Node("*", (angle.node, number(180))), PI)), DEGREE)


def _bare_truth(given: Quantity, truth: Scalar) -> str | None:
    """Compare with a truth without unit: the question names it. A percentage is a ratio, or a percentage above 1."""
    if not given.unit.spelled:
        return None
    if given.unit == DEGREE and names_pi(truth.node):
        return None if names_pi(given.node) else _bare_given(truth, given)
    if _is_percentage(given.unit):
        ratio = same_node(scaled(given.node, given.unit.factor), truth.node)
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


def _clock_and_duration(given: Clock | Quantity, truth: Clock | Quantity) -> str | None:
    """Compare ``2:30`` with 2 h 30 min, or with 2 min 30 s."""
    clock, duration = (given, truth) if isinstance(given, Clock) else (truth, given)
    if not isinstance(clock, Clock) or not isinstance(duration, Quantity):
        return None
    if clock.half or duration.unit.dimension != HOUR.dimension or not duration.unit.spelled:
        return None
    seconds = (Fraction(clock.seconds), *([Fraction(clock.seconds, 60)] if clock.seconds % 60 == 0 else []))
    value = exact(scaled(duration.node, duration.unit.factor))
    return "the same time" if value in seconds else None


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


def _ratio_and_number(given: Ratio | Scalar, truth: Ratio | Scalar) -> str | None:
    ours, theirs = (_quotient(value) if isinstance(value, Ratio) else value.node for value in (given, truth))
    return same_node(ours, theirs) if ours and theirs else None


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


_DAYS = re.findall(r"\w+", "monday tuesday wednesday thursday friday saturday sunday")
_SYNONYMS = (
    {"dne", "does not exist", "doesn't exist", "it does not exist", "limit does not exist", "nonexistent"},
    {"undefined", "not defined", "is undefined"},
    {"diverges", "divergent", "is divergent", "it diverges", "does not converge", "doesn't converge", "not convergent"},
    {"cannot be determined", "can't be determined", "not enough information", "insufficient information"},
    *({name[:3], name} for name in (*_DAYS, *MONTHS)),
    {"infinitely many", "infinitely many solutions", "infinite number of solutions", "infinite solutions"},
)


def _compact(text: str) -> str:
    return re.sub(r"(?<=\w)[\s-]+(?=\w)", "", text)


Comparison = tuple[tuple[Any, Any], Callable[[Any, Any], str | None]]
_EXACT = {
    Based: "the same numeral in the same base",
    Residue: "the same remainder",
    Division: "the same quotient and remainder",
    Shells: "the same electron configuration",
}
"""Values that have one form, and why two of them are equal."""


def _exact(given: Value, truth: Value) -> str | None:
    return _EXACT[type(truth)] if given == truth else None


COMPARISONS: tuple[Comparison, ...] = (
    *(((kind, kind), _exact) for kind in _EXACT),
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
    ((Clock, Quantity), _clock_and_duration),
    ((Quantity, Clock), _clock_and_duration),
    ((Date, Date), _dates),
    ((Ratio, Ratio), _ratios),
    ((Ratio, Scalar), _ratio_and_number),
    ((Scalar, Ratio), _ratio_and_number),
    ((Words, Words), _texts),
    ((Reaction, Reaction), same_reaction),
    ((Interval | Region, Interval | Region), same_regions),
    ((Region, Bracketed), same_region_and_set),
    ((Bracketed, Region), same_region_and_set),
)
"""The functions that compare these types, the first that fits."""
