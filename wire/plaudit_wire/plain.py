"""Judge a value that comes from outside once, at the door: the only way into a prompt, a sample, a result or a row.

A job's file, a Parquet row, a request, a user's function or an agent's program may give anything. Every process must be
able to encode, send, store, show and decode what goes past the door, so that no later code fails over a value:

| given | becomes |
| --- | --- |
| null, true, false, text, finite numbers, integers of 64 bits (-2**63 to 2**64 - 1) | the same in Python's types |
| lists, tuples, sets, arrays; mappings | lists; dictionaries with text keys, as ``json`` writes the keys |
| numbers of NumPy and torch; decimals, dates and times (also NumPy's), UUIDs | numbers; text |
| NaN and NaT, which pandas writes for an absent value | null |
| half of a surrogate pair in a text | U+FFFD, the replacement character |
| everything else | ``PlainDataError``: where it is inside the value, what it is, and what to write in its place |
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from plaudit_wire.printable import MOST_SHOWN_CHARACTERS, shown, type_name

MOST_LEVELS: Final = 64
"""Lists and mappings may be nested this deeply."""
MOST_UNITS: Final = 16 << 20
"""The largest value: each of its characters counts 1, each of its parts 16. It also bounds a list that holds itself."""
_PART_UNITS = 16
_INTEGERS = range(-(2**63), 2**64)
_SHOWN_PATH_CHARACTERS = 160
_SHOWN_ERROR_CHARACTERS = 500
_SHOWN_BEFORE_BYTES = 20
_AS_TEXT = (decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, uuid.UUID)
_FINE_TIMES = re.compile(r".*\[[npfa]s\]")
"""Data types of NumPy whose times Python's types cannot hold: their items would be integers of that unit."""


class PlainDataError(ValueError):
    """A value from outside that cannot travel.

    ``where``: the path inside the value, such as ``extra_info.n[3]``. The text names it, the value and the remedy.
    """

    def __init__(self, complaint: str, remedy: str, where: str = "") -> None:
        super().__init__(complaint, remedy, where)
        self.complaint, self.remedy, self.where = complaint, remedy, where

    def __str__(self) -> str:
        where, half = self.where, _SHOWN_PATH_CHARACTERS // 2
        if len(where) > _SHOWN_PATH_CHARACTERS:
            where = f"{where[:half]}…{where[-half:]}"
        return f"{where}{': ' if where else ''}{self.complaint}; {self.remedy}"

    def within(self, outer: str) -> PlainDataError:
        """Return the same error, seen from a value that holds this one at ``outer``."""
        joint = "" if not self.where or self.where.startswith("[") else "."
        return PlainDataError(self.complaint, self.remedy, f"{outer}{joint}{self.where}")


def plain(value: Any, name: str = "", *, most_units: int = MOST_UNITS) -> Any:
    """Return a value as plain data that every process can hold, by the table above.

    Args:
        name: Where the value stands, such as ``extra_info``: the beginning of the error's path.
        most_units: The largest size, as ``MOST_UNITS`` counts it.

    Raises:
        PlainDataError: A part of it has no plain form.
    """
    try:
        return _Walk(most_units).plain(value, 0)
    except PlainDataError as error:
        raise error.within(name) if name else error from None
    except Exception as error:  # the value's own code, which may raise wherever it is asked for something
        raise PlainDataError(
            f"is {shown(value)}, which cannot be read ({error_text(error)})",
            "write null, true, false, numbers, text, lists or mappings",
            name,
        ) from None


def plain_json(text: str | bytes, name: str = "", *, most_units: int = MOST_UNITS) -> Any:
    """Return what a JSON text holds, as ``plain`` does. Raise ``PlainDataError``, also where it is not JSON."""
    return plain(json_value(text, name), name, most_units=most_units)


