"""Describe the problems of a job: field, message, remedy and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from plaudit_wire.errors import RefusedError

_INDEX = re.compile(r"\[[0-9]{1,9}\]")


@dataclass(frozen=True)
class Problem:
    """Describe one thing to fix."""

    field: str
    """The field as written: ``spec.reward.scorers[1].weight``; empty for the file as a whole."""
    message: str
    """What is wrong, with the value."""
    remedy: str
    line: int | None = None
    """Line of the job file, from 1."""
    also: tuple[str, ...] = ()
    """The other fields that are involved."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Return all fields that are involved."""
        return (self.field, *self.also)

    @property
    def location(self) -> tuple[str | int, ...]:
        """Return keys and indices from the root of the job to the field; keys may hold brackets of their own."""
        steps = _INDEX.sub(r".\g<0>", self.field).split(".")
        return tuple(int(step[1:-1]) if _INDEX.fullmatch(step) else step for step in steps if step)

    def __str__(self) -> str:
        place = f"{self.field}: " if self.field else ""
        return f"{place}{self.message.removesuffix('.')}. {self.remedy}"


def is_within(field: str, sections: Iterable[str]) -> bool:
    """Return True for one of these fields, and for a field below one of them."""
    return any(field == section or field.startswith((f"{section}.", f"{section}[")) for section in sections)


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> list[str]:
    """Return the known name that differs by case alone, or that a mistyped one is most similar to; else none."""
    names = list(known)
    same = [each for each in names if each.casefold() == name.casefold()]
    return same[:1] or get_close_matches(name, names, n=1, cutoff=likeness)


def did_you_mean(meant: Sequence[str], otherwise: str = "") -> str:
    """Return a remedy that asks for these names first; without any, it is what stands otherwise."""
    return f"Did you mean {' or '.join(meant)}? {otherwise}".rstrip() if meant else otherwise


Case = tuple[object, str, str, str, *tuple[str, ...]]
"""If the first is true there is a problem: its field, message, remedy, and the other fields that are involved."""


def refusals(*cases: Case) -> Iterator[Problem]:
    """Yield the problem of each case that applies."""
    for applies, field, message, remedy, *also in cases:
        if applies:
            yield Problem(field, message, remedy, also=tuple(also))


class JobError(RefusedError):
    """Report an invalid job, with every problem in the order of the file."""

    def __init__(self, problems: Sequence[Problem], path: Path | str = "") -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line or 0)
        self.path = str(path)
        super().__init__("\n".join(self._located(problem) for problem in self.problems))

    def _located(self, problem: Problem) -> str:
        line = f":{problem.line}" if problem.line else ""
        return f"{self.path}{line}: {problem}" if self.path else str(problem)
