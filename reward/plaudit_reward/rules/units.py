"""Know units: which measure the same, and how many of one make another."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

Dimension = tuple[tuple[str, int], ...]


class Unit(NamedTuple):
    """Hold the unit of a quantity: a known one has a dimension and a factor, any other the words that name it."""

    dimension: Dimension | None
    factor: Fraction
    words: frozenset[str] = frozenset()
    spelled: bool = True
    r"""False: a single letter of a formula, such as ``5m``, which may be a variable."""


def _table(dimension: Dimension, **factors: str) -> dict[str, tuple[Dimension, Fraction]]:
    table = {}
    for factor, names in factors.items():
        value = Fraction(factor.removeprefix("f").replace("_", "/", 1).replace("p", "."))
        table.update(dict.fromkeys(names.split(), (dimension, value)))
    return table


_LENGTH, _MASS, _TIME, _ANGLE = (("length", 1),), (("mass", 1),), (("time", 1),), (("angle", 1),)
_AREA, _VOLUME, _MONTHS = (("length", 2),), (("length", 3),), (("months", 1),)
_POWER_S = (("length", 2), ("mass", 1), ("time", -3))
UNITS: dict[str, tuple[Dimension, Fraction]] = {
    **_table(_LENGTH, f1="m meter metre", f1000="km kilometer kilometre", f1_100="cm centimeter centimetre"),
    **_table(_LENGTH, f1_1000="mm millimeter millimetre", f1_1000000="μm um micron", f1_1000000000="nm nanometer"),
    **_table(_LENGTH, f1_10000000000="Å angstrom ångström ångstrom"),
    **_table(_LENGTH, f1_10="dm decimeter", f254_10000="in inch inches", f3048_10000="ft foot feet"),
    **_table(_LENGTH, f9144_10000="yd yard", f1609344_1000="mi mile"),
    **_table(_MASS, f1="kg kilogram", f1_1000="g gram gm", f1_1000000="mg milligram", f1000="t tonne"),
    **_table(_MASS, f45359237_100000000="lb lbs pound", f45359237_1600000000="oz ounce", f90718474_100000="ton"),
    **_table(_TIME, f1="s sec second", f60="min minute", f3600="h hr hour", f86400="day", f604800="week"),
    **_table(_TIME, f1_1000="ms millisecond"),
    **_table(_MONTHS, f1="month", f12="year yr"),
    **_table(_ANGLE, f1="° degree deg", f1_60="arcminute", f360="revolution rev"),
    **_table((("radians", 1),), f1="rad radian"),
    **_table((("dollars", 1),), f1="¤ dollar buck usd", f1_100="cent ¢"),
    **_table((("euros", 1),), f1="€ euro eur"),
    **_table((("sterling", 1),), f1="£ gbp", f1_100="pence penny"),
    **_table((("yen", 1),), f1="¥ yen yuan 元 円"),
    **_table((("rupees", 1),), f1="₹ rupee rs"),
    **_table(_VOLUME, f1_1000="L l liter litre", f1_1000000="mL ml milliliter millilitre cc"),
    **_table((("gallons", 1),), f1="gallon gal", f1_4="quart", f1_8="pint", f1_16="cup"),
    **_table(_AREA, f10000="hectare ha", f40468564224_10000000="acre"),
    **_table((("length", 1), ("time", -1)), f1609344_3600000="mph", f1000_3600="kph kmh kmph"),
    **_table((("length", 1), ("mass", 1), ("time", -2)), f1="N newton", f1000="kN kilonewton"),
    **_table((("length", 2), ("mass", 1), ("time", -2)), f1="J joule", f1000="kJ kilojoule"),
    **_table((("length", 2), ("mass", 1), ("time", -2)), f1602176634_10000000000000000000000000000="eV electronvolt"),
    **_table(_POWER_S, f1="W watt", f1000="kW kilowatt"),
    **_table((("length", -1), ("mass", 1), ("time", -2)), f1="Pa pascal", f1000="kPa", f101325="atm atmosphere"),
    **_table((("length", -1), ("mass", 1), ("time", -2)), f100000="bar", f101325_760="torr mmHg mmhg"),
    **_table((("coulombs", 1),), f1="C coulomb"),
    **_table((("teslas", 1),), f1="T tesla"),
    **_table((("farads", 1),), f1="F farad"),
    **_table((("volts", 1),), f1="V volt"),
    **_table((("amperes", 1),), f1="A amp ampere"),
    **_table((("ohms", 1),), f1="ohm Ω"),
    **_table((("time", -1),), f1="Hz hertz", f1000="kHz"),
    **_table((("kelvins", 1),), f1="K kelvin"),
    **_table((("moles", 1),), f1="mol mole"),
    **_table((("length", -3), ("moles", 1)), f1000="M molar"),
    **_table((("celsius", 1),), f1="°C celsius"),
    **_table((("fahrenheit", 1),), f1="°F fahrenheit"),
    **_table((), f1_100="% percent percentage pct"),
}
_PREFIXES = {"n": Fraction(1, 10**9), "μ": Fraction(1, 10**6), "m": Fraction(1, 1000)}
_PREFIXES |= {"k": Fraction(1000), "M": Fraction(10**6), "G": Fraction(10**9)}
UNITS |= {
    prefix + name: (UNITS[name][0], UNITS[name][1] * _PREFIXES[prefix])
    for prefix, names in {
        "n": ("s", "F", "C"),
        "μ": ("s", "g", "F", "C", "A", "V"),
        "m": ("A", "V", "W", "J", "mol"),
        "k": ("V", "A", "Ω", "mol", "eV"),
        "M": ("eV", "Hz", "W", "J", "N", "Pa", "Ω"),
        "G": ("eV", "Hz", "W", "J", "Pa"),
    }.items()
    for name in names
}
"""Dimension and factor by name, in the singular."""
PERCENT = Unit((), Fraction(1, 100))
DEGREE = Unit((("angle", 1),), Fraction(1))
RADIAN = Unit((("radians", 1),), Fraction(1))
HOUR = Unit(_TIME, Fraction(3600))
MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
MULTIPLIERS |= {f"{name}s": MULTIPLIERS[name] for name in ("hundred", "thousand", "million", "billion", "dozen")}
_FILLERS = frozenset(
    re.findall(
        r"\w+",
        "of the a an in total long wide tall high away old each away altogether about approximately roughly exactly "
        "only around is are more less left",
    )
)
GENERIC = frozenset(
    re.findall(
        r"\w+",
        "unit units way ways possibilities possibility time times item items value values solution solutions number "
        "numbers people person students total different distinct possible integer integers such",
    )
)
"""Words that may stand beside any count."""
_FACTOR = re.compile(r"(?P<word>[^\W\d_]+|[%¤€£¥₹¢]|°[CF]?)(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?|(?P<per>/)")


_OF_TEMPERATURE = re.compile(r"(?i)(?:degrees?|deg|°)\s*(celsius|fahrenheit|[CF]\b)")
_SQUARED = re.compile(r"([^\W\d_]+)\s+(squared|cubed)\b")
_METRES_PER_SECOND = re.compile(r"\bms\s*\^\s*(\{?\s*-)")


def unit_of(text: str) -> Unit | None:
    """Return the unit that words and signs name, such as ``cm^2`` or ``miles per hour``; None without a word."""
    text = _SQUARED.sub(lambda found: f"{found[1]}^{2 if found[2] == 'squared' else 3}", text)
    text = _OF_TEMPERATURE.sub(lambda found: f"°{found[1][0].upper()}", text)
    text = _METRES_PER_SECOND.sub(r"m s^\1", text)
    dimension: dict[str, int] = {}
    factor, sign, next_power, known = Fraction(1), 1, 1, False
    unknown: list[str] = []
    for found in _FACTOR.finditer(text):
        word = found["word"]
        if found["per"] or word == "per" or (word == "a" and known):
            sign = -1
            continue
        if word.casefold() in ("square", "sq", "squared", "cubic", "cu"):
            next_power = 3 if word.casefold() in ("cubic", "cu") else 2
            continue
        unit = _known(word)
        power = sign * int(found["power"] or next_power)
        next_power = 1
        if unit is None:
            stem = _stem(word)
            unknown += (
                [] if word.casefold() in _FILLERS else [stem if power == 1 or stem != "unit" else f"unit^{power}"]
            )
            continue
        known = True
        for base, exponent in unit[0]:
            dimension[base] = dimension.get(base, 0) + exponent * power
        factor *= unit[1] ** power
    if known and (not unknown or dimension):
        return Unit(tuple(sorted((base, power) for base, power in dimension.items() if power)), factor)
    return Unit(None, Fraction(1), frozenset(unknown)) if unknown or text.strip() else None


_PART_OF_UNIT = re.compile(
    r"\s*(?:\{\})?\s*(?:(?P<word>°[CF]?|[^\W\d_]+)(?:\s*\^\s*(?:\{\s*)?(?P<power>-?\d)(?:\s*\})?)?"
    r"|(?P<per>/)(?P<all>\s*\()?|(?P<end>\))|\\cdot(?![a-zA-Z])|\\[,;:! ]|[~*])\s*"
)


def unit_product(text: str) -> str:
    r"""Return the units of ``J/(g\cdot K)`` or ``m\,s^{-2}`` with their powers, ``J g^{-1} K^{-1}``.

    Empty if anything in the text is no unit, or it is a single one.
    """
    parts, at, sign, whole = [], 0, 1, False
    while at < len(text):
        found = _PART_OF_UNIT.match(text, at)
        if found is None or (found["word"] and found["word"] not in UNITS):
            return ""
        at = found.end()
        if found["per"]:
            sign, whole = -1, bool(found["all"])
        elif found["end"]:
            if not whole:
                return ""
            sign, whole = 1, False
        elif found["word"]:
            power = sign * int(found["power"] or 1)
            parts.append(found["word"] if power == 1 else f"{found['word']}^{{{power}}}")
    return " ".join(parts) if len(parts) > 1 or "^" in text else ""


_SI_PARTS = {"per": "/", "squared": "^2", "cubed": "^3", "degreeCelsius": "°C", "percent": "%"}
_SI_PREFIXES = re.compile(r"\\(kilo|milli|centi|micro|nano|mega|giga|deci)\s*\\")
_SI_COMMAND = re.compile(r"\\([a-zA-Z]+)\s*")


def si_unit(text: str) -> str:
    r"""Return the unit of siunitx's ``\kilo\meter\per\second``: ``kilometer / second``."""
    joined = _SI_PREFIXES.sub(r"\\\1", text)
    return _SI_COMMAND.sub(lambda found: f"{_SI_PARTS.get(found[1], ' ' + found[1])}", joined).strip()


def _known(word: str) -> tuple[Dimension, Fraction] | None:
    for name in (word, word.casefold(), _stem(word)):
        if name in UNITS:
            return UNITS[name]
    return None


def _stem(word: str) -> str:
    word = word.casefold()
    return word[:-1] if word.endswith("s") and len(word) > 3 and not word.endswith("ss") else word
