"""Decide which prompts may be admitted now and which ready groups may be trained now, and keep the ledger. Pure.

Plain data without Redis, torch or clocks. With P = promptsPerStep, k = maxStaleness and version v = number of the
newest published policy (step s publishes version s):

- prompts of step s are admitted once version s - 1 - k is published, at most P (1 + k) groups at a time;
- ``order: step``: step s trains the groups of positions [(s - 1) P, s P), a mini-batch takes whichever is ready first;
- ``dynamicSampling``: a group whose scores are all equal is dropped, and the open step gets an extra position, the next
  one that was not admitted; all later positions belong to their steps as if it did not exist;
- ``order: ready``: step s trains any P ready groups, oldest first, but never so that another group could no longer be
  trained within k versions of the oldest policy that sampled it (earliest deadline first is feasible exactly when for
  every deadline d the groups due by d fit into the slots left until d).

``TrainerLedger`` holds the groups in flight, the next positions, and how groups ended. ``join_epochs`` and
``join_mini_batches`` join the figures of the updates of a mini-batch and of a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from plaudit_wire.records import GroupEnd, Split
from plaudit_workers.stream.trainer import Ledger

GroupOrder = Literal["step", "ready"]
Figures = Mapping[str, float]
_COUNTS = "training/"
_WORK = ("training/computed_tokens", "training/tflops", "actor/skipped_updates")
"""Counts of what each epoch does again."""
_TOKENS, _TOKENS_PER_S = "training/computed_tokens", "actor/tokens_per_s"
_SPEEDS = (_TOKENS_PER_S, "perf/mfu/actor")
_OF_UPDATES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr", "actor/reward_kl_penalty_coeff")
_WEIGHTS = {
    "critic/": "training/scored",
    "actor/reward_kl_penalty": "training/scored",
    "response_": "training/samples",
    "actor/": "training/loss_tokens",
}
"""Beginning of a mean's key → the count by which it is weighted; the first that fits."""
LedgerSnapshot = dict[str, Any]
"""Plain data: JSON and msgpack can hold it."""


@dataclass(frozen=True)
class Schedule:
    """Hold the settings of ``spec.algorithm`` that determine admission and training."""

    steps: int
    """Steps of the run, from 1."""
    prompts_per_step: int
    mini_batches_per_step: int = 1
    max_staleness: int = 0
    """Largest number of versions between the policy that sampled a group and the one that is trained on it."""
    order: GroupOrder = "step"
    max_failed_share: float = 0.5
    """A step is not trained if scoring failed for a larger share of its samples."""
    max_replaced: int = 0
    """Groups without a signal that a step replaces at most (``dynamicSampling``); 0: it trains them."""

    @property
    def mini_batch_size(self) -> int:
        """Return the number of groups of a full mini-batch."""
        return self.prompts_per_step // self.mini_batches_per_step

    @property
    def max_in_flight(self) -> int:
        """Return the largest number of groups in flight."""
        return self.prompts_per_step * (1 + self.max_staleness)

    def step_of(self, position: int) -> int:
        """Return the step for which a prompt is admitted."""
        return position // self.prompts_per_step + 1

    def admissible_end(self, version: int) -> int:
        """Return the first position that may not be admitted while ``version`` is the newest published policy."""
        last_step = min(version + 1 + self.max_staleness, self.steps)
        return last_step * self.prompts_per_step


@dataclass(frozen=True)
class GroupInFlight:
    """Describe a group that is admitted and has not ended."""

    group: str
    position: int
    attempt: int
    step: int
    """The step it was admitted for."""
    version: int
    """Number of the oldest policy version that can have sampled a token of it."""
    arrived: bool = False
    """The trainer has taken the group from the ``ready`` stream and accepted it."""


@dataclass(frozen=True)
class ReadyGroup:
    """Describe a group that waits for the trainer, reduced to what the schedule needs."""

    flight: GroupInFlight
    num_samples: int
    num_failed: int
    """Samples whose scoring failed; those that their scorers skipped on purpose do not count."""
    trainable: bool
    """False: too few scores, or a failure that drops the group; it is accounted for but not trained."""
    uniform: bool = False
    """All its scores are equal, so its advantages are 0."""


