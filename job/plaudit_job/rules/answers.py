"""Parse ``judge.parse``, and find values in a judge's answer by a subset of JSONPath.

``$.score`` · ``$['the score']`` · ``$.answers[0].score`` · ``$.answers[-1]`` · ``$.answers[*].score`` (a list)

A judge quotes the format, a draft, or the response that it judges before it gives its verdict. So reasoning is dropped,
and the last JSON that has the path is the verdict. What only looks like JSON (``[1]``, ``{x}``) is prose.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]

from plaudit_wire.errors import ConfigurationError

_STEP = re.compile(
    r"""\.(?P<name>\w+)|\[(?P<item>-?\d+)\]|\[(?P<all>\*)\]|\[(?P<quote>['"])(?P<quoted>.+?)(?P=quote)\]"""
)
_DECODER = json.JSONDecoder(strict=False)
"""It accepts line breaks in strings, which models write."""
Step = str | int | None
"""A member's name, an item's index, or None for every item."""


def json_path(text: str) -> list[Step]:
    """Parse a path into steps; raise ``ValueError`` if it is not a path, or outside of the subset."""
    steps: list[Step] = []
    position = 1
    if not text.startswith("$"):
        raise ValueError(f"{text!r} does not begin with $")
    while position < len(text):
        found = _STEP.match(text, position)
        if found is None:
            raise ValueError(
                f"{text!r} cannot be parsed from {text[position:]!r} on; write it like $.a.b[0].c or $[*].c"
            )
        if found["item"] is not None:
            steps.append(int(found["item"]))
        else:
            steps.append(None if found["all"] else found["name"] or found["quoted"])
        position = found.end()
    return steps


def value_at(document: Any, steps: list[Step]) -> Any:
    """Return the value at a path, a list where a step is ``[*]``; raise ``LookupError`` that names the missing step."""
    for number, step in enumerate(steps):
        if step is None:
            items = document if isinstance(document, list) else None
            if items is None:
                raise LookupError(f"[*] needs a list, not {_kind(document)}")
            return [value_at(item, steps[number + 1 :]) for item in items]
        if isinstance(step, str) and not (isinstance(document, dict) and step in document):
            raise LookupError(f"no member {step!r} in {_kind(document)}")
        if isinstance(step, int) and not (isinstance(document, list) and -len(document) <= step < len(document)):
            raise LookupError(f"no item {step} in {_kind(document)}")
        document = document[step]
    return document


_TAGS = ("think", "thinking", "thought", "reasoning", "seed:think")
_OPEN, _CLOSE = (
    "(?:" + "|".join([rf"<{end}(?:{'|'.join(_TAGS)})>", rf"\[{end}THINK\]", rf"◁{end}think▷", *others]) + ")"
    for end, *others in (
        ("", r"<\|begin_of_thought\|>", r"<\|channel\|>analysis<\|message\|>"),
        ("/", r"<\|end_of_thought\|>", r"<\|channel\|>final<\|message\|>"),
    )
)
_REASONING = re.compile(rf"(?is){_OPEN}(?:(?!{_OPEN}).)*?{_CLOSE}")
_TAG = re.compile(rf"(?i)(?P<open>{_OPEN})|{_CLOSE}")


def without_reasoning(answer: str) -> str:
    """Return an answer without its reasoning: ``<think>…</think>``, also where one of the two tags is missing.

    A tag inside a JSON value is text that the judge quotes.
    """
    text = _REASONING.sub("", answer)
    tags = list(_TAG.finditer(text))
    if tags:
        quoted = _spans(text)
        tags = [tag for tag in tags if not any(start < tag.start() < end for start, end in quoted)]
    begin = max((tag.end() for tag in tags if not tag["open"]), default=0)
    end = min((tag.start() for tag in tags if tag["open"] and tag.start() >= begin), default=len(text))
    return text[begin:end].strip()


def _spans(text: str) -> list[tuple[int, int]]:
    """Return the places of the first JSON values of a text."""
    spans: list[tuple[int, int]] = []
    with contextlib.suppress(LookupError):
        for found in itertools.islice(_json_values(text, []), _MOST_SPANS):
            spans.append((found.start, found.end))  # noqa: PERF401 (those before the error count)
    return spans


_MOST_SPANS = 100


class _Found(NamedTuple):
    """Hold a JSON value in a text, and where it stands."""

    value: Any
    start: int
    end: int


_JSON_START = re.compile(r"\{\s*(?:[\"}]|(?P<lax>['“]|[A-Za-z_]\w{0,100}\s*:|//|/\*|\#))|\[(?=\s*[\[{\"\]\-0-9tfnNI])")
_BRACKETS = re.compile(r"[\[\]{}]")
_TOKEN = re.compile(
    r"""(?P<double>"(?:[^"\\]|\\.)*")|(?P<other>'(?:[^'\\]|\\.)*'|“[^“”]*”)|(?P<space>\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)"""
    r"""|(?P<sign>[\[\]{}:,])|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])|(?P<word>[A-Za-z_]\w*)""",
    re.DOTALL,
)
_BEFORE_COLON = re.compile(r"\s*:")
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    **{word: word for word in ("true", "false", "null", "NaN", "Infinity")},
}
_LONE_BACKSLASH = re.compile(r"\\(?![\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_MOST_WORK = 2_000_000
"""Characters that may be read in vain: an answer of broken JSON must not hold up the others."""
_WORK_OF_DEPTH = 10_000


def find_json(text: str, steps: list[Step]) -> Any:
    """Return the value at the path in the last JSON object or list of a text, with prose around it, that has the path.

    Lists that stand in a sentence, such as citations, count only where no other list has the path. Raises
    ``LookupError`` that says what is missing.
    """
    held: list[tuple[int, Any]] = []
    missing = "it contains no JSON object or list"
    for found in _json_values(text, steps):
        try:
            held.append((_rank(text, found), value_at(found.value, steps)))
        except LookupError as error:
            missing = str(error.args[0])
    if not held:
        raise LookupError(missing)
    best = max(rank for rank, _ in held)
    return [value for rank, value in held if rank == best][-1]


def _rank(text: str, found: _Found) -> int:
    """Return how much a value looks like an answer: objects, and lists on lines of their own, more than citations."""
    if isinstance(found.value, dict):
        return 2
    before, after = text[: found.start].rpartition("\n")[2], text[found.end :].partition("\n")[0]
    if not before.strip() and not after.strip(" \t\r.;`"):
        return 2
    return int(len(found.value) > 1 or isinstance(next(iter(found.value), None), dict | list))


def _json_values(text: str, steps: list[Step]) -> Iterator[_Found]:
    """Yield the JSON objects and lists that are part of no other one, in order.

    Raises ``LookupError`` where the text ends inside one, or where a broken one has the path's first member: what
    stands before it is not the verdict.
    """
    position, work = 0, 0
    broken = ""
    while (start := _JSON_START.search(text, position)) is not None:
        begin = start.start()
        try:
            value, position = _DECODER.raw_decode(text, begin)
            broken = ""
            yield _Found(value, begin, position)
            continue
        except json.JSONDecodeError as error:
            stopped, cut = error.pos, error.msg.startswith("Unterminated") or not text[error.pos :].strip()
        except (ValueError, RecursionError):  # an integer of thousands of digits, or thousands of levels
            stopped, cut = begin + _WORK_OF_DEPTH, False
        if cut and text[begin] == "{":
            raise LookupError("it ends inside a JSON object")
        # The error itself counts the lines before it.
        work += (len(text) - begin if cut else stopped - begin) + begin // 20
        if work > _MOST_WORK:
            raise LookupError("it contains too much broken JSON")
        end = 0
        if text[begin] == "{" and (start["lax"] or stopped > start.end()):
            value, end, looked_at = _repaired(text, begin, _MOST_WORK - work)
            work += looked_at
            if end:
                broken = ""
                yield _Found(value, begin, end)
                position = end
                continue
            end, looked_at = _balanced_end(text, begin, max(0, _MOST_WORK - work))
            work += looked_at
            if start["lax"] and not end and _names_first(text[begin:], steps):
                raise LookupError("it ends inside a JSON object")
        if end and _names_first(text[begin:end], steps):
            broken = "its last JSON object with that member is malformed"
        position = end or begin + _run(text, begin)
    if broken:
        raise LookupError(broken)


def _run(text: str, begin: int) -> int:
    """Return the length of a run of opening brackets: none of them begins a value if the first does not."""
    end = begin
    while text[end : end + 1] == "[":
        end += 1
    return max(1, end - begin - 1)


def _balanced_end(text: str, begin: int, most: int) -> tuple[int, int]:
    """Return where the bracket at ``begin`` is closed, by counting brackets, and the characters looked at.

    The place is 0 where it is not closed within ``most`` characters.
    """
    level = 0
    for bracket in _BRACKETS.finditer(text, begin, begin + most):
        level += 1 if bracket[0] in "[{" else -1
        if level == 0:
            return bracket.end(), bracket.end() - begin
    return 0, min(most, len(text) - begin)


def _repaired(text: str, begin: int, most: int) -> tuple[Any, int, int]:
    """Return the object at ``begin`` of JSON with faults that have one reading, its end, and the characters looked at.

    These faults are a comma before a bracket, TeX in strings, comments, Python's quotes and constants, names without
    quotes, and numbers such as ``+8`` and ``.5``. The end is 0 where it has others, or does not end within ``most``.
    """
    parts: list[str] = []
    position, level = begin, 0
    while position - begin < most and (found := _TOKEN.match(text, position)) and (part := _in_json(found)) is not None:
        position = found.end()
        level += (part in ("{", "[")) - (part in ("}", "]"))
        if part in ("}", "]") and parts[-1:] == [","]:
            parts.pop()
        parts += [part] if part else []
        if level == 0 and part:
            break
    try:
        value = json.loads(" ".join(parts) if level == 0 else "", strict=False)
    except (ValueError, RecursionError):
        return None, 0, position - begin
    return value, position, position - begin


def _in_json(found: re.Match[str]) -> str | None:
    """Return a token as JSON has it: empty for a comment, None for a word that is neither a name nor a constant."""
    piece = found[0]
    match found.lastgroup:
        case "space":
            return ""
        case "double":
            return _LONE_BACKSLASH.sub(r"\\\\", piece)
        case "other":
            inside = piece[1:-1].replace("\\'", "'").replace('\\"', '"').replace('"', '\\"')
            return '"' + _LONE_BACKSLASH.sub(r"\\\\", inside) + '"'
        case "number":
            sign, digits = piece[:1].strip("+") if piece[0] in "+-" else "", piece.lstrip("+-")
            whole, point, rest = digits.partition(".")
            whole = whole.lstrip("0") or "0" if whole.isdecimal() or not whole else whole
            return f"{sign}{whole}{point}{rest or '0'}" if point else f"{sign}{whole}"
        case "word" if _BEFORE_COLON.match(found.string, found.end()):
            return f'"{piece}"'
        case "word":
            return _WORDS.get(piece)
    return piece


def _names_first(text: str, steps: list[Step]) -> bool:
    first = next((step for step in steps if isinstance(step, str)), None)
    return first is not None and re.search(rf"""(["'“]){re.escape(first)}["'”]\s*:""", text) is not None


def answer_schema(steps: list[Step], limits: tuple[float, float] | None, count: int | None) -> dict[str, Any]:
    """Return the JSON schema of an answer that has a number at a path.

    Args:
        limits: The smallest and the largest number.
        count: Numbers of a group, at a path of a list; None: one number.

    Raises ``ValueError`` for a path that no schema expresses: it begins with no member, or numbers an item.
    """
    if not steps or not isinstance(steps[0], str):
        raise ValueError("the path must begin with a member, such as $.score")
    bounds = {} if limits is None else {"minimum": limits[0], "maximum": limits[1]}
    schema: dict[str, Any] = {"type": "number", **bounds}
    lists = [] if count is None or None in steps else [None]
    for step in reversed([*steps, *lists]):
        if isinstance(step, int):
            raise ValueError(f"the path numbers an item, [{step}]")
        if step is None:
            schema = {"type": "array", "items": schema, **({} if count is None else _exactly(count))}
        else:
            schema = _object({step: schema})
    (name, member), *_ = schema["properties"].items()
    return schema if name == _REASON else _object({_REASON: {"type": "string"}, name: member})


_REASON = "reason"


def _exactly(count: int) -> dict[str, int]:
    return {"minItems": count, "maxItems": count}


def _object(members: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}


def _kind(document: Any) -> str:
    if isinstance(document, dict):
        return f"an object of {', '.join(map(repr, document)) or 'nothing'}"[:200]
    if isinstance(document, list):
        return f"a list of {len(document)}"
    return f"{document!r}"[:100]


def score_pattern(pattern: str) -> Any:
    """Return the compiled expression whose first group is the score; raise ``ConfigurationError`` if it is none."""
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigurationError(f"judge.parse.regex {pattern!r} does not compile: {error}") from error
    if compiled.groups < 1:
        raise ConfigurationError(
            f"judge.parse.regex {pattern!r} has no group: put the number in parentheses, like 'score: ([0-9.]+)'"
        )
    return compiled


def score_path(path: str) -> list[Step]:
    """Return the steps to the score in a JSON answer; raise ``ConfigurationError`` if the path cannot be parsed."""
    try:
        return json_path(path)
    except ValueError as error:
        raise ConfigurationError(f"judge.parse.jsonPath {error}") from error
