"""Decide what the open step does next: groups go in as they become ready, decisions come out. Pure.

A mini-batch closes at its size, or when no more groups can arrive. Groups that cannot be trained count as accounted
for. If scoring failed for more than ``max_failed_share`` of the samples, nothing more is trained: the remaining groups
of the step are returned, to be admitted again. While groups are missing, that share is computed over those that are
ready: a mini-batch above it is held until the step is complete, because a few broken prompts that arrive first must not
stop a step, and a broken scorer must not train it.

Groups whose scores are all equal free their slots again, ``max_replaced`` of them in a step (``dynamicSampling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plaudit_workers.training.run.schedule import ReadyGroup, Schedule


@dataclass(frozen=True)
class Wait:
    """Wait until more groups are ready."""


@dataclass(frozen=True)
class Update:
    """Train on these groups now: a closed mini-batch, in order of position."""

    groups: list[ReadyGroup]


@dataclass(frozen=True)
class Retry:
    """Drop these groups and admit their prompts again: too many scores failed."""

    groups: list[ReadyGroup]
    failed_share: float


@dataclass(frozen=True)
class Over:
    """End the step, whose groups are all accounted for; drop these, each with its reason."""

    dropped: list[ReadyGroup]


Decision = Wait | Update | Retry | Over


@dataclass
class OpenStep:
    """Hold the groups that the open step has taken so far.

    Attributes:
        accounted: groups of the step that ended (trained, dropped).
        replaced: groups without a signal whose slots were freed.
        retries: how often the step had too many failed scores.
    """

    schedule: Schedule
    step: int
    accounted: int = 0
    replaced: int = 0
    retries: int = 0
    _batch: list[ReadyGroup] = field(default_factory=list)
    _held: list[ReadyGroup] = field(default_factory=list)
    _untrainable: list[ReadyGroup] = field(default_factory=list)
    _num_samples: int = 0
    _num_failed: int = 0

    def snapshot(self) -> dict[str, int]:
        """Return the state to continue from if the trainer stops now.

        Groups that have not ended will be taken again; ``retries`` start anew, with repaired scorers.
        """
        return {"accounted": self.accounted, "replaced": self.replaced}

    @property
    def taken(self) -> set[str]:
        """Return the ids of the groups in the step."""
        return {group.flight.group for group in (*self._batch, *self._held, *self._untrainable)}

    @property
    def slots(self) -> int:
        """Return the number of groups that the step still has room for."""
        return self.schedule.prompts_per_step - self.accounted - len(self.taken)

    @property
    def batch_slots(self) -> int:
        """Return the number of groups that the current mini-batch still has room for."""
        return min(self.slots, self.schedule.mini_batch_size - len(self._batch))

    def replaceable(self, groups: Sequence[ReadyGroup]) -> list[ReadyGroup]:
        """Return those of the groups that are to be dropped for others, because their scores are all equal."""
        return [group for group in groups if group.uniform][: max(0, self.schedule.max_replaced - self.replaced)]

    def replace(self, groups: Sequence[ReadyGroup]) -> None:
        """Record that groups that were ready for the step were dropped for others."""
        self.replaced += len(groups)
        self._count_samples(groups)

    def take(self, groups: Sequence[ReadyGroup]) -> None:
        """Take ready groups, at most ``batch_slots`` at a time; a mini-batch that is held frees its slots."""
        self._count_samples(groups)
        for group in groups:
            (self._batch if group.trainable else self._untrainable).append(group)
        if self._batch and self.batch_slots == 0 and self._too_many_failed():
            self._held += self._batch
            self._batch = []

    def decide(self) -> Decision:
        """Return the next action. Report ``Update``, ``Retry`` and ``Over`` back by ``ended`` or ``returned``."""
        if self._batch and self.batch_slots == 0:
            return Update(_by_position(self._batch))
        if self.slots > 0:
            return Wait()
        left = self._held + self._untrainable
        if left and self._too_many_failed():
            return Retry(_by_position(left), self._failed_share())
        if self._held:
            return Update(_by_position(self._held[: self.schedule.mini_batch_size]))
        return Over(_by_position(self._untrainable))

    def ended(self, groups: Sequence[ReadyGroup]) -> None:
        """Record that the groups of an ``Update`` or ``Over`` ended."""
        self._forget(groups)
        self.accounted += len(groups)

    def returned(self, groups: Sequence[ReadyGroup]) -> None:
        """Free the slots of a ``Retry``'s groups, which are admitted again, and restart the count of failures."""
        self._forget(groups)
        self.retries += 1
        self._num_samples = self._num_failed = 0

    def _count_samples(self, groups: Sequence[ReadyGroup]) -> None:
        self._num_samples += sum(group.num_samples for group in groups)
        self._num_failed += sum(group.num_failed for group in groups)

    def _forget(self, groups: Sequence[ReadyGroup]) -> None:
        gone = {group.flight.group for group in groups}
        for taken in (self._batch, self._held, self._untrainable):
            taken[:] = [group for group in taken if group.flight.group not in gone]

    def _failed_share(self) -> float:
        return self._num_failed / self._num_samples if self._num_samples else 0.0

    def _too_many_failed(self) -> bool:
        return self._failed_share() > self.schedule.max_failed_share


def _by_position(groups: Sequence[ReadyGroup]) -> list[ReadyGroup]:
    return sorted(groups, key=lambda group: group.flight.position)
