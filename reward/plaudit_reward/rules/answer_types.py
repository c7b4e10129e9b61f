"""The typed values of mathematical answers: numbers, quantities, sets, intervals, choices, words.

A text may have several readings, such as ``(1, 2)``, a point and an interval; a value that holds others holds all
readings of each.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from plaudit_reward.rules.expressions import Node
from plaudit_reward.rules.units import Unit


class Scalar(NamedTuple):
    """A number or an expression."""

    node: Node


class Quantity(NamedTuple):
    """A number with a unit."""

    node: Node
    unit: Unit


class Based(NamedTuple):
    """A numeral with its number base."""

    digits: str
    base: int


class Roman(NamedTuple):
    """A Roman numeral; ``names`` says what its letters are taken for: ``number``, ``numeral`` or only ``letters``.

    A text that says so is a number. Letters such as ``XIV`` are a numeral, and those such as ``CD`` may be names.
    """

    value: int
    names: str


class Residue(NamedTuple):
    """The integers that leave the same remainder when divided by ``modulus``, such as 3 (mod 7)."""

    remainder: int
    modulus: int


class Division(NamedTuple):
    """What a division of integers leaves, such as 7 remainder 2."""

    quotient: int
    remainder: int


class Clock(NamedTuple):
    """A time of day; ``half`` is ``am``, ``pm`` or empty."""

    seconds: int
    half: str


class Date(NamedTuple):
    """A day of the calendar; ``year`` is None where none is given."""

    year: int | None
    month: int
    day: int


class Ratio(NamedTuple):
    """Numbers between colons."""

    items: tuple[Reading, ...]


class Words(NamedTuple):
    """A text; in the form of ``words_of`` if it is prose, and not a formula that has no other reading."""

    text: str
    is_prose: bool = True


class Choice(NamedTuple):
    """The letter of an option, and what it says, if that is given."""

    letter: str
    says: Reading


class Several(NamedTuple):
    """Answers between commas, "and" or "or", without brackets; ``names`` are those before equals signs."""

    items: tuple[Reading, ...]


class Bracketed(NamedTuple):
    """Items in brackets: a ``set``, a ``tuple``, or a ``list`` in square brackets."""

    kind: str
    items: tuple[Reading, ...]


class Interval(NamedTuple):
    """The numbers between two ends."""

    lower: Node
    upper: Node
    with_lower: bool
    with_upper: bool


class Region(NamedTuple):
    """A set of real numbers: intervals and points, ``without`` some others, and ``within`` each of other sets."""

    pieces: tuple[Interval | Bracketed, ...]
    without: tuple[Interval | Bracketed, ...] = ()
    within: tuple[Region, ...] = ()


class Matrix(NamedTuple):
    """Rows of items; ``kind`` is ``matrix``, or that of other bars around it."""

    kind: str
    rows: tuple[tuple[Reading, ...], ...]


class Substance(NamedTuple):
    """A chemical formula with its charge; ``state`` is ``s``, ``l``, ``g``, ``aq`` or empty."""

    formula: str
    amount: Fraction
    state: str


class Reaction(NamedTuple):
    """Substances on one side, or two sides with ``→``, ``⇌`` or ``=`` between them; each side is sorted."""

    arrow: str
    sides: tuple[tuple[Substance, ...], ...]


class Shells(NamedTuple):
    """An electron configuration: the subshells with their electrons, such as ``2p6``."""

    filled: frozenset[str]


class Named(NamedTuple):
    """A value with the name that an equation gives it, such as ``x = 3``."""

    name: str
    value: Reading


class Relation(NamedTuple):
    """An equation or an inequality that gives no value."""

    sign: str
    left: Node
    right: Node


Value = (
    Scalar
    | Quantity
    | Based
    | Residue
    | Division
    | Clock
    | Date
    | Ratio
    | Words
    | Choice
    | Several
    | Bracketed
    | Interval
    | Region
    | Matrix
    | Roman
    | Reaction
    | Shells
    | Named
) | Relation
Reading = tuple[Value, ...]
"""All readings of one text, the most likely one first."""
COMPOUND_NAME = "="
"""The name of a value whose equation names it by an expression, such as ``a + b = 10``."""
