r"""Read single values out of an answer: numerals, times, dates, ratios, numbers with what they count or measure."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from plaudit_reward.rules.answer_text import WORD, WORD_END, split, words_of
from plaudit_reward.rules.answer_types import (
    Based,
    Clock,
    Date,
    Division,
    Quantity,
    Ratio,
    Residue,
    Roman,
    Scalar,
    Value,
)
from plaudit_reward.rules.expressions import Node, NotAnExpressionError, number, parsed, scaled
from plaudit_reward.rules.units import DEGREE, MULTIPLIERS, PERCENT, Unit, unit_of, unit_product

_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = dict(
    zip(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], range(20, 100, 10), strict=True)
)
_CARDINALS = {**{word: value for value, word in enumerate(_ONES)}, **_TENS}
_ORDINAL_WORDS = re.findall(
    r"\w+",
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth",
)
_ORDINALS = {**{word: value for value, word in enumerate(_ORDINAL_WORDS, 1)}, "thirtieth": 30}
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "third": 3, "thirds": 3, "fourth": 4, "fourths": 4}
_PARTS |= {f"{word}{ending}": value for word, value in _ORDINALS.items() if value > 4 for ending in ("", "s")}


_CHINESE = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_CHINESE_POWERS = {"十": 10, "百": 100, "千": 1000}
_CHINESE_NUMBER = re.compile(r"([零〇一二两兩三四五六七八九十百千]+)(?:(万)([零〇一二两兩三四五六七八九十百千]*))?(.*)")


def _number_in_chinese(words: str) -> tuple[int, int, str] | None:
    found = _CHINESE_NUMBER.fullmatch(words)
    if found is None:
        return None
    high, low = _below_ten_thousand(found[1]), _below_ten_thousand(found[3] or "")
    return high * 10_000 + low if found[2] else high, 1, found[4]


def _below_ten_thousand(signs: str) -> int:
    if all(sign in _CHINESE for sign in signs):
        return int("".join(str(_CHINESE[sign]) for sign in signs) or 0)
    total = digit = 0
    for sign in signs:
        if sign in _CHINESE_POWERS:
            total += max(digit, 1) * _CHINESE_POWERS[sign]
            digit = 0
        else:
            digit = _CHINESE[sign]
    return total + digit


_MOST_WORDS = 12
"""Before the fraction of a mixed number."""


def number_of_words(words: str) -> tuple[int, int, str] | None:
    """Return the number at the beginning of the words, as numerator and denominator, and the words that follow it."""
    if (chinese := _number_in_chinese(words)) is not None:
        return chinese
    parts = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", words.casefold()).split()
    parts = parts[1:] if parts[:1] == ["the"] else parts
    return _mixed_number(parts) or _plain_number(parts)


def _plain_number(parts: list[str]) -> tuple[int, int, str] | None:
    """Read a number without "and a half" from the beginning of the words."""
    sign = -1 if parts[:1] in (["minus"], ["negative"]) else 1
    parts = parts[1:] if sign < 0 else parts
    total = current = used = 0
    for index, word in enumerate(parts):
        if word in _CARDINALS:
            current += _CARDINALS[word]
        elif word == "hundred" and index:
            current *= 100
        elif word in MULTIPLIERS and index and current:
            total, current = total + current * MULTIPLIERS[word], 0
        elif (
            word == "and"
            and used
            and index + 1 < len(parts)
            and parts[index + 1] in _CARDINALS
            and parts[index - 1] not in _CARDINALS
        ):
            pass
        else:
            break
        used = index + 1
    if used == len(parts) - 1 and parts[used - 1] in _TENS and 0 < _ORDINALS.get(parts[used], 0) < 10:
        return total + current + _ORDINALS[parts[used]], 1, ""  # twenty-first
    if used and used < len(parts) and parts[used] in _PARTS and total + current and parts[used] != "second":
        return sign * (total + current), _PARTS[parts[used]], " ".join(parts[used + 1 :])
    if not used and parts[:1] in (["half"], ["quarter"]):
        rest = parts[2:] if parts[1:2] == ["of"] else parts[1:]
        if not rest or rest[0] in ("a", "an"):
            return sign, _PARTS[parts[0]], " ".join(rest[1:])
    if len(parts) == 1 and parts[0] in _ORDINALS:
        return _ORDINALS[parts[0]], 1, ""
    return (sign * (total + current), 1, " ".join(parts[used:])) if used else None


def _mixed_number(parts: list[str]) -> tuple[int, int, str] | None:
    """Read ``three and a half`` and ``one and three quarters``."""
    for at in (index for index, word in enumerate(parts[:_MOST_WORDS]) if word == "and" and index):
        fraction = ["one", *parts[at + 2 :]] if parts[at + 1 : at + 2] in (["a"], ["an"]) else parts[at + 1 :]
        whole, part = _plain_number(parts[:at]), _plain_number(fraction)
        if whole and part and not whole[2] and whole[1] == 1 and 0 < part[0] < part[1]:
            sign = -1 if whole[0] < 0 else 1
            return whole[0] * part[1] + sign * part[0], part[1], part[2]
    return None


_BASED = re.compile(
    rf"\(?\s*([0-9A-Za-z]+)\s*\)?\s*_\s*\{{?\s*\(?(?:{WORD})?(?:base\s*(?:{WORD_END}\s*)?)?([a-z]+|\d{{1,2}})(?:{WORD_END})?\)?\s*\}}?"
)
_BASE_NAMES = {name: _CARDINALS[name] for name in (*_ONES[2:13], "sixteen")}
_BASE_NAMES |= {"binary": 2, "octal": 8, "hexadecimal": 16}
_BASE_NAMES |= {"bin": 2, "oct": 8, "dec": 10, "hex": 16}
_SPACES_IN_NUMERAL = re.compile(r"(?<=[0-9A-F])\s+(?=[0-9A-F]+\s*\)?\s*_)")


_PREFIXED = re.compile(r"0\s*([xob])\s*([0-9a-f]+)", re.IGNORECASE)
_NAMED_BASE = re.compile(
    rf"\(?([0-9A-Za-z]+)\)?\s*\(?\s*{WORD}(?:in )?(?:base[ -]?([a-z]*)|(binary|octal|hexadecimal)){WORD_END}"
    r"\s*-?\s*(\d{1,2})?\s*\)?"
)


def numeral(plain: str) -> list[Value]:
    """Read a numeral with its base: ``1101_2``, ``1101 (base 2)``, ``0xFF``."""
    plain = re.sub(r"\\(?:over|under)line\s*\{([0-9A-Z]+)\}(?=\s*_)", r"\1", plain)
    bare = _SPACES_IN_NUMERAL.sub("", plain.replace(WORD, "").replace(WORD_END, ""))
    if prefixed := _PREFIXED.fullmatch(bare):
        plain = f"{prefixed[2].upper()}_{ {'x': 16, 'o': 8, 'b': 2}[prefixed[1].lower()] }"
    elif named := _NAMED_BASE.fullmatch(plain):
        plain = f"{named[1]}_{named[4] or named[3] or named[2] or 0}"
    found = _BASED.fullmatch(plain) or _BASED.fullmatch(bare)
    hexadecimal = found is not None and found[2] == "16" and found[1] in "ABCDEF"
    if found is None or not (
        hexadecimal or any(sign.isdigit() for sign in found[1]) or (len(found[1]) > 1 and found[2].isdigit())
    ):
        return []
    base = int(found[2]) if found[2].isdigit() else _BASE_NAMES.get(found[2], 0)
    digits = found[1].upper().lstrip("0") or "0"
    if not 2 <= base <= 36 or any(int(sign, 36) >= base for sign in digits):
        return []
    return [Based(digits, base)]


_ROMAN_NUMERAL = re.compile(r"(?=.)M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
_ROMAN_LETTERS = dict(zip("IVXLCDM", (1, 5, 10, 50, 100, 500, 1000), strict=True))
_NAMED_ROMAN = re.compile(
    r"(?i)(?:the )?roman numerals? (?=[IVXLCDM]+\Z)|(?<=[IVXLCDM])\s*\(?(?:in )?roman numerals?\)?\Z"
)


def roman_numeral(plain: str) -> list[Value]:
    """Read ``XIV``, and ``Roman numeral X``; a letter without these words is a letter."""
    bare = plain.replace(WORD, "").replace(WORD_END, "").strip()
    letters = _NAMED_ROMAN.sub("", bare)
    if not _ROMAN_NUMERAL.fullmatch(letters) or len(bare) == 1:
        return []
    likely = "numeral" if len(letters) > 3 or set(letters) <= set("IVX") else "letters"
    return [Roman(_roman_value(letters), likely if letters == bare else "number")]


def _roman_value(letters: str) -> int:
    values = [_ROMAN_LETTERS[letter] for letter in letters]
    return sum(-value if value < after else value for value, after in zip(values, [*values[1:], 0], strict=True))


_RESIDUE = re.compile(
    rf"(?:[a-z]\s*≡)?\s*(-?\d+)\s*\(?\s*(?:\\[pb]?mod|{WORD}modulo{WORD_END})\s*\{{?\s*(\d+)\s*\}}?\s*\)?"
)


def residue(plain: str) -> list[Value]:
    r"""Read ``x \equiv 3 \pmod 7``."""
    found = _RESIDUE.fullmatch(plain)
    return [Residue(int(found[1]) % int(found[2]), int(found[2]))] if found and int(found[2]) else []


_TIME = re.compile(
    rf"(\d{{1,2}})(?:\s*:\s*(\d\d))?(?:\s*:\s*(\d\d))?\s*{WORD}?\s*([aApP]\s*\.?\s*[mM]\.?|noon|[oO]'clock|hours)?\s*{WORD_END}?"
)


_PART_OF_DAY = re.compile(rf"{WORD}(?:o'clock )?in the (morning|afternoon|evening){WORD_END}")


_PAST = re.compile(r"(half|quarter|\w+(?: minutes)?) (past|to|after|before) (\w+)(?: o'clock)?")


def time_of_day(plain: str) -> list[Value]:
    """Read ``10:30 AM``, ``14:05``, ``noon`` and ``half past six``."""
    words = words_of(plain) if WORD in plain else ""
    if (hour := {"noon": 12, "midnight": 0}.get(words)) is not None:
        return [Clock(hour * 3600, "")]
    if past := _PAST.fullmatch(words):
        return _past(*past.groups())
    plain = _PART_OF_DAY.sub(lambda found: f"{WORD}{'am' if found[1] == 'morning' else 'pm'}{WORD_END}", plain)
    found = _TIME.fullmatch(plain.replace(f"{WORD}at{WORD_END}", ""))
    if found is None or (found[2] is None and (found[4] or "hours").startswith("hours")):
        return []
    hours, minutes, seconds = int(found[1]), int(found[2] or 0), int(found[3] or 0)
    if hours > 24 or minutes > 59 or seconds > 59:
        return []
    half = re.sub(r"[^apm]", "", (found[4] or "").casefold())
    return [Clock(hours * 3600 + minutes * 60 + seconds, half if half in ("am", "pm") else "")]


def _past(minutes: str, sign: str, hour: str) -> list[Value]:
    """Return the time so many minutes before or after the hour."""
    named = {"half": 30, "quarter": 15}.get(minutes)
    count, of = (
        int(text) if text.isdecimal() else (number_of_words(text) or (0,))[0]
        for text in (minutes.removesuffix(" minutes"), hour)
    )
    past = named or count
    if not (1 <= of <= 12 and 1 <= past < 60) or not (named or sign == "past" or minutes.endswith(" minutes")):
        return []
    return [Clock((of * 60 + (past if sign in ("past", "after") else -past)) * 60, "")]


MONTHS = re.findall(r"\w+", "january february march april may june july august september october november december")
_MONTHS = {name[:length]: month for month, name in enumerate(MONTHS, 1) for length in (3, 4, len(name))}
_DAY_OF_MONTH = re.compile(
    r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?(?:on )?(?:the )?"
    r"(?:(?P<m>[a-z]{3,9})\.? (?:the )?(?P<d>\d{1,2})(?: ?(?:st|nd|rd|th))?"
    r"|(?P<e>\d{1,2})(?: ?(?:st|nd|rd|th))?(?: day)?(?: of)? (?P<n>[a-z]{3,9})\.?)(?:,? (?:in )?(?P<y>\d{4}))?"
)
_NUMBERED_DATE = re.compile(
    r"(?P<y>\d{4})([-/.])(?P<m>\d\d)\2(?P<d>\d\d)|(?P<e>1[3-9]|2\d|3[01])([./])(?P<n>\d\d?)\6(?P<z>\d{4})"
)


def date(plain: str) -> list[Value]:
    """Read a date: ``July 4, 1776``, ``4th of July``, ``1776-07-04``. One that may be of two days is none."""
    text = " ".join(re.sub(rf"[{WORD}{WORD_END}^{{}}]", " ", plain).casefold().split())
    text = re.sub(r" (?=[.,])", "", text)
    if found := _DAY_OF_MONTH.fullmatch(text):
        month, day, year = _MONTHS.get(found["m"] or found["n"], 0), found["d"] or found["e"], found["y"]
    elif found := _NUMBERED_DATE.fullmatch(text):
        month, day, year = int(found["m"] or found["n"]), found["d"] or found["e"], found["y"] or found["z"]
    else:
        return []
    return [Date(int(year) if year else None, month, int(day))] if 1 <= month <= 12 and 1 <= int(day) <= 31 else []


_TO, _OF_ALL = re.compile(rf"\s*{WORD}to{WORD_END}\s*"), re.compile(rf"\s*{WORD}(?:out of|in every|in){WORD_END}\s*")


def ratio(plain: str) -> list[Value]:
    """Read ``3:4`` and ``3 to 4``; ``3 out of 4`` is a fraction."""
    if len(counted := _OF_ALL.split(plain)) == 2 and all(part.strip().isdecimal() for part in counted):
        return [Scalar(Node("/", (parsed(counted[0]), parsed(counted[1]))))]
    plain = _TO.sub(":", plain)
    parts = split(plain, ":")
    if len(parts) < 2 or not all(part.strip() for part in parts):
        return []
    items = tuple((Scalar(parsed(part)),) for part in parts)
    return [Ratio(items)]


_REMAINDER = re.compile(rf"(\d+),?\s*(?:{WORD}(?:with )?(?:a )?(?:rem|remainder)(?: of)?{WORD_END}|[Rr])\s*(\d+)")


def remainder(plain: str) -> list[Value]:
    """Read the result of a division, ``7 R 2`` or ``7 remainder 2``."""
    found = _REMAINDER.fullmatch(plain)
    return [Division(int(found[1]), int(found[2]))] if found else []


_ORDINAL = re.compile(rf"(-?\d+)\s*\^?\s*\{{?\s*{WORD}?(?:st|nd|rd|th)(?![a-z]){WORD_END}?\s*\}}?(.*)", re.DOTALL)
_CURRENCIES = "¤€£¥₹"
_TAIL = re.compile(
    rf"\s*(?P<tail>(?:(?:°[CF]?|%|¢|{WORD}[^{WORD_END}]*{WORD_END}|[{_CURRENCIES}])(?:\s*\^\s*\{{?\s*-?\d\s*\}}?)?\s*"
    rf"(?:(?:/|\\cdot)\s*(?=[A-Za-z{WORD}]))?(?:(?<=/)\s*[a-zA-Z](?:\s*\^\s*\{{?\s*-?\d\s*\}}?)?\s*)?)+)\Z"
)
_COMPOUND = re.compile(
    rf"(?P<number>-?(?:\d+(?:\.\d+)?|\d*\\frac\{{\d+\}}\{{\d+\}}))\s*(?:{WORD}(?P<unit>[^{WORD_END}]+){WORD_END}|(?P<letter>[hms])(?![A-Za-z]))[\s,]*"
)
_NO_UNIT = re.compile(
    r"(?i)(?<![a-z])(?:or|and|not|no|if|when|where|unless|except|any|anything|every|all|multiples?|than|least|most|but|"
    r"is|are|for|because|since|then|mod|modulo)(?![a-z])"
)
LABEL = re.compile(
    rf"^{WORD}(?!(?:(?i:option|choice|answer)\s+)?[A-J]\b)[^{WORD_END}\d]*(?::\s*{WORD_END}|{WORD_END}\s*:)\s*(?=[-\d\\¤])|^pH\s+(?=\d)"
)
"""As in ``Total: 12`` and ``pH 7``."""
ABOUT = re.compile(
    rf"(?i)^(?:{WORD}(?:(?:the |my )?(?:final |correct )?(?:answer|result|value)(?: is)?:?|about|"
    rf"approximately|approx|roughly|exactly|around|only|the|is|it is|it's|equals|there are|there is){WORD_END}:?|≈)\s*"
)


def quantity(plain: str) -> list[Value]:
    """Read a number with its unit or with what it counts, in digits or in words."""
    plain = ABOUT.sub("", plain)
    product = _in_product_of_units(plain)
    return product or _compound(plain) or _in_feet_or_degrees(plain) or _place(plain) or _simple_quantity(plain)


_NUMBER_AND_UNITS = re.compile(
    r"(?P<number>-?\d+(?:\.\d+)?(?:\s*\\(?:cdot|times)\s*10\s*\^\s*(?:\{\s*-?\d+\s*\}|\d+))?"
    r"|\([\d.]+ \\cdot 10\^\{[-+]?\d+\}\))"
    r"\s+(?P<units>[^\W\d_].*)"
)


_JOINED_UNITS = re.compile(r"(?:[A-Z]|[A-Za-z]{2,})(?:\s*\\cdot(?![a-zA-Z])|\s)")


def _in_product_of_units(plain: str) -> list[Value]:
    r"""Read ``9.8 m s^{-2}``, whose letters stand for units and may stand for variables."""
    found = _NUMBER_AND_UNITS.fullmatch(plain.replace(WORD, "").replace(WORD_END, ""))
    units = unit_product(found["units"]) if found else ""
    unit = unit_of(units) if found and ("^{-" in units or _JOINED_UNITS.match(found["units"])) else None
    if found is None or unit is None:
        return []
    bare = [] if WORD in plain else [Scalar(parsed(plain))]
    return [*bare, Quantity(parsed(found["number"]), unit)]


_FEET = re.compile(r"(\d+)\s*'(?:\s*(?:-\s*)?(\d+(?:\.\d+)?)\s*(?:\"|''))?|(\d+(?:\.\d+)?)\s*(?:\"|'')")
_MINUTES = rf"{WORD}(?:and )?(?:arc)?min(?:ute)?s?(?: and)?{WORD_END}"
_DEGREES = re.compile(
    rf"(-?\d+)\s*(?:°|{WORD}(?:degrees?|deg),?(?: and)?{WORD_END})[\s,]*(\d+(?:\.\d+)?)\s*(?:'(?!')|{_MINUTES})"
    rf"(?:[\s,]*(\d+(?:\.\d+)?)\s*(?:''|\"|{WORD}(?:arc)?sec(?:ond)?s?{WORD_END}))?"
)


def _in_feet_or_degrees(plain: str) -> list[Value]:
    r"""Read ``5'3"`` in inches, and ``60°30'15''`` in degrees."""
    if found := _FEET.fullmatch(plain):
        inches = Fraction(found[3]) if found[3] else 12 * int(found[1]) + Fraction(found[2] or 0)
        return [Quantity(number(inches), unit_of("inch") or DEGREE)]
    if found := _DEGREES.fullmatch(plain):
        part = Fraction(found[2]) / 60 + Fraction(found[3] or 0) / 3600
        return [Quantity(number(int(found[1]) - part if found[1].startswith("-") else int(found[1]) + part), DEGREE)]
    return []


_PLACES = (
    "day|week|month|year|number|no|page|chapter|step|question|problem|room|floor|level|grade|quadrant|row|column|line|"
    "player|term|figure|statement|stage|round|house|bus|door|case|box|card|position|place|seat"
)
_PLACE = re.compile(
    rf"{WORD}(?:on |in |the )*({_PLACES})(?:{WORD_END})?\s*(?:[.:#]\s*)?{WORD}?\s*(\d+|I{{1,3}}|IV)(?:{WORD_END})?",
    re.IGNORECASE,
)
_NTH_PLACE = re.compile(
    rf"{WORD}(?:on |in |the )*([a-z]+) ({_PLACES}){WORD_END}"
    rf"|(\d+)\s*\^?\s*\{{?\s*{WORD}?(?:st|nd|rd|th)\s*(?:{WORD_END})?\s*\}}?\s*{WORD}?\s*({_PLACES}){WORD_END}",
    re.IGNORECASE,
)


def _place(plain: str) -> list[Value]:
    """Read the number of a thing, such as ``day 5`` or ``third quadrant``, which is no amount of them."""
    if found := _PLACE.fullmatch(plain):
        name, place = found[1], int(found[2]) if found[2].isdecimal() else _roman_value(found[2].upper())
    elif (found := _NTH_PLACE.fullmatch(plain)) and (found[3] or found[1].casefold() in _ORDINALS):
        name, place = found[2] or found[4], int(found[3] or _ORDINALS[found[1].casefold()])
    else:
        return []
    name = name.casefold() if name.casefold() in ("no", "number") else f"no. of {name.casefold()}"
    roman = [Roman(place, "letters")] if found[2] and not found[2].isdecimal() and found.re is _PLACE else []
    return [Quantity(number(place), Unit(None, Fraction(1), frozenset((name,)))), *roman]


_LETTERS_OF_TIME = {"h": "hour", "m": "minute", "s": "second"}


def _compound(plain: str) -> list[Value]:
    """Read ``3 hours 20 minutes`` as one quantity."""
    plain = re.sub(r"\A(\d+)\s*h\s*(\d\d)\Z", r"\1h\2m", plain)
    parts = list(_COMPOUND.finditer(plain))
    if len(parts) < 2 or "".join(part[0] for part in parts) != plain:
        return []
    units = [
        unit_of(re.sub(r"\band\b", "", part["unit"]) if part["unit"] else _LETTERS_OF_TIME[part["letter"]])
        for part in parts
    ]
    first = units[0]
    if (
        first is None
        or first.dimension is None
        or any(unit is None or unit.dimension != first.dimension for unit in units)
        or any(larger.factor <= smaller.factor for larger, smaller in pairwise(unit for unit in units if unit))
    ):
        return []
    total: Node | None = None
    for part, unit in zip(parts, units, strict=True):
        item = Node("*", (number(unit.factor / first.factor if unit else 1), parsed(part["number"])))
        total = item if total is None else Node("+", (total, item))
    return [Quantity(total, first)] if total is not None else []


_POWER_OF_TEN = re.compile(r"(?:1|one) (?:with|followed by|and then) (.{1,40}) zeroe?s(?: (?:after|behind) it)?")


def _power_of_ten(count: str) -> list[Value]:
    """Read "1 followed by 100 zeros" by the number of zeros, in digits or in words."""
    found = (int(count), 1, "") if count.isdecimal() else number_of_words(count)
    return [Scalar(Node("^", (number(10), number(found[0]))))] if found and found[1:] == (1, "") else []


_SHORT_MULTIPLIERS = {"k": "thousand", "m": "million", "b": "billion", "bn": "billion"}
_SHORT_MULTIPLIER = re.compile(rf"(?i)(?<=\d)\s*{WORD}?(k|m|bn?){WORD_END}?\Z")
"""Of amounts of money."""


def _simple_quantity(plain: str) -> list[Value]:
    if zeros := _POWER_OF_TEN.fullmatch(words_of(plain)):
        return _power_of_ten(zeros[1])
    currency = re.match(rf"\s*(-?)\s*([{_CURRENCIES}])\s*", plain)
    if currency and (short := _SHORT_MULTIPLIER.search(plain)):
        plain = f"{plain[: short.start()]} {WORD}{_SHORT_MULTIPLIERS[short[1].casefold()]}{WORD_END}"
    head = f"{currency[1]}{plain[currency.end() :]}" if currency else plain
    ordinal = _ORDINAL.fullmatch(head)
    if ordinal:
        rest = ordinal[2] if WORD in ordinal[2] or not ordinal[2].strip() else f"{WORD}{ordinal[2].lstrip()}"
        head = f"{ordinal[1]} {rest}".strip()
    tail = _TAIL.search(head)
    words = tail["tail"] if tail else ""
    if "°" in head and re.search(r"sin|cos|tan|cot|sec|csc|cis|°\s*\}", head):
        return [Scalar(parsed(head))]
    head = head[: tail.start()].replace("°", "") if tail else head
    if not head.strip():
        return _counted(words) if tail and not currency else []
    factor, words = _multiplier(words)
    node = scaled(parsed(head.strip()), factor)
    unit = _unit(words.replace(WORD, " ").replace(WORD_END, " "))
    if currency and (unit is None or unit.dimension is None):
        unit = unit_of(currency[2])
    if unit is not None:
        return [Quantity(node, unit)]
    return [Scalar(node), *_letter_unit(head)]


def _multiplier(words: str) -> tuple[int, str]:
    """Take ``million`` and the like from the beginning of the words."""
    factor, rest = 1, words
    while found := re.match(rf"\s*{WORD}\s*([a-z]+)(.*)", rest, re.DOTALL | re.IGNORECASE):
        if found[1].casefold() not in MULTIPLIERS:
            break
        factor *= MULTIPLIERS[found[1].casefold()]
        rest = f"{WORD}{found[2].lstrip()}"
        if rest.startswith(f"{WORD}{WORD_END}"):
            rest = rest[2:].strip()
    return factor, rest


def _unit(text: str) -> Unit | None:
    text = " ".join(text.split())
    if not text:
        return None
    if _NO_UNIT.search(text):
        raise NotAnExpressionError(f"{text!r} is no unit")
    if text == "°":
        return DEGREE
    if share := _SHARE.fullmatch(text):
        return PERCENT._replace(words=frozenset(share["change"].split() if share["change"] else ()))
    return unit_of(text)


_SHARE = re.compile(
    r"(?i)(?:%|percent(?:age)?|per cent)(?: (?:of|off|discount|chance|probability|in total)(?: .*)?)?"
    r"(?: (?P<change>(?:increase|decrease|more|less|higher|lower|larger|smaller|profit|loss|gain)))?"
)
"""A percentage with what it is of, or with the direction of a change."""


def _letter_unit(head: str) -> list[Value]:
    found = re.fullmatch(r"(.*[\d}) ])\s*([a-zA-Z]|[a-zA-Z]{2}|[a-z]/[a-z])(\^\{?\d\}?)?", head.strip())
    unit = unit_of(found[2] + (found[3] or "")) if found else None
    if found is None or unit is None or unit.dimension is None:
        return []
    try:
        return [Quantity(parsed(found[1].strip()), unit._replace(spelled=False))]
    except NotAnExpressionError:  # a variable, such as the last one of x + m
        return []


def _counted(words: str) -> list[Value]:
    """Read a number in words, with what it counts: ``three apples``."""
    text = words.replace(WORD, " ").replace(WORD_END, " ").strip()
    found = number_of_words(text)
    if found is None:
        return []
    node = number(Fraction(found[0], found[1]))
    unit = _unit(found[2])
    return [Scalar(node) if unit is None else Quantity(node, unit)]
