"""Encode plain values as JSON, between a program's process and the process that evaluates an assert.

Nothing in the JSON can run: what a program returns is rebuilt from numbers, texts and containers of them, so that no
method of the program's classes (``__eq__``, ``__bool__``, ``__del__``) reaches the evaluating process. Other objects
stay where they are; only their number crosses. Standard library only: Sandbox Fusion runs this file's text.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import math
from collections.abc import Callable, Iterator, KeysView, ValuesView
from typing import Any

SMALL_INT = 1 << 62
"""Integers beyond it travel in hexadecimal, which is read in linear time."""
MOST_ITEMS = 100_000
"""An iterator is read up to this many items."""


class _Never:
    """The class of no value: numbers that need a form of their own are written by ``_SCALARS``."""


def encode(value: Any, keep: Callable[[Any], int] | None = None) -> Any:
    """Return the JSON form of a value; ``keep`` keeps an object without a plain form and returns its number.

    Without ``keep``, raises ``TypeError`` for such an object.
    """
    if value is None or type(value) is bool:
        return value
    for base, write in _SCALARS:
        if isinstance(value, base):
            return write(value)
    return _container(value, keep) or _other(value, keep)


def _container(value: Any, keep: Callable[[Any], int] | None) -> list[Any] | None:
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            return [name, [encode(item, keep) for item in value]]
    for name, mapping in _MAPPINGS.items():
        if isinstance(value, mapping):
            return [name, [[encode(key, keep), encode(item, keep)] for key, item in value.items()]]
    if isinstance(value, (KeysView, ValuesView, Iterator)):
        items = [encode(item, keep) for item in itertools.islice(value, MOST_ITEMS)]
        return ["iterator" if isinstance(value, Iterator) else "list", items]
    return None


def _other(value: Any, keep: Callable[[Any], int] | None) -> Any:
    for name, (base, parts, _) in _OTHERS.items():
        if isinstance(value, base):
            return [name, encode(parts(value))]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        array = encode(value.tolist(), keep)
        return ["ndarray", [array, value.dtype.str]] if type(value).__name__ == "ndarray" else array
    if keep is None:
        raise TypeError(f"a value of type {type(value).__name__} cannot be passed to the program")
    return ["object", keep(value)]


def decode(tree: Any, refer: Callable[[int], Any]) -> Any:
    """Rebuild a value; ``refer`` returns what stands for an object of the program, by its number.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``ArithmeticError`` if it is no such form.
    """
    if isinstance(tree, dict):
        raise ValueError("a JSON object is no value")
    if not isinstance(tree, list):
        return tree
    name, content = tree
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, refer) for item in content)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, refer): decode(item, refer) for key, item in content})
    if name == "iterator":
        return iter([decode(item, refer) for item in content])
    if name == "ndarray":
        return _array(decode(content[0], refer), content[1])
    if name == "object":
        return refer(int(content))
    return _OTHERS[name][2](decode(content, refer))


def with_integer_keys(mapping: dict[str, Any]) -> dict[Any, Any]:
    """Return an object of JSON with integers as keys where all of them are integers, else itself."""
    try:
        keyed = {int(key): item for key, item in mapping.items()}
    except ValueError:
        return mapping
    return keyed if len(keyed) == len(mapping) else mapping


def _int_form(value: Any) -> Any:
    number = int(value)
    return number if -SMALL_INT < number < SMALL_INT else ["int", hex(number)]


def _float_form(value: Any) -> Any:
    number = float(value)
    return number if math.isfinite(number) else ["float", repr(number)]


def _array(items: Any, kind: str) -> Any:
    import numpy  # only where the program itself uses it

    return numpy.array(items, dtype=numpy.dtype(kind))


_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = ((int, _int_form), (float, _float_form), (str, str.__str__))
_SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)}
_MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (collections.Counter, collections.OrderedDict, dict)}
_OTHERS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (_Never, str, lambda text: int(text, 16)),
    "float": (_Never, str, float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "Fraction": (
        fractions.Fraction,
        lambda value: [value.numerator, value.denominator],
        lambda parts: fractions.Fraction(*parts),
    ),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}
"""Kinds by name: the class, what it is made of, and how it is made again."""
