"""The trainer's own ledger, pure: what is in flight, whose turn it is, what ended how.

It is the authority: Redis's counters follow it, not the other way round. A checkpoint carries its ``snapshot``, so
that a resumed trainer knows which groups the restored policy has learnt from. Positions of a split are admitted in
order; what has to be done again goes back to the front of the queue under a higher attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from plaudit_metrics.records import GroupEnd, Split
from plaudit_workers.training.schedule import InFlight

Snapshot = dict[str, Any]
"""Plain data: JSON and msgpack can hold it."""


class Positions:
    """The prompts of one split: a cursor, the positions to be admitted again, the groups in flight."""

    def __init__(self) -> None:
        self.cursor = 0
        """Positions below it were admitted before."""
        self.returned: dict[int, int] = {}
        """Position to be admitted again → attempt under which."""
        self.in_flight: dict[str, InFlight] = {}

    def attempt(self, position: int) -> int:
        """The attempt under which a position would be admitted now."""
        return self.returned.get(position, 0)

    def admit(self, flight: InFlight) -> None:
        """A group is in flight from now on; the cursor passes it, and all below that are in flight already."""
        self.returned.pop(flight.position, None)
        self.in_flight[flight.group] = flight
        busy = {other.position for other in self.in_flight.values()}
        while self.cursor in busy:
            self.cursor += 1

    def end(self, group: str) -> InFlight:
        """A group is not in flight any more."""
        return self.in_flight.pop(group)

    def give_back(self, flight: InFlight) -> None:
        """The position of an ended group is to be admitted again."""
        self.returned[flight.position] = flight.attempt + 1

    def snapshot(self) -> Snapshot:
        """All of it as plain data."""
        return {
            "cursor": self.cursor,
            "returned": [[position, attempt] for position, attempt in sorted(self.returned.items())],
            "in_flight": [
                [flight.group, flight.position, flight.attempt, flight.step, flight.version]
                for flight in self.in_flight.values()
            ],
        }

    @classmethod
    def restored(cls, snapshot: Snapshot) -> Positions:
        """The inverse of ``snapshot``."""
        positions = cls()
        positions.cursor = snapshot["cursor"]
        positions.returned = dict(snapshot["returned"])
        positions.in_flight = {fields[0]: InFlight(*fields) for fields in snapshot["in_flight"]}
        return positions


class TrainerLedger:
    """Counts of the surviving line, and the positions of both splits."""

    def __init__(self) -> None:
        self.admitted = 0
        self.trained = 0
        self.evaluated = 0
        self.dropped: Counter[str] = Counter()
        self.splits: dict[Split, Positions] = {"train": Positions(), "validation": Positions()}

    @property
    def train(self) -> Positions:
        """Training prompts."""
        return self.splits["train"]

    @property
    def validation(self) -> Positions:
        """Validation prompts."""
        return self.splits["validation"]

    def flights(self) -> Iterator[InFlight]:
        """Every group in flight."""
        for positions in self.splits.values():
            yield from positions.in_flight.values()

    def split_of(self, group: str) -> Split | None:
        """Of which split a group is in flight; None when it is not."""
        return next((split for split, positions in self.splits.items() if group in positions.in_flight), None)

    def admit(self, split: Split, flight: InFlight) -> None:
        """Counts an admitted group."""
        self.splits[split].admit(flight)
        self.admitted += 1

    def end(self, group: str, end: GroupEnd, reason: str = "", *, again: bool = False) -> InFlight:
        """Counts the end of a group in flight.

        Args:
            group: its id.
            end: how it ended.
            reason: why it was dropped.
            again: its prompt is to be admitted again.
        """
        split = self.split_of(group)
        if split is None:
            raise KeyError(f"group {group} is not in flight")
        flight = self.splits[split].end(group)
        if end == "trained":
            self.trained += 1
        elif end == "evaluated":
            self.evaluated += 1
        else:
            self.dropped[reason] += 1
        if again:
            self.splits[split].give_back(flight)
        return flight

    def roll_back(self, groups: Iterable[str]) -> None:
        """Groups whose work is lost: dropped, and their prompts are to be admitted again in their turn."""
        for group in groups:
            self.end(group, "dropped", "rolled_back", again=True)

    def counters(self) -> dict[str, int]:
        """The counts by the names that Redis's ``state`` has for them."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "evaluated": self.evaluated,
            "dropped": self.dropped.total(),
            **{f"dropped:{reason}": count for reason, count in sorted(self.dropped.items())},
        }

    def problems(self) -> list[str]:
        """What does not add up; empty when admitted = trained + evaluated + dropped + in flight."""
        in_flight = sum(1 for _ in self.flights())
        accounted = self.trained + self.evaluated + self.dropped.total() + in_flight
        if accounted == self.admitted:
            return []
        return [f"{self.admitted} groups were admitted, {accounted} are accounted for: {self.counters()}"]

    def snapshot(self) -> Snapshot:
        """All of it as plain data."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "evaluated": self.evaluated,
            "dropped": dict(self.dropped),
            "splits": {split: positions.snapshot() for split, positions in self.splits.items()},
        }

    @classmethod
    def restored(cls, snapshot: Snapshot) -> TrainerLedger:
        """The inverse of ``snapshot``."""
        ledger = cls()
        ledger.admitted = snapshot["admitted"]
        ledger.trained = snapshot["trained"]
        ledger.evaluated = snapshot["evaluated"]
        ledger.dropped = Counter(snapshot["dropped"])
        ledger.splits = {split: Positions.restored(of_split) for split, of_split in snapshot["splits"].items()}
        return ledger