def json_value(text: str | bytes, name: str = "", *, nan: bool = False) -> Any:
    """Return what a JSON text holds, for a reader that judges parts of it by ``plain``; raise ``PlainDataError``.

    Args:
        nan: Read the constant NaN, which Python's ``json`` writes for an absent number.
    """
    try:
        mended = mended_json(text if isinstance(text, bytes) else plain_text(text).encode())
        try:
            return msgspec.json.decode(mended)
        except msgspec.DecodeError as error:
            if nan and (b"NaN" in mended or b"Infinity" in mended):
                with contextlib.suppress(json.JSONDecodeError):  # the slower reader knows both
                    return json.loads(mended, parse_constant=_nan_alone)
            raise error
    except RecursionError:
        raise _too_deep(name) from None
    except UnicodeDecodeError as error:
        raise not_utf8(error, name) from None
    except (ValueError, MemoryError) as error:  # msgspec's errors are ValueErrors
        if "out of range" in str(error):
            raise PlainDataError("holds a number beyond the largest of 64 bits", "write it as text", name) from None
        raise PlainDataError(f"is not JSON ({error})", "give one JSON value", name) from None


def not_utf8(error: UnicodeDecodeError, name: str = "") -> PlainDataError:
    """Return the error of a text of another encoding; it shows the first wrong bytes and what stands before."""
    found = bytes(error.object[max(0, error.start - _SHOWN_BEFORE_BYTES) : error.end])
    return PlainDataError(f"holds text that is not UTF-8 ({shown(found)})", "encode it as UTF-8", name)


def _nan_alone(name: str) -> float:
    """Return NaN; refuse Infinity, which Python reads as well."""
    if name != "NaN":
        raise ValueError(f"{name} is no value of JSON")
    return math.nan


_HALVES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])"
    rb"|\\.",
    re.DOTALL,
)
"""A whole pair, or a half of one (group 1), or another escape, whose second character may be a backslash."""
_ENCODED_HALF = re.compile(rb"\xed[\xa0-\xbf]")


def mended_json(text: bytes) -> bytes:
    """Return a JSON text in which halves of surrogate pairs are U+FFFD, for msgspec's readers, which refuse them."""
    escaped = b"\\u" in text and (b"\\ud" in text or b"\\uD" in text)
    if not escaped and (b"\xed" not in text or not _ENCODED_HALF.search(text)):
        return text
    return _HALVES.sub(lambda match: "\N{REPLACEMENT CHARACTER}".encode() if match[1] else match[0], text)


