"""Read the text of an answer into typed values: a number, a quantity, a set, an interval, a choice, words.

A text may have several readings, such as ``(1, 2)``, a point and an interval, so ``read`` returns all of them, the most
likely one first. What is no mathematics becomes ``Words``, and is compared as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from plaudit_reward.rules.answer_text import WORD, WORD_END, number_of_words, plain_text, words_of
from plaudit_reward.rules.answer_types import (
    COMPOUND_NAME,
    Based,
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
    Scalar,
    Several,
    Value,
    Words,
)
from plaudit_reward.rules.expressions import (
    MAX_CHARACTERS,
    Node,
    NotAnExpressionError,
    NoValueError,
    has_symbol,
    number,
    numeric,
    parsed,
    symbols,
)
from plaudit_reward.rules.units import DEGREE, MULTIPLIERS, PERCENT, Unit, unit_of

_OPENING, _CLOSING = "([{⦃⟨", ")]}⦄⟩"
_INFINITY = Node("constant", ("oo",))
_LINE = Interval(Node("neg", (_INFINITY,)), _INFINITY, False, False)
_EMPTY = Bracketed("set", ())
_EMPTY_WORDS = re.compile(
    r"(there (is|are) )?(no|none|empty set|null set|no (real|integer|such|valid|possible|positive|rational|other)? ?"
    r"((real|integer|positive|natural|prime) )*(solutions?|roots?|values?|numbers?|integers?|answers?)?( exists?)?|"
    r"none exists?|∅)( exists?)?"
)
_REALS_WORDS = re.compile(
    r"(x can be )?(all|any|every|set of|set of all)? ?(the )?reals?( numbers?| values?)?( of [a-z])?|ℝ"
)
_EXCEPT = re.compile(
    rf"{WORD}([^{WORD_END}]*?),? (?:except|but|other than|excluding)(?: for)?{WORD_END}\s*(?:[a-z]\s*=)?(.+)"
)
_CHOICES = re.compile("(?=[A-J]{2,6}\\Z)A?B?C?D?E?F?G?H?I?J?")
_CHOICE = re.compile(
    r"\(?(?:(?i:option|choice|answer)\s*:?\s*)?(?:\(\s*([A-Ja-j])\s*\)|\[([A-J])\]|([A-J])\s*(?=[.):]|\Z))\s*[.):]*\s*(.*)",
    re.DOTALL,
)
_MOST_ITEMS = 100


def read(text: str) -> Reading:
    """Return the readings of an answer; none if it is blank, or has nothing but signs."""
    if len(text) > MAX_CHARACTERS:
        return (Words("".join(text.split()), is_prose=False),)
    plain = plain_text(text)
    if not any(sign.isalnum() or sign in "∞∅ℝℤℕℚℂ⦃" for sign in plain) or "\\sqrt{}" in plain:
        return ()
    plain = _ABOUT.sub("", plain)
    return (_spelled(plain),) if _depth(plain) > _MAX_DEPTH else _read(plain)


_MAX_DEPTH = 20


def _depth(plain: str) -> int:
    """Return how deeply brackets are nested."""
    depth = deepest = 0
    for sign in plain:
        depth += (sign in _OPENING) - (sign in _CLOSING)
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
            if found and isinstance(found[-1], Based):
                break
        except (NotAnExpressionError, NoValueError, RecursionError):
            continue
    return (*found, _spelled(plain))


_ONLY_WORDS = re.compile(rf"(?:{WORD}[^{WORD_END}]*{WORD_END}|[A-Za-z](?![A-Za-z(^_])|[\s.,;:?'\"])+")


def _spelled(plain: str) -> Words:
    """Return the words, or the signs of a formula."""
    if _ONLY_WORDS.fullmatch(plain):
        return Words(words_of(plain))
    bare = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", plain.replace(WORD, "").replace(WORD_END, ""))
    return Words(re.sub(r"\{(\w)\}|(?<=\d)(?:st|nd|rd|th)\b", r"\1", bare), is_prose=False)


def _without_braces(plain: str) -> str:
    while len(plain) > 1 and plain[0] == "{" and _closes(plain) == len(plain) - 1:
        plain = plain[1:-1].strip()
    return plain


def _closes(text: str) -> int:
    """Return where the bracket closes with which the text begins; -1 if it does not. Ends of intervals may differ."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth == 0:
            return index
    return -1


