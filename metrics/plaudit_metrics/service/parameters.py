"""Read the parameters of requests; a wrong one is refused with its name, value and remedy."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

_MOST_DIGITS = 18
_SHOWN = 80
"""Characters of a wrong parameter that its error repeats."""
MOST_CHARACTERS = 1000
"""Characters of a text parameter."""


class RefusedQueryError(Exception):
    """The service refuses a request, with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def shown(text: str) -> str:
    """Return the beginning of a wrong parameter, for its error."""
    return text[:_SHOWN]


def whole_number(text: str) -> int | None:
    """Return the number; None for other text (``²`` is a digit too) and for numbers of more digits than any count."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def count(request: Request, name: str, default: int, most: int) -> int:
    """Return a number from 1 to ``most``; raise ``RefusedQueryError`` for anything else."""
    text = request.query_params.get(name, str(default))
    number = whole_number(text)
    if number is None or not 1 <= number <= most:
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give a whole number from 1 to {most}")
    return number


def step_number(request: Request, name: str) -> int | None:
    """Return the number of a step, None without the parameter; raise ``RefusedQueryError`` for other text."""
    text = request.query_params.get(name)
    if not text:
        return None
    number = whole_number(text)
    if number is None:
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give the number of a step")
    return number


def real_number(request: Request, name: str) -> float | None:
    """Return a finite number, None without the parameter; raise ``RefusedQueryError`` for other text."""
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not float("-inf") < number < float("inf"):
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give a number such as 0.5")
    return number


def point_in_time(request: Request, name: str) -> float:
    """Return seconds since the epoch, 0 without the parameter; raise ``RefusedQueryError`` for less or other text."""
    text = request.query_params.get(name, "0")
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not 0 <= time < float("inf"):
        raise RefusedQueryError(400, f"{name} is {shown(text)!r}; give seconds since the epoch, at least 0")
    return time


def text(request: Request, name: str) -> str:
    """Return a text, empty without the parameter; raise ``RefusedQueryError`` beyond ``MOST_CHARACTERS``."""
    given = request.query_params.get(name, "")
    if len(given) > MOST_CHARACTERS:
        raise RefusedQueryError(400, f"{name} has {len(given)} characters; give at most {MOST_CHARACTERS}")
    return given


def choice(request: Request, name: str, choices: Collection[str]) -> str:
    """Return one of the choices, empty without the parameter; raise ``RefusedQueryError`` for other text."""
    given = request.query_params.get(name, "")
    if given and given not in choices:
        raise RefusedQueryError(400, f"{name} is {shown(given)!r}; give one of {', '.join(choices)}")
    return given