def choose(
    schedule: Schedule, step: int, slots: int, in_flight: Collection[GroupInFlight], ready: Sequence[ReadyGroup]
) -> list[ReadyGroup]:
    """Return the ready groups that the open step may take now, at most ``slots``.

    Args:
        slots: groups that the step still has room for (P less those taken).
        in_flight: groups admitted, not ended and not yet taken by the step; the ready ones among them.
        ready: in the order in which they became ready.
    """
    if schedule.order == "step":
        return [group for group in ready if group.flight.step == step][:slots]
    return _choose_within_deadlines(schedule, step, slots, in_flight, ready)


def _choose_within_deadlines(
    schedule: Schedule, step: int, slots: int, in_flight: Collection[GroupInFlight], ready: Sequence[ReadyGroup]
) -> list[ReadyGroup]:
    deadlines = range(step, step + schedule.max_staleness + 1)
    # due[i]: groups in flight that must be trained by deadlines[i]; room[i]: slots until then.
    last_steps = [_last_step(schedule, flight) for flight in in_flight]
    due = [sum(last <= deadline for last in last_steps) for deadline in deadlines]
    room = [slots + schedule.prompts_per_step * (deadline - step) for deadline in deadlines]
    chosen: list[ReadyGroup] = []
    for group in sorted(ready, key=lambda ready_group: (ready_group.flight.version, ready_group.flight.position)):
        if len(chosen) == slots:
            break
        last = _last_step(schedule, group.flight)
        left = [due[i] - (last <= deadline) for i, deadline in enumerate(deadlines)]
        if all(left[i] <= room[i] - len(chosen) - 1 for i in range(len(deadlines))):
            chosen.append(group)
            due = left
    return chosen


def _last_step(schedule: Schedule, flight: GroupInFlight) -> int:
    """Return the last step that may train a group."""
    return flight.version + 1 + schedule.max_staleness


def join_epochs(updates: Sequence[Figures]) -> dict[str, float]:
    """Return the figures of all updates on the same mini-batch: its samples count once, tokens as often as computed."""
    return _joined(updates, lambda key: key in _WORK)


def join_mini_batches(updates: Sequence[Figures]) -> dict[str, float]:
    """Return the figures of a step from those of its mini-batches."""
    return _joined(updates, lambda key: key in _WORK or key.startswith(_COUNTS))


def _joined(updates: Sequence[Figures], is_count: Callable[[str], bool]) -> dict[str, float]:
    """Add counts, take the least and largest of ``…/min`` and ``…/max``, and average all others.

    Speeds are weighted by seconds, means of samples by samples, means of tokens by tokens; losses, norms and learning
    rates are plain means of the updates. An update that lacks a figure, or whose value is not finite, does not count
    for it; without any other there is no figure.
    """
    joined: dict[str, float] = {}
    for key in dict.fromkeys(key for update in updates for key in update):
        reporting = [update for update in updates if math.isfinite(update.get(key, math.nan))]
        if reporting:
            values = [update[key] for update in reporting]
            joined[key] = sum(values) if is_count(key) else _summary(key, values, reporting)
    return joined


def _summary(key: str, values: Sequence[float], updates: Sequence[Figures]) -> float:
    if key.endswith("/min"):
        return min(values)
    if key.endswith("/max"):
        return max(values)
    weights = [_weight(key, update) for update in updates]
    if not sum(weights):
        weights = [1.0] * len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _weight(key: str, update: Figures) -> float:
    if key in _SPEEDS:
        return update[_TOKENS] / update[_TOKENS_PER_S]  # seconds
    if key in _OF_UPDATES:
        return 1.0
    count = next((count for beginning, count in _WEIGHTS.items() if key.startswith(beginning)), "")
    return update.get(count, 1.0)