def split(text: str, signs: str, words: tuple[str, ...] = ()) -> list[str]:
    """Split a text at signs and words that stand outside of brackets."""
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        sign = text[index]
        if sign == WORD:
            end = text.find(WORD_END, index)
            end = len(text) - 1 if end < 0 else end
            if depth <= 0 and words:
                inner = re.split(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])", text[index + 1 : end])
                if len(inner) > 1:
                    marked = [f"{WORD}{part.strip()}{WORD_END}" if part.strip() else "" for part in inner]
                    parts.append(text[start:index] + marked[0])
                    parts += marked[1:-1]
                    text = marked[-1] + text[end + 1 :]
                    start, index = 0, len(marked[-1])
                    continue
            index = end + 1
            continue
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth == 0 and sign in signs and sign not in _CLOSING:
            parts.append(text[start:index])
            start = index + 1
        index += 1
    return [*parts, text[start:]]


# Readers: each returns the values that it finds in a text, or none.


def _known_words(plain: str) -> list[Value]:
    words = words_of(plain)
    if plain == "∅" or re.fullmatch(r"⦃\s*⦄", plain) or (WORD in plain and _EMPTY_WORDS.fullmatch(words)):
        return [] if words == "no" else [_EMPTY]
    excepted = _EXCEPT.fullmatch(plain)
    if excepted and _REALS_WORDS.fullmatch(words_of(excepted[1])):
        return [Region((_LINE,), (Bracketed("set", tuple(_read(part) for part in split(excepted[2], ",", ("and",)))),))]
    if plain in ("ℝ", "x ∈ℝ") or (WORD in plain and _REALS_WORDS.fullmatch(words)):
        return [Region((_LINE,))]
    if words in ("infinity", "positive infinity", "infinite", "infinitely many"):
        return [Scalar(_INFINITY)]
    if words in ("negative infinity", "minus infinity"):
        return [Scalar(Node("neg", (_INFINITY,)))]
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
    if (found[1] and found[1].islower() and says) or re.match(r"\(\s*[A-J]\s*\)", says):
        return []
    return [Choice(letter.upper(), _read(plain_text(says)) if says else ())]


def _lists(plain: str) -> list[Value]:
    """Read answers between commas and words, several values of a sign, and systems of equations."""
    if "±" in plain or "∓" in plain:
        both = [plain.replace("±", up).replace("∓", down) for up, down in (("+", "-"), ("-", "+"))]
        return [_several([_read(text.strip().removeprefix("+")) for text in both])]
    joined = _number_with_commas(plain)
    if joined:
        rest = _read(joined)
        parts = split(plain, ",")
        if len(parts) > 1 and all(re.fullmatch(r"\s*-?\d+\s*", part) for part in parts):
            return [*rest[:-1], Several(tuple(_read(part) for part in parts))]
        return list(rest[:-1])
    parts = [part for part in split(plain, ",;", ("and", "or")) if part.strip()]
    parts = [part for part in parts if not _INTEGER_NAME.fullmatch(part)] or parts
    if len(parts) == 1 and parts[0] != plain:
        return list(_read(parts[0].strip()))[:-1]
    if len(parts) < 2 or len(parts) > _MOST_ITEMS:
        return []
    return [_several([_read(part) for part in parts], conjunction="or" not in words_of(plain).split())]


_INTEGER_NAME = re.compile(r"\s*[a-z]\s*∈\s*[ℤℕ](?:\^?\{?\+\}?)?\s*")
"""A condition such as "k is an integer", which is no answer."""


def _several(readings: list[Reading], *, conjunction: bool = False) -> Value:
    """Join answers; inequalities of one variable become the numbers that they describe together."""
    regions = [next((value for value in reading if isinstance(value, Named | Region)), None) for reading in readings]
    names = {region.name for region in regions if isinstance(region, Named)}
    if len(names) == 1 and all(isinstance(region, Named) for region in regions):
        sets = [_region_of(region.value) for region in regions if isinstance(region, Named)]
        if all(isinstance(item, Region) for item in sets):
            return Named(names.pop(), (_combined([item for item in sets if item is not None], conjunction),))
    return Several(tuple(readings))


def _combined(regions: list[Region], conjunction: bool) -> Region:
    if not conjunction:
        return Region(tuple(piece for region in regions for piece in region.pieces))
    if (both := _between(regions)) is not None:
        return both
    whole, *others = regions
    excluded = [other.without for other in others if other.pieces == (_LINE,)]
    if len(excluded) == len(others):
        return Region(whole.pieces, (*whole.without, *(piece for pieces in excluded for piece in pieces)))
    return Region(tuple(piece for region in regions for piece in region.pieces), ())


