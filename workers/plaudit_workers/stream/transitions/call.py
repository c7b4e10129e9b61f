"""A call of one transition: its function, its arguments and the type of its answer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer", covariant=True)
Argument = str | bytes | int | float

_numbers = itertools.count()
_boot = os.urandom(6).hex()


def new_call() -> str:
    """Return a token that no other call has: by it Redis recognises a repeat of the same call."""
    return f"{_boot}{os.getpid():x}.{next(_numbers):x}"


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """Describe one transition, ready to be sent, once or repeatedly.

    Attributes:
        script: file name in ``lua/`` without its ending.
        arguments: ARGV[2] and following.
        group: ARGV[1]; empty for transitions that concern no single group.
    """

    script: str
    arguments: Sequence[Argument]
    read: Callable[[Any], Answer]
    group: str = ""


def nothing(answer: Any) -> None:
    """Ignore the answer: there is only one."""
