"""Read numbers that are written in words: cardinals, ordinals and fractions."""

from __future__ import annotations

import re

from plaudit_reward.rules.units import MULTIPLIERS

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = dict(
    zip(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], range(20, 100, 10), strict=True)
)
_CARDINALS = {**{word: value for value, word in enumerate(_ONES)}, **_TENS}
ORDINALS = {
    "first": 1,
    "second": 2,
    "third": 3,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "eleventh": 11,
    "twelfth": 12,
    "thirteenth": 13,
    "fourteenth": 14,
    "fifteenth": 15,
    "sixteenth": 16,
    "seventeenth": 17,
    "eighteenth": 18,
    "nineteenth": 19,
    "twentieth": 20,
    "thirtieth": 30,
}
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "third": 3, "thirds": 3, "fourth": 4, "fourths": 4}
_PARTS |= {f"{word}{ending}": value for word, value in ORDINALS.items() if value > 4 for ending in ("", "s")}


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
    if used == len(parts) - 1 and parts[used - 1] in _TENS and 0 < ORDINALS.get(parts[used], 0) < 10:
        return total + current + ORDINALS[parts[used]], 1, ""  # twenty-first
    if used and used < len(parts) and parts[used] in _PARTS and total + current and parts[used] != "second":
        return sign * (total + current), _PARTS[parts[used]], " ".join(parts[used + 1 :])
    if not used and parts[:1] in (["half"], ["quarter"]):
        rest = parts[2:] if parts[1:2] == ["of"] else parts[1:]
        if not rest or rest[0] in ("a", "an"):
            return sign, _PARTS[parts[0]], " ".join(rest[1:])
    if len(parts) == 1 and parts[0] in ORDINALS:
        return ORDINALS[parts[0]], 1, ""
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
