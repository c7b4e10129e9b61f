"""Choose the prompt of each position: the next one in the data's order that the run does not always solve. Pure.

``data.train.skipSolved``. Positions are what the schedule admits; a place is a number for ``PromptSource.prompt_at``.
Without skipping they are the same. A position of step s may be admitted once version s - 1 - k is published, so its
place depends on the results of steps up to s - 1 - k and on nothing later, whether it is known by then or not: with
``order: step`` the prompts depend on the results alone, never on the speed of workers, also after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plaudit_workers.training.run.prompts import PromptSource
from plaudit_workers.training.run.trainer_ledger import Positions

OrderSnapshot = dict[str, Any]
"""Plain data: JSON can hold it."""


@dataclass(frozen=True)
class SolvedRule:
    """Define when a prompt is skipped."""

    threshold: float
    """A group whose mean reward is at least this has solved its prompt."""
    min_visits: int
    """A prompt is skipped once so many groups have solved it and none has not."""


class PromptOrder:
    """Hold the places of positions, and the run's own results that they depend on.

    Args:
        rule: None: position and place are the same.
    """

    def __init__(self, rule: SolvedRule | None = None, max_staleness: int = 0) -> None:
        self._rule = rule
        self._max_staleness = max_staleness
        self._end = 0
        """All positions below it have a place."""
        self._next_place = 0
        self._places: dict[int, int] = {}
        """Places of positions that may still be asked for; a missing one below ``_end`` is the position itself."""
        self._visits: dict[int, int] = {}
        """Row → visits that solved it, -1 once one did not; of the results that are counted."""
        self._pending: dict[int, list[tuple[int, bool]]] = {}
        """Step → (row, solved) of results that positions of later steps depend on."""
        self.num_solved = 0
        """Rows that are skipped."""

    def place(self, position: int, step_of: Callable[[int], int], source: PromptSource) -> int:
        """Return the place of a position; give every position up to it one that has none.

        Args:
            position: that is admitted now, for the first time or again.
            step_of: returns the step for which a position is admitted.
        """
        if self._rule is None:
            return position
        while self._end <= position:
            self._count_until(step_of(self._end) - 1 - self._max_staleness)
            self._places[self._end] = self._next_unsolved(source)
            self._end += 1
        return self._places.get(position, position)

    def record(self, position: int, step: int, mean_reward: float, source: PromptSource) -> None:
        """Record the result of a group that has ended; its position has a place.

        Args:
            step: in which it ended.
            mean_reward: over its samples with a score.
        """
        if self._rule is not None:
            row = source.row_at(self._places.get(position, position))
            self._pending.setdefault(step, []).append((row, mean_reward >= self._rule.threshold))

    def forget_ended(self, positions: Positions) -> None:
        """Drop the places of positions that are neither in flight nor to be admitted again."""
        awaited = {flight.position for flight in positions.in_flight.values()} | positions.returned.keys()
        self._places = {
            position: place
            for position, place in self._places.items()
            if position in awaited or not positions.was_admitted(position)
        }

    def snapshot(self) -> OrderSnapshot | None:
        """Return the state for a checkpoint; None without a rule."""
        if self._rule is None:
            return None
        return {
            "end": self._end,
            "next_place": self._next_place,
            "places": sorted(self._places.items()),
            "visits": sorted(self._visits.items()),
            "pending": [[step, results] for step, results in sorted(self._pending.items())],
        }

    def restore(self, snapshot: OrderSnapshot | None, positions: Positions, *, with_results: bool = True) -> None:
        """Continue from a checkpoint.

        Args:
            snapshot: its state; None: it was written without a rule, where position and place are the same.
            positions: the training positions of that checkpoint's ledger.
            with_results: False: forget the results, which are another run's.
        """
        if snapshot is None:
            self._end = self._next_place = max([positions.cursor, *(position + 1 for position in positions.ahead)])
            return
        self._end, self._next_place = snapshot["end"], snapshot["next_place"]
        self._places = dict(snapshot["places"])
        if with_results:
            self._visits = dict(snapshot["visits"])
            self._pending = {step: [(row, solved) for row, solved in own] for step, own in snapshot["pending"]}
            self._count_solved()

    def _count_until(self, step: int) -> None:
        for ended in sorted(number for number in self._pending if number <= step):
            for row, solved in self._pending.pop(ended):
                before = self._visits.get(row, 0)
                self._visits[row] = before + 1 if solved and before >= 0 else -1
            self._count_solved()

    def _count_solved(self) -> None:
        self.num_solved = sum(map(self._is_solved, self._visits))

    def _is_solved(self, row: int) -> bool:
        return self._rule is not None and self._visits.get(row, 0) >= self._rule.min_visits

    def _next_unsolved(self, source: PromptSource) -> int:
        """Return the next place that is not skipped; the very next one if all rows are solved."""
        place = self._next_place
        while self.num_solved < len(source) and self._is_solved(source.row_at(place)):
            place += 1
        self._next_place = place + 1
        return place