def plain_text(text: str) -> str:
    """Return a text that every process can encode: halves of surrogate pairs become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # two halves that belong together, as UTF-16 splits them, become their character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def error_text(error: BaseException, most_characters: int = _SHOWN_ERROR_CHARACTERS) -> str:
    """Return the type and the message of an exception, whose own methods may raise, as plain data."""
    try:
        text = str(error) if isinstance(error, PlainDataError) else f"{type_name(error)}: {error}"
        return plain_text(str.__getitem__(text, slice(most_characters)))
    except BaseException:  # the exception's own code
        return type_name(error)


class _Walk:
    """Walks one value and counts its size."""

    def __init__(self, most_units: int) -> None:
        self._most_units = most_units
        self._units_left = most_units

    def plain(self, value: Any, level: int) -> Any:
        """Return one part of the value."""
        kind = type(value)
        if kind is str:
            self._count(_PART_UNITS + len(value))
            return plain_text(value)
        self._count(_PART_UNITS)
        if value is None or kind is bool:
            return value
        if kind is int:
            return _integer(value)
        if kind is float:
            return _number(value)
        if kind is dict:
            return self._mapping(value, level)
        if kind is list or kind is tuple:
            return self._list(value, level)
        return self._other(value, level)

    def _other(self, value: Any, level: int) -> Any:
        """Return a part of a type that is not Python's own."""
        if isinstance(value, str):
            return self.plain(str.__str__(value), level)
        if isinstance(value, int):
            return _integer(int.__int__(value))
        if isinstance(value, float):
            return _number(float.__float__(value))
        if isinstance(value, Mapping):
            return self._mapping(value, level)
        if isinstance(value, list | tuple | set | frozenset):
            return self._list(value, level)
        if isinstance(value, _AS_TEXT):
            return self.plain(_as_text(value), level)
        if isinstance(value, bytes | bytearray | memoryview):
            raise PlainDataError(f"is bytes: {shown(value)}", "write text, such as base64")
        if _FINE_TIMES.fullmatch(str(getattr(value, "dtype", ""))):
            value = value.astype(f"{value.dtype.kind}8[us]")
        for method in ("tolist", "item"):  # arrays and scalars of NumPy and torch
            if callable(convert := getattr(value, method, None)):
                converted = _converted(value, convert)
                if type(converted) is not type(value):
                    return self.plain(converted, level)
        raise PlainDataError(
            f"is of type {type_name(value)}: {shown(value)}",
            "write null, true, false, numbers, text, lists or mappings",
        )

    def _list(self, values: Any, level: int) -> list[Any]:
        if level >= MOST_LEVELS:
            raise _too_deep()
        kept: list[Any] = []
        try:
            for value in values:
                kept.append(self.plain(value, level + 1))  # noqa: PERF401 (its length is the failed part's number)
        except PlainDataError as error:
            raise error.within(f"[{len(kept)}]") from None
        return kept

    def _mapping(self, values: Mapping[Any, Any], level: int) -> dict[str, Any]:
        if level >= MOST_LEVELS:
            raise _too_deep()
        kept: dict[str, Any] = {}
        for key, value in values.items():
            name = self._key(key)
            if name in kept:
                raise PlainDataError(f"has two keys {shown(name)}", "give each key once, as text")
            try:
                kept[name] = self.plain(value, level + 1)
            except PlainDataError as error:
                raise error.within(name[:MOST_SHOWN_CHARACTERS]) from None
        return kept

    def _key(self, key: Any) -> str:
        if isinstance(key, str):
            self._count(_PART_UNITS + len(key))
            return plain_text(str.__str__(key))
        if key is None or isinstance(key, bool):
            return {None: "null", True: "true", False: "false"}[key]
        if isinstance(key, int) and int(key) in _INTEGERS:
            return str(int(key))
        if isinstance(key, float) and math.isfinite(key):
            return repr(float(key))
        raise PlainDataError(f"has the key {shown(key)} of type {type(key).__name__}", "give text keys")

    def _count(self, units: int) -> None:
        self._units_left -= units
        if self._units_left < 0:
            raise PlainDataError(
                f"is larger than {self._most_units >> 20} Mi characters", "give less, or a path or id of the data"
            )


def _integer(value: int) -> int:
    if value not in _INTEGERS:
        raise PlainDataError(f"is an integer beyond 64 bits ({_digits(value)})", "write it as text")
    return value


def _digits(value: int) -> str:
    """Return an integer for a message; Python refuses to write thousands of digits in decimal."""
    return shown(value) if value.bit_length() < 200 else f"{value.bit_length()} bits"


def _number(value: float) -> float | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise PlainDataError(f"is {value}, which JSON cannot hold", "write a finite number, null, or text")
    return value


def _as_text(value: Any) -> str | None:
    if isinstance(value, datetime.date | datetime.time):
        return str.__str__(value.isoformat()) if value == value else None  # NaT of pandas equals nothing
    return str.__str__(str(value))


def _converted(value: Any, convert: Any) -> Any:
    try:
        return convert()
    except Exception as error:  # the value's own code
        raise PlainDataError(
            f"is {type_name(value)}, which cannot be read ({error_text(error)})", "write numbers, text or lists"
        ) from None


def _too_deep(where: str = "") -> PlainDataError:
    return PlainDataError(f"is nested more than {MOST_LEVELS} levels deep", "give flatter data", where)
