"""The trainer's own ledger, pure: what is in flight, whose turn it is, what ended how.

It is the authority: Redis's counters follow it, not the other way round. A checkpoint carries its ``snapshot``, so
that a resumed trainer knows which groups the restored policy has learnt from. Positions of a split are admitted in
order; what has to be done again goes back to the front of the queue under a higher attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from plaudit_wire.records import GroupEnd, Split
from plaudit_workers.stream.trainer.ledger import Ledger
from plaudit_workers.training.run.schedule import InFlight

Snapshot = dict[str, Any]
"""Plain data: JSON and msgpack can hold it."""


class Positions:
    """The prompts of one split: a cursor, the positions to be admitted again, the groups in flight."""

    def __init__(self) -> None:
        self.cursor = 0
        """Positions below it were admitted before."""
        self.ahead: set[int] = set()
        """Positions above it that were admitted before, too (by a trainer before this one)."""
        self.returned: dict[int, int] = {}
        """Position to be admitted again → attempt under which."""
        self.in_flight: dict[str, InFlight] = {}

    def attempt(self, position: int) -> int:
        """The attempt under which a position would be admitted now."""
        return self.returned.get(position, 0)

    def admit(self, flight: InFlight) -> None:
        """A group is in flight from now on; the cursor passes it once all below were admitted."""
        self.returned.pop(flight.position, None)
        self.in_flight[flight.group] = flight
        if flight.position >= self.cursor:
            self.ahead.add(flight.position)
        while self.cursor in self.ahead:
            self.ahead.remove(self.cursor)
            self.cursor += 1

    def was_admitted(self, position: int) -> bool:
        """Whether a position was admitted before."""
        return position < self.cursor or position in self.ahead

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
            "ahead": sorted(self.ahead),
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
        positions.ahead = set(snapshot["ahead"])
        positions.returned = dict(snapshot["returned"])
        positions.in_flight = {fields[0]: InFlight(*fields) for fields in snapshot["in_flight"]}
        return positions


class TrainerLedger:
    """Counts of the surviving line, and the positions of both splits."""

    def __init__(self) -> None:
        self.counts = Ledger()
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

    def find(self, group: str) -> InFlight | None:
        """A group in flight; None when it is not."""
        split = self.split_of(group)
        return self.splits[split].in_flight[group] if split else None

    def split_of(self, group: str) -> Split | None:
        """Of which split a group is in flight; None when it is not."""
        return next((split for split, positions in self.splits.items() if group in positions.in_flight), None)

    def admit(self, split: Split, flight: InFlight) -> None:
        """Counts an admitted group."""
        self.splits[split].admit(flight)
        self.counts.admitted += 1

    def withdraw(self, group: str) -> None:
        """A group was not admitted after all (no room): its position is to be admitted under the same attempt."""
        positions = self._positions_of(group)
        flight = positions.end(group)
        positions.returned[flight.position] = flight.attempt
        self.counts.admitted -= 1

    def end(self, group: str, end: GroupEnd, reason: str = "", *, again: bool = False) -> InFlight:
        """Counts the end of a group in flight.

        Args:
            group: its id.
            end: how it ended.
            reason: why it was dropped.
            again: its prompt is to be admitted again.

        Raises:
            KeyError: it is not in flight.
        """
        positions = self._positions_of(group)
        flight = positions.end(group)
        if end == "trained":
            self.counts.trained += 1
        elif end == "evaluated":
            self.counts.evaluated += 1
        else:
            self.counts.dropped[reason] = self.counts.dropped.get(reason, 0) + 1
        if again:
            positions.give_back(flight)
        return flight

    def roll_back(self, groups: Iterable[str]) -> None:
        """Groups whose work is lost: dropped, and their prompts are to be admitted again in their turn."""
        for group in list(groups):
            self.end(group, "dropped", "rolled_back", again=True)

    def count_lost(self, groups: int) -> None:
        """Groups of a lost future: admitted after the checkpoint, and rolled back."""
        self.counts.admitted += groups
        if groups:
            self.counts.dropped["rolled_back"] = self.counts.dropped.get("rolled_back", 0) + groups

    def counters(self) -> dict[str, int]:
        """The counts by the names that Redis's ``state`` has for them."""
        return self.counts.counters()

    def problems(self) -> list[str]:
        """What does not add up; empty when admitted = trained + evaluated + dropped + in flight."""
        return replace(self.counts, open=sum(1 for _ in self.flights())).problems()

    def snapshot(self) -> Snapshot:
        """All of it as plain data."""
        return {
            "counters": self.counters(),
            "splits": {split: positions.snapshot() for split, positions in self.splits.items()},
        }

    @classmethod
    def restored(cls, snapshot: Snapshot) -> TrainerLedger:
        """The inverse of ``snapshot``."""
        ledger = cls()
        ledger.counts = Ledger.from_counters(snapshot["counters"], num_open=0)
        ledger.splits = {split: Positions.restored(of_split) for split, of_split in snapshot["splits"].items()}
        return ledger

    def begun_anew(self) -> TrainerLedger:
        """For a run that goes on from another run's checkpoint: its positions, nothing counted, nothing in flight."""
        ledger = TrainerLedger()
        for split, positions in self.splits.items():
            ledger.splits[split].cursor = positions.cursor
            ledger.splits[split].ahead = set(positions.ahead)
            busy = {flight.position for flight in positions.in_flight.values()}
            ledger.splits[split].returned = dict.fromkeys(sorted(busy | positions.returned.keys()), 0)
        return ledger

    def _positions_of(self, group: str) -> Positions:
        split = self.split_of(group)
        if split is None:
            raise KeyError(f"group {group} is not in flight")
        return self.splits[split]