class Positions:
    """Hold the prompts of one split: a cursor, the positions to be admitted again, the groups in flight.

    Positions are admitted in order; those to be repeated return to the front of the queue with a higher attempt.
    """

    def __init__(self) -> None:
        self.cursor = 0
        """All positions below it were admitted."""
        self.ahead: set[int] = set()
        """Positions above the cursor that were admitted as well (by an earlier trainer)."""
        self.returned: dict[int, int] = {}
        """Position to admit again → its next attempt."""
        self.in_flight: dict[str, GroupInFlight] = {}
        self.extras: list[tuple[int, int]] = []
        """Extra positions in order, each with its step; only those that ``step_of`` still needs."""
        self._num_older_extras = 0

    @property
    def num_extras(self) -> int:
        """Return the number of extra positions of the whole run."""
        return self._num_older_extras + len(self.extras)

    def step_of(self, schedule: Schedule, position: int) -> int:
        """Return the step for which a position is admitted that is not admitted yet, or is to be admitted again."""
        index = bisect_left(self.extras, (position, 0))
        if index < len(self.extras) and self.extras[index][0] == position:
            return self.extras[index][1]
        return schedule.step_of(position - self._num_older_extras - index)

    def add_extras(self, step: int, count: int) -> None:
        """Give a step further positions: the next ones above all that were admitted."""
        newest = max([self.cursor - 1, *self.ahead, *(position for position, _ in self.extras)])
        self.extras += [(newest + 1 + number, step) for number in range(count)]
        awaited = [flight.position for flight in self.in_flight.values()]
        oldest = min([self.cursor, *self.returned, *awaited])
        while self.extras[0][0] < oldest:
            del self.extras[0]
            self._num_older_extras += 1

    def attempt(self, position: int) -> int:
        """Return the attempt with which a position would be admitted now."""
        return self.returned.get(position, 0)

    def admit(self, flight: GroupInFlight) -> None:
        """Record a group in flight; the cursor passes its position once all positions below were admitted."""
        self.returned.pop(flight.position, None)
        self.in_flight[flight.group] = flight
        if flight.position >= self.cursor:
            self.ahead.add(flight.position)
        while self.cursor in self.ahead:
            self.ahead.remove(self.cursor)
            self.cursor += 1

    def was_admitted(self, position: int) -> bool:
        """Return True if a position was admitted before."""
        return position < self.cursor or position in self.ahead

    def has_ended(self, position: int, attempt: int) -> bool:
        """Return True if this attempt of a position was admitted and has ended."""
        if not self.was_admitted(position):
            return False
        present = [flight.attempt for flight in self.in_flight.values() if flight.position == position]
        following = self.returned.get(position, present[0] if present else None)
        return following is None or attempt < following

    def end(self, group: str) -> GroupInFlight:
        """Remove a group from those in flight."""
        return self.in_flight.pop(group)

    def snapshot(self) -> LedgerSnapshot:
        """Return the state as plain data."""
        return {
            "cursor": self.cursor,
            "ahead": sorted(self.ahead),
            "returned": [[position, attempt] for position, attempt in sorted(self.returned.items())],
            "in_flight": [
                [flight.group, flight.position, flight.attempt, flight.step, flight.version]
                for flight in self.in_flight.values()
            ],
            "extras": {"older": self._num_older_extras, "positions": [list(extra) for extra in self.extras]},
        }

    @classmethod
    def restored(cls, snapshot: LedgerSnapshot) -> Positions:
        """Return the state of a ``snapshot``."""
        positions = cls()
        positions.cursor = snapshot["cursor"]
        positions.ahead = set(snapshot["ahead"])
        positions.returned = dict(snapshot["returned"])
        positions.in_flight = {fields[0]: GroupInFlight(*fields) for fields in snapshot["in_flight"]}
        extras = snapshot.get("extras", {"older": 0, "positions": []})
        positions._num_older_extras = extras["older"]
        positions.extras = [(position, step) for position, step in extras["positions"]]
        return positions

    def begun_anew(self) -> Positions:
        """Return these positions for another run: those in flight are to be admitted again, as first attempts."""
        positions = Positions.restored(self.snapshot())
        busy = {flight.position for flight in positions.in_flight.values()}
        positions.in_flight = {}
        positions.returned = dict.fromkeys(sorted(busy | positions.returned.keys()), 0)
        return positions


