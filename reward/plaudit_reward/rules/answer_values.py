"""Read the text of an answer into typed values: a number, a quantity, a set, an interval, a choice, words.

A text may have several readings, such as ``(1, 2)``, a point and an interval, so ``read`` returns all of them, the most
likely one first. What is no mathematics becomes ``Words``, and is compared as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from plaudit_reward.rules.answer_text import CLOSING, OPENING, WORD, WORD_END, closes, plain_text, split, words_of
from plaudit_reward.rules.answer_types import (
    COMPOUND_NAME,
    Based,
    Bracketed,
    Choice,
    Date,
    Division,
    Interval,
    Matrix,
    Named,
    Reading,
    Region,
    Relation,
    Scalar,
    Several,
    Value,
    Words,
)
from plaudit_reward.rules.chemistry import electron_configuration, name_of_substance, reaction
from plaudit_reward.rules.expressions import (
    INFINITY,
    MAX_CHARACTERS,
    Node,
    NotAnExpressionError,
    NoValueError,
    functions,
    has_symbol,
    number,
    numeric,
    parsed,
    renamed,
    symbols,
)
from plaudit_reward.rules.quantities import (
    ABOUT,
    LABEL,
    date,
    numeral,
    quantity,
    ratio,
    remainder,
    residue,
    roman_numeral,
    time_of_day,
)
from plaudit_reward.rules.regions import LINE, combined, half_line, inequality, region_of

_EMPTY = Bracketed("set", ())
_EMPTY_WORDS = re.compile(
    r"(there (is|are) )?(no|none|empty set|null set|no (real|integer|such|valid|possible|positive|rational|other)? ?"
    r"((real|integer|positive|natural|prime) )*(solutions?|roots?|values?|numbers?|integers?|answers?)?( exists?)?|"
    r"none exists?|∅)( exists?)?|no such ([a-z]|[a-z]{3,12}) (exists?|is possible)|"
    r"there (is|are) no such ([a-z]|[a-z]{3,12})"
)
_REALS_WORDS = re.compile(
    r"(x can be )?(all|any|every|set of|set of all)? ?(the )?reals?( numbers?| values?)?( of [a-z])?|ℝ"
)
_HALF_OF_REALS = re.compile(r"ℝ\s*[_^]\s*\{?\s*([-+<>≤≥])\s*0?\s*\}?")
_EXCEPT = re.compile(
    rf"{WORD}([^{WORD_END}]*?),? (?:except|but|other than|excluding)(?: for)?{WORD_END}\s*(?:[a-z]\s*=)?(.+)"
)
_EXCLUDED = re.compile(r"\s*([a-zA-Z])\s*≠\s*([^=≠<>≤≥∈]*(?:,|±|\x02)[^=≠<>≤≥∈]*)")
"""As in ``x \\ne 0, 1``, where the sign goes for each of the numbers."""
_REASONED = re.compile(rf"{WORD}(?i:(yes|no|true|false))(?:{WORD_END})?\s*,?\s*{WORD}?(?i:because|since|as)\b")
"""As in "Yes, because 3 divides 12", with formulas in the reason."""
_CHOICES = re.compile("(?=[A-J]{2,6}\\Z)A?B?C?D?E?F?G?H?I?J?")
_CHOICE = re.compile(
    r"\(?(?:(?i:option|choice|answer)\s*:?\s*)?(?:\(\s*([A-Ja-j])\s*\)|\[([A-J])\]|([A-J])\s*(?=[.):]|\Z))\s*[.):]*\s*(.*)",
    re.DOTALL,
)
_FURTHER_CHOICE = re.compile(rf"(?:[,;/&]|{WORD}?(?:or|and){WORD_END}?)?\s*\(\s*[A-J]\s*\)")
_MOST_ITEMS = 100


def read(text: str) -> Reading:
    """Return the readings of an answer; none if it is blank, or has nothing but signs."""
    if len(text) > MAX_CHARACTERS:
        return (Words("".join(text.split()), is_prose=False),)
    plain = plain_text(text)
    if not any(sign.isalnum() or sign in "∞∅ℝℤℕℚℂ⦃" for sign in plain) or "\\sqrt{}" in plain:
        return ()
    plain = _ONLY.sub(r"\1", ABOUT.sub("", LABEL.sub("", plain)))
    return (_spelled(plain),) if _depth(plain) > _MAX_DEPTH else _read(plain)


_ONLY = re.compile(rf"(?s)\A((?=.*(?:,|\band\b)).*\S)(?:\s*{WORD}only{WORD_END}| only(?={WORD_END}\Z))")
"""As in "I and III only"; one statement alone may be one of several."""
_MAX_DEPTH = 20


def _depth(plain: str) -> int:
    """Return how deeply brackets are nested."""
    depth = deepest = 0
    for sign in plain:
        depth += (sign in OPENING) - (sign in CLOSING)
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=512)
def _read(plain: str) -> Reading:
    """Return the readings of a part of an answer in plain spelling, at least one."""
    plain = _without_braces(plain.strip())
    found: list[Value] = []
    for reader in _READERS:
        try:
            found += [value for value in reader(plain) if value not in found]
            if found and isinstance(found[-1], Based | Date | Division):
                break
        except (NotAnExpressionError, NoValueError, RecursionError):
            continue
    return (*found, _spelled(plain))


_ONLY_WORDS = re.compile(rf"(?:{WORD}[^{WORD_END}]*{WORD_END}|[A-Za-z](?![A-Za-z(^_])|[\s.,;:?'\"])+")


_WITHOUT_MEANING = re.compile(
    r"\{(\w)\}|(?<=\d)(?:st|nd|rd|th)\b|\\overline\{([A-Z]{2})\}|\A(?:△|(?i:(?:line)?segment|triangle))(?=[A-Z]{2,3}\Z)"
)


def _spelled(plain: str) -> Words:
    """Return the words, or the signs of a formula."""
    if _ONLY_WORDS.fullmatch(plain):
        return Words(words_of(plain))
    bare = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", plain.replace(WORD, "").replace(WORD_END, ""))
    return Words(_WITHOUT_MEANING.sub(r"\1\2", bare), is_prose=False)


def _without_braces(plain: str) -> str:
    while len(plain) > 1 and plain[0] == "{" and closes(plain) == len(plain) - 1:
        plain = plain[1:-1].strip()
    return plain


# Readers: each returns the values that it finds in a text, or none.


def _known_words(plain: str) -> list[Value]:
    words = words_of(plain)
    if plain == "∅" or re.fullmatch(r"⦃\s*⦄", plain) or (WORD in plain and _EMPTY_WORDS.fullmatch(words)):
        return [] if words == "no" else [_EMPTY]
    excepted = _EXCEPT.fullmatch(plain)
    if excepted and _REALS_WORDS.fullmatch(words_of(excepted[1])):
        return [Region((LINE,), (Bracketed("set", tuple(_read(part) for part in split(excepted[2], ",", ("and",)))),))]
    if half := _HALF_OF_REALS.fullmatch(plain):
        return [half_line({"+": ">", "-": "<"}.get(half[1], half[1]), number(0))]
    if plain in ("ℝ", "x ∈ℝ") or (WORD in plain and _REALS_WORDS.fullmatch(words)):
        return [Region((LINE,))]
    if plain == "\\phi":  # often written for the empty set, and the other readers read the letter
        return [_EMPTY]
    if excluded := _EXCLUDED.fullmatch(plain):
        items = _both_signs(split(excluded[2], ",", ("and", "or")))
        return [Named(excluded[1], (Region((LINE,), (Bracketed("set", tuple(_read(item) for item in items)),)),))]
    if reasoned := _REASONED.match(plain):
        return [Words(reasoned[1].casefold())]
    if words in ("infinity", "positive infinity", "infinite", "infinitely many"):
        return [Scalar(INFINITY)]
    if words in ("negative infinity", "minus infinity"):
        return [Scalar(Node("neg", (INFINITY,)))]
    return []


def _choice(plain: str) -> list[Value]:
    bare = re.sub(f"^{WORD}\\s*(?:option|choice|answer)\\s*{WORD_END}", "", plain, flags=re.IGNORECASE)
    bare = re.sub(f"{WORD}\\s*(?:选项|项|option|choice)\\s*{WORD_END}$", "", bare)
    bare = bare.replace(WORD, "").replace(WORD_END, "") if bare.count(WORD) == 1 and bare.startswith(WORD) else bare
    if _CHOICES.fullmatch(bare):
        return [Several(tuple((Choice(letter, ()),) for letter in bare))]
    found = _CHOICE.fullmatch(bare.strip())
    if found is None:
        return []
    letter = found[1] or found[2] or found[3]
    says = found[4].strip()
    if (found[1] and found[1].islower() and says) or _FURTHER_CHOICE.match(says):
        return []
    return [Choice(letter.upper(), _read(plain_text(says)) if says else ())]


def _lists(plain: str) -> list[Value]:
    """Read answers between commas and words, several values of a sign, and systems of equations."""
    if len(split(plain, ",;")) > 1 and "±" in plain:
        return [_several([_read(part) for part in _both_signs(split(plain, ",;"))])]
    if "±" in plain or "∓" in plain:
        both = [plain.replace("±", up).replace("∓", down) for up, down in (("+", "-"), ("-", "+"))]
        return [_several([_read(text.strip().removeprefix("+")) for text in both])]
    if re.search("[∨∧]", plain) and _RELATION.search(plain):
        plain = re.sub("[∨∧]", lambda sign: f" {WORD}{'or' if sign[0] == '∨' else 'and'}{WORD_END} ", plain)
    joined = _number_with_commas(plain)
    if joined:
        rest = _read(joined)
        parts = split(plain, ",")
        if len(parts) > 1 and all(re.fullmatch(r"\s*-?\d+\s*", part) for part in parts):
            return [*rest[:-1], Several(tuple(_read(part) for part in parts))]
        return list(rest[:-1])
    parts = [part for part in split(plain, ",;", ("and", "or", "by")) if part.strip()]
    parts = [part for part in parts if not _INTEGER_NAME.fullmatch(part)] or parts
    if len(parts) == 1 and parts[0] != plain:
        return list(_read(parts[0].strip()))[:-1]
    if len(parts) < 2 or len(parts) > _MOST_ITEMS:
        return []
    return [_several([_read(part) for part in parts], conjunction="or" not in words_of(plain).split())]


def _both_signs(parts: list[str]) -> list[str]:
    r"""Return ``0, +1, -1`` for ``0, \pm 1``."""
    twice = [(part.replace("±", ""), part.replace("±", "-")) if part.count("±") == 1 else (part,) for part in parts]
    return [item for items in twice for item in items]


_INTEGER_NAME = re.compile(r"\s*[a-z]\s*∈\s*[ℤℕ](?:\^?\{?\+\}?)?\s*")
"""A condition such as "k is an integer", which is no answer."""


def _several(readings: list[Reading], *, conjunction: bool = False) -> Value:
    """Join answers; inequalities of one variable become the numbers that they describe together."""
    regions = [next((value for value in reading if isinstance(value, Named | Region)), None) for reading in readings]
    names = {region.name for region in regions if isinstance(region, Named)}
    if len(names) == 1 and all(isinstance(region, Named) for region in regions):
        sets = [region_of(region.value) for region in regions if isinstance(region, Named)]
        if all(isinstance(item, Region) for item in sets):
            return Named(names.pop(), (combined([item for item in sets if item is not None], conjunction),))
    pieces = [piece for reading in readings for piece in reading if isinstance(piece, Interval)]
    if len(pieces) == len(readings) and any(
        item.with_lower != item.with_upper or item.lower == LINE.lower or item.upper == INFINITY for item in pieces
    ):
        return Region(tuple(pieces))
    return Several(tuple(readings))


def _number_with_commas(plain: str) -> str:
    r"""Return the text without the thousands separators of its only number; empty if it has none."""
    found = re.fullmatch(
        r"(?P<before>[^\d,()\[\]]*)(?P<number>\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?P<after>(?:\.\d+)?(?:[^\d,].*)?)",
        plain,
        re.DOTALL,
    )
    if found is None or ("," in found["after"].replace(", ", " ") and not found["after"].lstrip().startswith(WORD)):
        return ""
    return found["before"] + found["number"].replace(",", "") + found["after"]


_MULTIPLE_OF_LETTER = re.compile(r"-?\d+(?:\.\d+)?\s*[a-zA-Z]")
"""As in ``n = 3m``, where the letter is no unit unless a length or a time has that name."""
_RELATION = re.compile("([=≠<>≤≥∈≈])")
_NAME = re.compile(
    rf"\s*(?:\\frac\{{\s*d[^{{}}]{{0,9}}\}}\{{\s*d[^{{}}]{{1,9}}\}}|(?:\\(?:vec|hat|bar|overrightarrow))?\{{[A-Za-z]+\}}|[A-Za-z]|m?\\[a-zA-Z]+\s*|{WORD}[^{WORD_END}]*{WORD_END}\s*)"
    rf"(?:_\{{?\w+\}}?|'|\^\{{?-1\}}?|\([\w\\, ]{{1,20}}\)|{WORD}[^{WORD_END}]*{WORD_END}|[A-Z]{{1,3}})*\s*"
)


_NAMES_OF_VALUES = {
    name: name
    for name in re.findall(
        r"\w+",
        "mean median mode range length width height area perimeter volume radius diameter base center vertex focus "
        "slope sum product quotient remainder speed time distance max min",
    )
} | {"maximum": "max", "minimum": "min"}
_NAMED_BY_WORD = re.compile(
    rf"(?:{WORD}(?:the )?([a-z]+)(?: value)?\s*(?:is|of)?\s*:?\s*{WORD_END}|\\?([a-z]+))\s*[:=]?\s*"
    rf"(?=[-\d\\(¤.]|(?<={WORD_END} )[a-z])(.+)",
    re.IGNORECASE,
)


_LABEL_OF_PART = re.compile(r"\(\s*([a-h]|i{1,3}|iv|v)\s*\)")
_JOINT = re.compile(rf"^[\s,;.]+|[\s,;.]*(?:{WORD}and{WORD_END}\s*)?$")


def _labelled_parts(plain: str) -> list[Value]:
    """Read the answers to the parts of a question, ``(a) 12; (b) 7``."""
    before, *pieces = _LABEL_OF_PART.split(plain)
    labels, answers = pieces[::2], [_JOINT.sub("", piece) for piece in pieces[1::2]]
    if before or not len(labels) == len(set(labels)) > 1 or not all(answers):
        return []
    return [Several(tuple((Named(label, _read(answer)),) for label, answer in zip(labels, answers, strict=True)))]


def _named_by_word(plain: str) -> list[Value]:
    """Read ``mean 4``, ``maximum = 7`` and ``Length: 8 cm``."""
    found = _NAMED_BY_WORD.fullmatch(plain)
    name = _NAMES_OF_VALUES.get((found[1] or found[2]).casefold()) if found else None
    single = len(split(plain, ",;", ("and", "or"))) == 1
    return [Named(name, _read(found[3]))] if found and name and single else []


def _relations(plain: str) -> list[Value]:
    r"""Read ``x = 3``, ``8 \cdot 9 = 72``, ``x \ge 2``, ``1 < x < 3``, ``x \in [0, 1]`` and equations."""
    named = re.fullmatch(r"\{?([A-Z]|[a-z](?:\([a-z]\))?)\}?\s*=\s*(⦃?\s*\\begin.*)", plain, re.DOTALL)
    if named:
        return [Named(named[1], _read(named[2]))]
    if named_by_word := _named_by_word(plain):
        return named_by_word
    if "\\begin" in plain or not _RELATION.search(plain):
        return []
    if sum(bool(_RELATION.search(part)) for part in split(plain, ",;", ("and", "or"))) > 1:
        return []  # several relations
    sides = split(plain, "=≠<>≤≥∈≈")
    signs = [plain[sum(len(side) + 1 for side in sides[: index + 1]) - 1] for index in range(len(sides) - 1)]
    if not signs or any(not side.strip() for side in sides):
        return []
    if "∈" in signs:
        return [Named(sides[0].strip(), _read(sides[1]))] if len(sides) == 2 else []
    if all(sign in "=≈" for sign in signs):
        return _equation(sides, signs)
    if any(sign in "=≈" for sign in signs):
        return []
    return inequality([side.strip() for side in sides], signs)


def _equation(sides: list[str], signs: list[str]) -> list[Value]:
    name, last = sides[0].strip(), sides[-1]
    if (_tuple_of_names(name) or _RATIO_OF_NAMES.fullmatch(name)) and len(sides) == 2:
        return [Named("", _read(last))]
    is_constant = name in ("\\pi", "e") and "≈" in signs
    if _NAME.fullmatch(name) and not is_constant and not _contains(last, name):
        if _MULTIPLE_OF_LETTER.fullmatch(last.strip()) and name not in "dhlrstvwxDHLRSTVW":
            return [Named(name, (Scalar(parsed(last)),))]
        return [Named(re.sub(r"\s", "", words_of(name)) if WORD in name else name.replace(" ", ""), _read(last))]
    nodes = [parsed(side) for side in sides]
    if "≈" in signs and not symbols(nodes[-2]):
        values = [numeric(node) for node in nodes[-2:]]
        about = abs(values[0] - values[1]) <= abs(values[0]) / 20
        return [value for side in sides[-2:] for value in _read(side)[:-1]] if about else []
    if len(nodes) > 2 or not any(symbols(node) for node in nodes):
        return [*_read(last)[:-1]]
    relation = Relation("=", nodes[0], nodes[1])
    if nodes[0].kind == "function" and nodes[0].parts[0] not in _INVERSES and not symbols(nodes[1]):
        return [relation, Named(name, (Scalar(nodes[1]),))]
    if not symbols(nodes[1]) and nodes[1] != number(0) and not _is_unsolved(nodes[0]):
        return [relation, Named(COMPOUND_NAME, (Scalar(nodes[1]),))]
    if nodes[1].kind == "symbol" and not has_symbol(nodes[0], nodes[1].parts[0]) and nodes[0].kind == "number":
        return [Named(nodes[1].parts[0], (Scalar(nodes[0]),))]
    return [relation]


def _is_unsolved(node: Node) -> bool:
    r"""Return True for ``2x``, ``x^3`` and ``\log x``, whose equation is not solved yet.

    Of ``x^2``, ``x + 1`` and the sine of an angle questions do ask for the value.
    """
    if len(symbols(node)) != 1:
        return False
    if node.kind == "function":
        return node.parts[0] in _INVERSES
    if node.kind == "^":
        return node.parts[1] != number(2) and not functions(node) - _INVERSES
    return node.kind in ("*", "neg", "/") and not functions(node) - _INVERSES


_INVERSES = {"ln", "log", "exp"}


_RATIO_OF_NAMES = re.compile(r"[A-Za-z]{1,3}(?:\s*:\s*[A-Za-z]{1,3})+")


def _tuple_of_names(text: str) -> bool:
    name = r"(?:[a-zA-Z]|\\[a-z]+)\s*(?:_\{?\w+\}?)?"
    return bool(re.fullmatch(rf"\(\s*{name}(\s*,\s*{name})+\s*\)", text))


def _contains(text: str, name: str) -> bool:
    try:
        return len(name) == 1 and has_symbol(parsed(text), name)
    except NotAnExpressionError:
        return False


def _sets(plain: str) -> list[Value]:
    r"""Read unions, intersections and what is left of a set without another: ``(0, 1) \cup (1, 2)``, ``ℝ ∖ {0}``."""
    if "∩" in plain:
        first, *others = (
            ([region_of(_read(part.strip())) for part in split(plain, "∩")]) if "∪" not in plain else [None]
        )
        within = tuple(other for other in others if other is not None)
        return [Region(first.pieces, first.without, within)] if first and others and len(within) == len(others) else []
    if not any(sign in plain for sign in "∪∖") and not re.search(r"ℝ\s*-\s*⦃", plain):
        return []
    kept, *removed = split(re.sub(r"(?<=ℝ)\s*-\s*(?=⦃)", "∖", plain), "∖")
    if len(removed) > 1 or not (removed or len(split(kept, "∪")) > 1):
        return []
    pieces = _pieces(kept)
    without = _pieces(removed[0]) if removed else []
    return [Region(tuple(pieces), tuple(without))] if pieces and (without or not removed) else []


def _pieces(text: str) -> list[Interval | Bracketed]:
    pieces: list[Interval | Bracketed] = []
    for part in split(text, "∪"):
        part = _without_braces(part.strip())
        inner = part[1:-1] if part.startswith("(") and closes(part) == len(part) - 1 and "∪" in part else ""
        if inner:
            pieces += _pieces(inner)
            continue
        for value in _read(part):
            if isinstance(value, Interval) or (isinstance(value, Bracketed) and value.kind == "set"):
                pieces.append(value)
                break
            if isinstance(value, Region) and not value.without:
                pieces += value.pieces
                break
        else:
            return []
    return pieces


def _brackets(plain: str) -> list[Value]:
    if re.match(r"[A-Z]'?\s*\([^()]*,", plain):  # a point with its name
        return _brackets(plain[plain.index("(") :])
    if not plain or plain[0] not in "([⦃⟨" + "]" or plain[-1] not in ")]⦄⟩" + "[":
        return []
    opening, closing = plain[0], plain[-1]
    if opening != "]" and closing != "[" and closes(plain) != len(plain) - 1:
        return []
    inside = plain[1:-1]
    if opening == "⦃":
        return _set(inside) if closing == "⦄" else []
    items = [part.strip() for part in split(inside, ",;")]
    if not all(items) or len(items) > _MOST_ITEMS:
        return []
    if len(items) == 1:
        return list(_read(items[0]))[:-1] or list(_read(items[0]))
    group = Bracketed("list" if opening + closing == "[]" else "tuple", tuple(_read(item) for item in items))
    same_kind = opening + closing in ("()", "[]", "⟨⟩")
    if len(items) != 2 or opening == "⟨":
        return [group] if same_kind else []
    try:
        interval = Interval(parsed(items[0]), parsed(items[1]), opening == "[", closing == "]")
    except NotAnExpressionError:
        return [group] if same_kind else []
    return [interval, group] if opening + closing == "[]" else [group, interval] if same_kind else [interval]


_VECTOR_ITEM = re.compile(
    r"\s*([-+]?)\s*([^-+ijk]*?)\s*(?:\\cdot|\*)?\s*(?:\\hat\{([ijk])\}|(?<![A-Za-z\\])([ijk])(?![A-Za-z]))\s*"
)


def _unit_vectors(plain: str) -> list[Value]:
    r"""Read ``3\mathbf{i} - 2\mathbf{j}`` as the tuple of its components."""
    items, end = list[re.Match[str]](), 0
    while item := _VECTOR_ITEM.match(plain, end):  # from where the one before ends: a search takes long on long texts
        items.append(item)
        end = item.end()
    if end < len(plain):
        return []
    parts = {item[3] or item[4]: _read(f"{item[1].strip('+')}{item[2] or 1}") for item in items}
    if len(items) < 2 or len(parts) < len(items):
        return []
    zero: Reading = (Scalar(number(0)),)
    spaces = ("ijk",) if "k" in parts else ("ij", "ijk")
    return [Bracketed("tuple", tuple(parts.get(name, zero) for name in names)) for names in spaces]


def _set(inside: str) -> list[Value]:
    builder = re.fullmatch(r"\s*([a-zA-Z])\s*(?:∈\s*ℝ\s*)?[|:]\s*(.+)", inside)
    if builder:
        reading = _read(builder[2])[:-1]
        listed = [_named(item, builder[1]) for value in reading if isinstance(value, Several) for item in value.items]
        if listed and all(listed):  # x | x = 1 or x = 2
            return [Bracketed("set", tuple(named[0].value for named in listed))]
        named = _named(reading, builder[1])
        return [value for item in named for value in item.value]  # its variable may have any name
    if family := _FAMILY.fullmatch(inside):
        node = renamed(parsed(family["value"]), family["name"], "k")
        return [Bracketed(f"family over {family['of']}", ((Scalar(node),),))]
    items = _continued(_both_signs([item for item in split(inside, ",;") if item.strip()]))
    return [Bracketed("set", tuple(_read(item) for item in items))] if 0 < len(items) <= _MOST_ITEMS else []


def _named(reading: Reading, name: str) -> list[Named]:
    return [value for value in reading if isinstance(value, Named) and value.name == name]


_FAMILY = re.compile(r"(?P<value>[^|:∈]+)[|:]\s*(?P<name>[a-z])\s*∈\s*(?P<of>[ℤℕ])")
"""As in ``2k | k ∈ ℤ``."""


def _continued(items: list[str]) -> list[str]:
    """Write out ``1, 3, …, 9``; return nothing where the dots have no end, or no known step."""
    if not any("…" in item for item in items):
        return items
    *begin, dots, last = [item.strip() for item in items] if len(items) > 2 else ["", "", ""]
    if dots != "…" or not all(re.fullmatch(r"-?\d{1,6}", item) for item in (*begin, last)):
        return []
    known, end = [int(item) for item in begin], int(last)
    steps = {after - value for value, after in pairwise(known)} or {1}
    written = range(known[0], end + 1, step) if len(steps) == 1 and (step := steps.pop()) > 0 else range(0)
    return [str(value) for value in written[: _MOST_ITEMS + 1]] if end in written and known[-1] < end else []


_MATRIX = re.compile(
    rf"\\begin\{{{WORD}?(?P<kind>[pbBvV]?matrix|smallmatrix|array|cases|aligned?|gathered){WORD_END}?\*?\}}(?:\{{[clr|]*\}})?"
    rf"(?P<inside>.*)\\end\{{{WORD}?(?P=kind){WORD_END}?\*?\}}",
    re.DOTALL,
)


_TRANSPOSED = re.compile(r"\s*\^\s*\{?\s*(?:T|\\top|\\intercal|⊤)\s*\}?\Z")
_CONDITION = re.compile(
    rf"\s*{WORD}?\s*(?i:for|if|when|where|otherwise|else)\b|[^=]*[<>≤≥≠=∈]|.*{WORD}(?:is )?(?:odd|even){WORD_END}"
)
_IF = re.compile(
    rf"{WORD}(?:for|if|when|where)(?: all)?{WORD_END}\s*|(?<={WORD})(?:(?:for|if|when|where)(?: all)?|is) "
)


def _piecewise(rows: list[str]) -> list[Value]:
    """Read rows of values and conditions as a set of pairs; other rows are no function."""
    pairs = [split(row, "&") if "&" in row else split(row, ",") for row in rows]
    if not all(
        len(pair) == 2
        and pair[0].strip()
        and not _RELATION.search(pair[0])
        and _CONDITION.match(pair[1])
        and not _RELATION.match(pair[1].strip())
        for pair in pairs
    ):
        return []
    return [
        Bracketed(
            "set",
            tuple(
                (Bracketed("tuple", (_read(value.strip(" ,")), _read(_IF.sub("", condition).strip(" ,.")))),)
                for value, condition in pairs
            ),
        )
    ]


_FACTOR = re.compile(r"((?!\\begin)[^&=,]+?)(?:\\cdot|\*)?\s*(?=[(\[]?\s*\\begin)")


def _matrix(plain: str) -> list[Value]:
    if plain.startswith("⦃") and closes(plain) < 0:  # a system behind one brace
        plain = re.sub(r"\A⦃\s*|\s*\.?\Z", "", plain).replace("{array}", "{cases}")
    if transposed := _TRANSPOSED.search(plain):
        return _transpose(plain[: transposed.start()].strip())
    bare = plain
    if plain[:1] in "([" and plain[-1:] in ")]" and "\\begin" in plain and closes(plain) == len(plain) - 1:
        bare = plain[1:-1].strip()
    factor = _FACTOR.match(bare)
    if factor is not None:
        return _multiple(factor[1], bare[factor.end() :])
    found = _MATRIX.fullmatch(bare)
    if found is None or "\\begin" in found["inside"]:
        return []
    rows = [row for row in re.split(r"\\\\|\\cr\b", found["inside"].replace("\\hline", "")) if row.strip()]
    if found["kind"] in ("cases", "align", "aligned", "gathered"):
        if len(rows) > 1 and (function := _piecewise(rows)):
            return function
        return list(_read(", ".join(row.replace("&", " ").strip(" ,") for row in rows)))[:-1]
    cells = tuple(tuple(_read(cell) for cell in row.split("&")) for row in rows)
    if len(cells) == len(cells[0]) == 1:
        return list(cells[0][0])[:-1]
    kind = "determinant" if found["kind"] in ("vmatrix", "Vmatrix") else "matrix"
    return [Matrix(kind, cells)]


def _transpose(plain: str) -> list[Value]:
    r"""Read ``(1, 2)^T`` as a column, and the transpose of a matrix."""
    values = [*_matrix(plain), *_brackets(plain)]
    matrices = [value for value in values if isinstance(value, Matrix) and len({len(row) for row in value.rows}) == 1]
    tuples = [value for value in values if isinstance(value, Bracketed) and value.kind in ("tuple", "list")]
    return [
        *(Matrix(item.kind, tuple(zip(*item.rows, strict=True))) for item in matrices),
        *(Matrix("matrix", tuple((item,) for item in group.items)) for group in tuples),
    ]


def _multiple(factor: str, matrix: str) -> list[Value]:
    r"""Read ``\frac12 \begin{pmatrix}…`` as the matrix whose items are multiplied."""
    scalar = parsed({"": "1", "-": "-1", "+": "1"}.get(factor.strip(" *"), factor.strip(" *")))
    values = []
    for found in _matrix(matrix):
        items = found.rows if isinstance(found, Matrix) and found.kind == "matrix" else ()
        nodes = [
            [next((value.node for value in item if isinstance(value, Scalar)), None) for item in row] for row in items
        ]
        if nodes and all(node is not None for row in nodes for node in row):
            values.append(
                Matrix("matrix", tuple(tuple((Scalar(Node("*", (scalar, node))),) for node in row) for row in nodes))
            )
    return [*values]


_READERS: tuple[Callable[[str], list[Value]], ...] = (
    date,
    remainder,
    *(
        _known_words,
        _choice,
        _matrix,
        _sets,
        numeral,
        residue,
        time_of_day,
        _labelled_parts,
        _lists,
        _relations,
        _brackets,
    ),
    *(_unit_vectors, ratio, quantity),
    *(roman_numeral, reaction, electron_configuration, name_of_substance),
)
