"""Validation errors of single fields, told in words with a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.section import BYTE_QUANTITY, DNS_LABEL, PYTHON_NAME

_PATTERN_WORDS = {
    DNS_LABEL: (
        "is not a DNS label",
        "Use lower-case letters, digits and '-', beginning and ending with one of the first",
    ),
    BYTE_QUANTITY: ("is not an amount of bytes", "Write it like 512Mi or 4Gi"),
    PYTHON_NAME: ("is not the name of a Python function", "Give the name as it stands in the file"),
    r"^https?://": ("is not a web address", "Begin with http:// or https://"),
    r"^rediss?://": ("is not the address of a Redis", "Write redis://host:port/0, or rediss:// for TLS"),
    r"^(rediss?://.+)?$": ("is not the address of a Redis", "Write redis://host:port/0, or rediss:// for TLS"),
    r"^/": ("is not an absolute path", "Begin with /"),
    r"^[^/]": ("is not a relative path", "Leave out the / at its beginning"),
}
_TYPE_WORDS = {
    "int_type": ("a whole number", "Write digits without quotes"),
    "int_from_float": ("a whole number", "Leave out the fraction"),
    "float_type": ("a number", "Write it without quotes"),
    "string_type": ("text", "Put it in quotes"),
    "bool_type": ("true or false", "Write true or false without quotes"),
    "list_type": ("a list", "Write [a, b], or one '- ' line for each"),
    "dict_type": ("a mapping", "Write {key: value}, or one indented 'key: value' line for each"),
    "model_type": ("a mapping", "Write {key: value}, or one indented 'key: value' line for each"),
    "model_attributes_type": ("a mapping", "Write {key: value}, or one indented 'key: value' line for each"),
}


Location = tuple[str | int, ...]
"""Keys and indices from the root of the job to a part of it."""


def field_name(location: Iterable[str | int]) -> str:
    """The written name of a location: ``spec.reward.scorers[1].weight``."""
    words = ""
    for part in location:
        words += f"[{part}]" if isinstance(part, int) else f".{part}" if words else str(part)
    return words


def null_problem(location: Location) -> Problem:
    """What is said of a field without a value."""
    return Problem(
        field_name(location), "is null", "Give a value, or leave the field out (for a section of defaults write {})"
    )


def tell(errors: Sequence[ErrorDetails], root: type[BaseModel], location: Location) -> Problem:
    """Turns pydantic's errors about one field into a problem.

    Args:
        errors: what pydantic says; several where a value may be of several types and is of none.
        root: the model that was validated, for names to suggest.
        location: keys and indices as written in the file.
    """
    kinds = [_TYPE_WORDS[error["type"]][0] for error in errors if error["type"] in _TYPE_WORDS]
    if len(kinds) > 1:
        value = shown(errors[0]["input"])
        return Problem(field_name(location), f"{value} is not {' or '.join(kinds)}", "Write it like 4, 500m or 16Gi")
    message, remedy = _words(errors[0], root, location)
    return Problem(field_name(location), message, remedy)


def _words(error: ErrorDetails, root: type[BaseModel], location: Location) -> tuple[str, str]:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _TYPE_WORDS:
        wanted, remedy = _TYPE_WORDS[kind]
        return f"{shown(value)} is not {wanted}", remedy
    if kind in _SPEAKERS:
        return _SPEAKERS[kind](value, context, root, location)
    return f"{shown(value)}: {error['msg'].lower()}", "Look it up in docs/rljob.md"


def shown(value: object) -> str:
    """A value as a message shows it: short."""
    words = repr(value)
    return words if len(words) <= 60 else words[:57] + "..."


Speaker = Callable[[Any, dict[str, Any], type[BaseModel], Location], tuple[str, str]]


def _missing(_: Any, __: dict[str, Any], root: type[BaseModel], location: Location) -> tuple[str, str]:
    field = field_at(root, location)
    options = [str(option) for option in get_args(field.annotation)] if field and _is_choice(field) else []
    words = f"one of {', '.join(options)}" if len(options) > 1 else "".join(options) or "…"
    return "is missing", f"Add {location[-1]}: {words}"


def _is_choice(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is Literal


def _unknown(_: Any, __: dict[str, Any], root: type[BaseModel], location: Location) -> tuple[str, str]:
    section = _section(root, location[:-1])
    names = [field.alias or name for name, field in section.model_fields.items()] if section else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.6)
    known = f"Fields here: {', '.join(names)}"
    return "is not a field of this section", f"Did you mean {near[0]}? {known}" if near else known


def _choice(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
    return f"{shown(value)} is not possible", f"Give {context['expected']}"


def _pattern(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
    words, remedy = _PATTERN_WORDS.get(
        context["pattern"], ("does not have the right form", f"It must match {context['pattern']}")
    )
    return f"{shown(value)} {words}", remedy


def _bound(words: str, key: str) -> Speaker:
    def speak(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
        return f"{shown(value)} is not {words} {context[key]:,}", f"Give a number {words} {context[key]:,}"

    return speak


def _too_short(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
    least = context["min_length"]
    return ("is empty", "Give a value") if not value else (f"{shown(value)} is too short", f"Give at least {least}")


def _too_long(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
    most = context["max_length"]
    unit = "characters" if isinstance(value, str) else "entries"
    return f"{shown(value)} has {len(value)} {unit}", f"Give at most {most}"


def _not_finite(value: Any, *_: object) -> tuple[str, str]:
    return f"{shown(value)} is not a finite number", "Give a finite number"


_SPEAKERS: dict[str, Speaker] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "greater_than_equal": _bound("at least", "ge"),
    "greater_than": _bound("above", "gt"),
    "less_than_equal": _bound("at most", "le"),
    "less_than": _bound("below", "lt"),
    "string_too_short": _too_short,
    "too_short": _too_short,
    "string_too_long": _too_long,
    "too_long": _too_long,
    "finite_number": _not_finite,
}


def _section(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for part in location:
        if section is None:
            return None
        if isinstance(part, int):
            continue
        field = _own_field(section, part)
        section = section_of(field.annotation) if field else None
    return section


def field_at(root: type[BaseModel], location: Location) -> FieldInfo | None:
    """The field of a model that a location names."""
    section = _section(root, location[:-1])
    return _own_field(section, str(location[-1])) if section else None


def _own_field(section: type[BaseModel], written: str) -> FieldInfo | None:
    return next((field for name, field in section.model_fields.items() if written in (field.alias, name)), None)


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, alone, in a list or optionally."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part))), None)