def _between(regions: list[Region]) -> Region | None:
    """Return what two half-lines have in common that point at each other."""
    pieces = [region.pieces[0] for region in regions if len(region.pieces) == 1 and not region.without]
    rays = [piece for piece in pieces if isinstance(piece, Interval)]
    up = [ray for ray in rays if ray.upper == _INFINITY and ray.lower != _LINE.lower]
    down = [ray for ray in rays if ray.lower == _LINE.lower and ray.upper != _INFINITY]
    if len(regions) != 2 or len(up) != 1 or len(down) != 1:
        return None
    try:
        inside = numeric(up[0].lower).real < numeric(down[0].upper).real
    except NoValueError:
        return None
    return Region((Interval(up[0].lower, down[0].upper, up[0].with_lower, down[0].with_upper),)) if inside else None


def _region_of(reading: Reading) -> Region | None:
    for value in reading:
        if isinstance(value, Region):
            return value
        if isinstance(value, Interval):
            return Region((value,))
    return None


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


_RELATION = re.compile("([=≠<>≤≥∈≈])")
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
_NAME = re.compile(
    rf"\s*(?:\\frac\{{\s*d[^{{}}]{{0,9}}\}}\{{\s*d[^{{}}]{{1,9}}\}}|(?:\\(?:vec|hat|bar|overrightarrow))?\{{[A-Za-z]+\}}|[A-Za-z]|m?\\[a-zA-Z]+\s*|{WORD}[^{WORD_END}]*{WORD_END}\s*)"
    rf"(?:_\{{?\w+\}}?|'|\^\{{?-1\}}?|\([\w\\, ]{{1,20}}\)|{WORD}[^{WORD_END}]*{WORD_END}|[A-Z]{{1,3}})*\s*"
)


def _relations(plain: str) -> list[Value]:
    r"""Read ``x = 3``, ``8 \cdot 9 = 72``, ``x \ge 2``, ``1 < x < 3``, ``x \in [0, 1]`` and equations."""
    named = re.fullmatch(r"([A-Z])\s*=\s*(\\begin.*)|\{([A-Z])\}\s*=\s*(\\begin.*)", plain, re.DOTALL)
    if named:
        return [Named(named[1] or named[3], _read(named[2] or named[4]))]
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
    return _inequality([side.strip() for side in sides], signs)


def _equation(sides: list[str], signs: list[str]) -> list[Value]:
    name, last = sides[0].strip(), sides[-1]
    if _tuple_of_names(name) and len(sides) == 2:
        return [Named("", _read(last))]
    if _NAME.fullmatch(name) and not _contains(last, name):
        return [Named(re.sub(r"\s", "", words_of(name)) if WORD in name else name.replace(" ", ""), _read(last))]
    nodes = [parsed(side) for side in sides]
    if "≈" in signs and not symbols(nodes[-2]):
        values = [numeric(node) for node in nodes[-2:]]
        about = abs(values[0] - values[1]) <= abs(values[0]) / 20
        return [value for side in sides[-2:] for value in _read(side)[:-1]] if about else []
    if len(nodes) > 2 or not any(symbols(node) for node in nodes):
        return [*_read(last)[:-1]]
    relation = Relation("=", nodes[0], nodes[1])
    if not symbols(nodes[1]) and nodes[1] != number(0) and not _is_multiple_of_symbol(nodes[0]):
        return [relation, Named(COMPOUND_NAME, (Scalar(nodes[1]),))]
    if nodes[1].kind == "symbol" and not has_symbol(nodes[0], nodes[1].parts[0]) and nodes[0].kind == "number":
        return [Named(nodes[1].parts[0], (Scalar(nodes[0]),))]
    return [relation]


def _is_multiple_of_symbol(node: Node) -> bool:
    r"""Return True for ``2x``, whose equation is not solved yet."""
    return node.kind in ("*", "neg", "/") and len(symbols(node)) == 1


def _tuple_of_names(text: str) -> bool:
    return bool(re.fullmatch(r"\(\s*[a-zA-Z](_\{?\w+\}?)?(\s*,\s*[a-zA-Z](_\{?\w+\}?)?)+\s*\)", text))


def _contains(text: str, name: str) -> bool:
    try:
        return len(name) == 1 and has_symbol(parsed(text), name)
    except NotAnExpressionError:
        return False


