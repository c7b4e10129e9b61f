"""Parse ``judge.parse``, and find values in JSON answers by a subset of JSONPath.

``$.score`` · ``$['the score']`` · ``$.answers[0].score`` · ``$.answers[-1]`` · ``$.answers[*].score`` (a list)
"""

from __future__ import annotations

import json
import re
from typing import Any

import regex  # type: ignore[import-untyped]

from plaudit_wire.errors import ConfigurationError

_STEP = re.compile(
    r"""\.(?P<name>\w+)|\[(?P<item>-?\d+)\]|\[(?P<all>\*)\]|\[(?P<quote>['"])(?P<quoted>.+?)(?P=quote)\]"""
)
_DECODER = json.JSONDecoder()
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


def find_json(text: str) -> Any:
    """Return the first JSON object or list in a text, often with prose around it; raise ``LookupError`` without one."""
    for start in re.finditer(r"[\[{]", text):
        try:
            return _DECODER.raw_decode(text, start.start())[0]
        except ValueError:
            continue
    raise LookupError("it contains no JSON object or list")


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