def admissible(schedule: Schedule, version: int, positions: Positions) -> list[int]:
    """Return the positions to admit now, in order; those to admit again come first."""
    end = schedule.admissible_end(version) + positions.num_extras
    room = schedule.max_in_flight - len(positions.in_flight)
    again = [position for position in sorted(positions.returned) if position < end]
    fresh = [position for position in range(positions.cursor, end) if position not in positions.ahead]
    return (again + fresh)[: max(room, 0)]


class TrainerLedger:
    """Count the groups of the surviving line and keep the positions of both splits.

    It is authoritative: Redis's counters are corrected by it. A checkpoint contains its ``snapshot``, so a resumed
    trainer knows which groups the restored policy has learnt from.
    """

    def __init__(self) -> None:
        self.counts = Ledger()
        self.splits: dict[Split, Positions] = {"train": Positions(), "validation": Positions()}

    @property
    def train(self) -> Positions:
        """Return the positions of training prompts."""
        return self.splits["train"]

    @property
    def validation(self) -> Positions:
        """Return the positions of validation prompts."""
        return self.splits["validation"]

    def flights(self) -> Iterator[GroupInFlight]:
        """Yield every group in flight."""
        for positions in self.splits.values():
            yield from positions.in_flight.values()

    def find(self, group: str) -> GroupInFlight | None:
        """Return a group in flight, or None."""
        found = (positions.in_flight.get(group) for positions in self.splits.values())
        return next(filter(None, found), None)

    def admit(self, split: Split, flight: GroupInFlight) -> None:
        """Count an admitted group."""
        self.splits[split].admit(flight)
        self.counts.admitted += 1

    def withdraw(self, group: str) -> None:
        """Undo ``admit`` for a group that found no room: its position is admitted later with the same attempt."""
        positions = self._positions_of(group)
        flight = positions.end(group)
        positions.returned[flight.position] = flight.attempt
        self.counts.admitted -= 1

    def end(self, group: str, end: GroupEnd, reason: str = "", *, again: bool = False) -> GroupInFlight:
        """Count the end of a group in flight.

        Args:
            again: queue its prompt to be admitted again.
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
            positions.returned[flight.position] = flight.attempt + 1
        return flight

    def roll_back(self, groups: Iterable[str]) -> None:
        """Drop groups whose work is lost and queue their prompts to be admitted again."""
        for group in list(groups):
            self.end(group, "dropped", "rolled_back", again=True)

    def count_lost(self, groups: int) -> None:
        """Count groups that were admitted after the checkpoint and rolled back."""
        self.counts.admitted += groups
        if groups:
            self.counts.dropped["rolled_back"] = self.counts.dropped.get("rolled_back", 0) + groups

    def counters(self) -> dict[str, int]:
        """Return the counts by the names that Redis uses."""
        return self.counts.counters()

    def problems(self) -> list[str]:
        """Return discrepancies; empty while admitted = trained + evaluated + dropped + in flight."""
        return replace(self.counts, open=sum(1 for _ in self.flights())).problems()

    def snapshot(self) -> LedgerSnapshot:
        """Return the state as plain data."""
        return {
            "counters": self.counters(),
            "splits": {split: positions.snapshot() for split, positions in self.splits.items()},
        }

    @classmethod
    def restored(cls, snapshot: LedgerSnapshot) -> TrainerLedger:
        """Return the state of a ``snapshot``."""
        ledger = cls()
        ledger.counts = Ledger.from_counters(snapshot["counters"], num_open=0)
        ledger.splits = {split: Positions.restored(of_split) for split, of_split in snapshot["splits"].items()}
        return ledger

    def begun_anew(self) -> TrainerLedger:
        """Return the ledger of a run that starts from another run's checkpoint: its positions, with all counts zero."""
        ledger = TrainerLedger()
        ledger.splits = {split: positions.begun_anew() for split, positions in self.splits.items()}
        return ledger

    def _positions_of(self, group: str) -> Positions:
        for positions in self.splits.values():
            if group in positions.in_flight:
                return positions
        raise KeyError(f"group {group} is not in flight")