def _inequality(sides: list[str], signs: list[str]) -> list[Value]:
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
    if left.kind == "function" and left.parts[0] == "abs" and left.parts[1].kind == "symbol":
        return [Named(left.parts[1].parts[0], (_around_zero(sign, right),))]
    if left.kind == "symbol" and not has_symbol(right, left.parts[0]):
        return [Named(left.parts[0], (_half_line(sign, right),)), Relation(sign, left, right)]
    return [Relation(sign, left, right)]


def _around_zero(sign: str, distance: Node) -> Region:
    r"""Return the numbers of ``|x| < 3``, ``|x| \ge 3`` and the like."""
    opposite = Node("neg", (distance,))
    if sign in "<≤":
        return Region((Interval(opposite, distance, sign == "≤", sign == "≤"),))
    return Region((_half_line(_FLIPPED[sign], opposite).pieces[0], _half_line(sign, distance).pieces[0]))


def _half_line(sign: str, end: Node) -> Region:
    if sign == "≠":
        return Region((_LINE,), (Bracketed("set", ((Scalar(end),),)),))
    if sign in "<≤":
        return Region((Interval(_LINE.lower, end, False, sign == "≤"),))
    return Region((Interval(end, _INFINITY, sign == "≥", False),))


def _sets(plain: str) -> list[Value]:
    r"""Read unions, and what is left of a set without another: ``(-\infty, 0) \cup (0, \infty)``, ``ℝ ∖ {0}``."""
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
        inner = part[1:-1] if part.startswith("(") and _closes(part) == len(part) - 1 and "∪" in part else ""
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
    if opening != "]" and closing != "[" and _closes(plain) != len(plain) - 1:
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


def _set(inside: str) -> list[Value]:
    builder = re.fullmatch(r"\s*([a-zA-Z])\s*(?:∈\s*ℝ\s*)?[|:]\s*(.+)", inside)
    if builder:
        return [value for value in _read(builder[2])[:-1] if isinstance(value, Named) and value.name == builder[1]]
    items = [item for item in split(inside, ",;") if item.strip()]
    return (
        [Bracketed("set", tuple(_read(item) for item in items))]
        if len(items) <= _MOST_ITEMS and "…" not in inside
        else []
    )


_MATRIX = re.compile(
    rf"\\begin\{{{WORD}?(?P<kind>[pbBvV]?matrix|smallmatrix|array|cases|aligned?|gathered){WORD_END}?\*?\}}(?:\{{[clr|]*\}})?"
    rf"(?P<inside>.*)\\end\{{{WORD}?(?P=kind){WORD_END}?\*?\}}",
    re.DOTALL,
)


_FACTOR = re.compile(r"((?!\\begin)[^&=,]+?)(?:\\cdot|\*)?\s*(?=[(\[]?\s*\\begin)")


def _matrix(plain: str) -> list[Value]:
    bare = plain
    if plain[:1] in "([" and plain[-1:] in ")]" and "\\begin" in plain and _closes(plain) == len(plain) - 1:
        bare = plain[1:-1].strip()
    factor = _FACTOR.match(bare)
    if factor is not None:
        return _multiple(factor[1], bare[factor.end() :])
    found = _MATRIX.fullmatch(bare)
    if found is None or "\\begin" in found["inside"]:
        return []
    rows = [row for row in re.split(r"\\\\|\\cr\b", found["inside"].replace("\\hline", "")) if row.strip()]
    if found["kind"] in ("cases", "align", "aligned", "gathered"):
        return list(_read(", ".join(row.replace("&", " ").strip(" ,") for row in rows)))[:-1]
    cells = tuple(tuple(_read(cell) for cell in row.split("&")) for row in rows)
    if len(cells) == len(cells[0]) == 1:
        return list(cells[0][0])[:-1]
    kind = "determinant" if found["kind"] in ("vmatrix", "Vmatrix") else "matrix"
    return [Matrix(kind, cells)]


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


_BASED = re.compile(rf"\(?\s*([0-9A-Za-z]+)\s*\)?\s*_\s*\{{?\s*(?:{WORD})?([a-z]+|\d{{1,2}})(?:{WORD_END})?\s*\}}?")
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}


def _numeral(plain: str) -> list[Value]:
    found = _BASED.fullmatch(plain)
    if found is None or not (any(sign.isdigit() for sign in found[1]) or (len(found[1]) > 1 and found[2].isdigit())):
        return []
    base = int(found[2]) if found[2].isdigit() else _BASE_NAMES.get(found[2], 0)
    digits = found[1].upper().lstrip("0") or "0"
    if not 2 <= base <= 36 or any(int(sign, 36) >= base for sign in digits):
        return []
    return [Based(digits, base)]


