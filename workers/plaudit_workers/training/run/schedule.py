"""Decide which prompts may be admitted now and which ready groups may be trained now. Pure.

Called by the conductor with plain data; independent of Redis, torch and clocks. With P = promptsPerStep,
k = maxStaleness and version v = number of the newest published policy (step s publishes version s):

- prompts of step s are admitted once version s - 1 - k is published, at most P (1 + k) groups at a time;
- ``order: step``: step s trains the groups of positions [(s - 1) P, s P), a mini-batch takes whichever is ready first;
- ``dynamicSampling``: a group whose scores are all equal is dropped, and the open step gets an extra position, the next
  one that was not admitted; all later positions belong to their steps as if it did not exist;
- ``order: ready``: step s trains any P ready groups, oldest first, but never so that another group could no longer be
  trained within k versions of the oldest policy that sampled it (earliest deadline first is feasible exactly when for
  every deadline d the groups due by d fit into the slots left until d).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

GroupOrder = Literal["step", "ready"]


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
    schedule: Schedule,
    step: int,
    slots: int,
    in_flight: Collection[GroupInFlight],
    ready: Sequence[ReadyGroup],
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