_TIME = re.compile(
    rf"(\d{{1,2}})(?:\s*:\s*(\d\d))?(?:\s*:\s*(\d\d))?\s*{WORD}?\s*([aApP]\s*\.?\s*[mM]\.?|noon|[oO]'clock|hours)?\s*{WORD_END}?"
)


def _time(plain: str) -> list[Value]:
    if WORD in plain and (hour := {"noon": 12, "midnight": 0}.get(words_of(plain))) is not None:
        return [Clock(hour * 3600, "")]
    found = _TIME.fullmatch(plain.replace(f"{WORD}at{WORD_END}", ""))
    if found is None or (found[2] is None and (found[4] or "hours").startswith("hours")):
        return []
    hours, minutes, seconds = int(found[1]), int(found[2] or 0), int(found[3] or 0)
    if hours > 24 or minutes > 59 or seconds > 59:
        return []
    half = re.sub(r"[^apm]", "", (found[4] or "").casefold())
    return [Clock(hours * 3600 + minutes * 60 + seconds, half if half in ("am", "pm") else "")]


def _ratio(plain: str) -> list[Value]:
    parts = split(plain, ":")
    if len(parts) < 2 or not all(part.strip() for part in parts):
        return []
    items = tuple((Scalar(parsed(part)),) for part in parts)
    return [Ratio(items)]


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
_ABOUT = re.compile(
    rf"(?i)^(?:{WORD}(?:(?:the |my )?(?:final |correct )?(?:answer|result|value)(?: is)?:?|about|"
    rf"approximately|approx|roughly|exactly|around|only|is|it is|it's|equals|there are|there is){WORD_END}:?|≈)\s*"
)


def _quantity(plain: str) -> list[Value]:
    plain = _ABOUT.sub("", plain)
    return _compound(plain) or _simple_quantity(plain)


def _compound(plain: str) -> list[Value]:
    """Read ``3 hours 20 minutes`` as one quantity."""
    parts = list(_COMPOUND.finditer(plain))
    if len(parts) < 2 or "".join(part[0] for part in parts) != plain:
        return []
    units = [unit_of(re.sub(r"\band\b", "", part["unit"] or part["letter"])) for part in parts]
    first = units[0]
    if (
        first is None
        or first.dimension is None
        or any(unit is None or unit.dimension != first.dimension for unit in units)
    ):
        return []
    total: Node | None = None
    for part, unit in zip(parts, units, strict=True):
        item = Node("*", (number(unit.factor / first.factor if unit else 1), parsed(part["number"])))
        total = item if total is None else Node("+", (total, item))
    return [Quantity(total, first)] if total is not None else []


def _simple_quantity(plain: str) -> list[Value]:
    currency = re.match(rf"\s*(-?)\s*([{_CURRENCIES}])\s*", plain)
    head = f"{currency[1]}{plain[currency.end() :]}" if currency else plain
    ordinal = _ORDINAL.fullmatch(head)
    if ordinal:
        head = f"{ordinal[1]} {ordinal[2]}".strip()
    tail = _TAIL.search(head)
    words = tail["tail"] if tail else ""
    if "°" in head and re.search(r"sin|cos|tan|cot|sec|csc", head):
        return [Scalar(parsed(head))]
    head = head[: tail.start()].replace("°", "") if tail else head
    if not head.strip():
        return _counted(words) if tail and not currency else []
    factor, words = _multiplier(words)
    scaled = _scaled(parsed(head.strip()), factor)
    unit = _unit(words.replace(WORD, " ").replace(WORD_END, " "))
    if currency and (unit is None or unit.dimension is None):
        unit = unit_of(currency[2])
    if unit is not None:
        return [Quantity(scaled, unit)]
    return [Scalar(scaled), *_letter_unit(head)]


def _scaled(node: Node, factor: int) -> Node:
    return node if factor == 1 else Node("*", (node, number(factor)))


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
    text = text.strip()
    if not text:
        return None
    if _NO_UNIT.search(text):
        raise NotAnExpressionError(f"{text!r} is no unit")
    if text == "°":
        return DEGREE
    if text == "%" or text.casefold() in ("percent", "per cent", "percentage"):
        return PERCENT
    return unit_of(text)


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


_READERS: tuple[Callable[[str], list[Value]], ...] = (
    *(_known_words, _choice, _matrix, _sets, _numeral, _time, _lists, _relations, _brackets, _ratio, _quantity),
)
