"""Evaluate the policy on the validation prompts, without training on them.

The trainer waits for it, so every sample is of exactly the validated version; training prompts that may be admitted
are generated and scored meanwhile. An interrupted validation starts over with new positions.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from plaudit_metrics.statistics.stages import best_of, majority
from plaudit_wire.records import GroupEnd, GroupRecord, ScoringRecord
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.groups import Admitter, GroupEnding, GroupIntake, end_groups
from plaudit_workers.training.state import RunContext, RunState

_LOOK_EVERY_S = 1.0


@dataclass
class Evaluation:
    """Hold the results of a validation."""

    groups: list[Group] = field(default_factory=list)
    records: list[GroupRecord] = field(default_factory=list)
    """The groups' ends, in the same order."""
    seconds: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Return ``val/…`` and ``val-core/…`` (see ``validation_figures``), ``timing_s/testing``."""
        return validation_figures(self.groups) | {"timing_s/testing": self.seconds}


class Validation:
    """Evaluate the published policy on the validation prompts."""

    def __init__(self, run: RunContext, state: RunState, admitter: Admitter, intake: GroupIntake) -> None:
        self._run = run
        self._state = state
        self._admitter = admitter
        self._intake = intake

    async def evaluate(self, stop: asyncio.Event) -> Evaluation | None:
        """Evaluate all prompts once; return None if ``stop`` was set before the end."""
        started = self._run.clock.now()
        evaluation = Evaluation()
        remaining = self._begin()
        while remaining:
            await self._admit(remaining)
            await self._intake.wait(_LOOK_EVERY_S)
            if stop.is_set():
                return None
            remaining -= await self._end_ready(evaluation)
        evaluation.seconds = self._run.clock.now() - started
        return evaluation

    async def _admit(self, remaining: set[int]) -> None:
        in_flight = self._state.ledger.validation.in_flight
        waiting = sorted(remaining - {flight.position for flight in in_flight.values()})
        room = self._run.plan.max_validation_in_flight - len(in_flight)
        await self._admitter.admit_validation(waiting[:room])

    def _begin(self) -> set[int]:
        """Return the positions of a new validation: the next whole epoch."""
        source, positions = self._run.validation_data, self._state.ledger.validation
        assert source is not None
        begun = -(-positions.cursor // len(source))
        positions.cursor = begun * len(source)
        positions.returned.clear()
        return set(range(positions.cursor, positions.cursor + len(source)))

    async def _end_ready(self, evaluation: Evaluation) -> set[int]:
        groups = self._intake.validation()
        step, taken = self._state.version.number, self._run.clock.now()
        by_end: dict[GroupEnd, list[Group]] = {
            "evaluated": [group for group in groups if group.phase == "ready"],
            "dropped": [group for group in groups if group.phase != "ready"],
        }
        for end, of_end in by_end.items():
            evaluation.records += await end_groups(self._run, self._state, of_end, GroupEnding(end, step, taken))
            evaluation.groups += of_end
        return {group.prompt.position for group in groups}


def validation_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Compute ``val/<data_source>/<scorer>`` and ``…/reward`` (means over scored samples), and best of n. Pure."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    by_source: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        source = group.prompt.data_source
        for sample in group.samples:
            scoring = sample.scoring
            if scoring is None or scoring.value is None:
                continue
            values[f"val/{source}/reward"].append(scoring.value)
            for name, scorer in scoring.scorers.items():
                if scorer.value is not None and name != "reward":
                    values[f"val/{source}/{name}"].append(scorer.value)
        by_source[source].append(group)
    figures = {key: sum(found) / len(found) for key, found in values.items()}
    for source, of_source in by_source.items():
        figures |= {f"val-core/{source}/reward/{key}": value for key, value in _of_several_samples(of_source).items()}
    return figures


def _of_several_samples(groups: Sequence[Group]) -> dict[str, float]:
    """Return ``best@n`` for n = 2, 4, … and all samples of a prompt, ``maj@n`` of all if each has an answer (``pred``).

    Each is the mean over the prompts with at least n scores, and beside it the share of such prompts.
    """
    scored = [[each.scoring for each in group.samples if each.scoring is not None] for group in groups]
    rewards = [[scoring.value for scoring in own if scoring.value is not None] for own in scored]
    most = max(len(group.samples) for group in groups)
    found: dict[str, list[float]] = {}
    for count in _draws(most):
        found[f"best@{count}"] = [best_of(own, count) for own in rewards if len(own) >= count]
        if count == most:
            found[f"maj@{count}"] = [majority(own) for own in map(_answers, scored) if len(own) == count]
    return {
        f"{name}/{figure}": value
        for name, of_prompts in found.items()
        if of_prompts
        for figure, value in (
            ("mean", sum(of_prompts) / len(of_prompts)),
            ("prompts_share", len(of_prompts) / len(groups)),
        )
    }


def _draws(most: int) -> list[int]:
    """Return 2, 4, … below ``most``, and ``most``; nothing for one sample a prompt."""
    return [2**power for power in range(1, most.bit_length()) if 2**power < most] + [most] * (most > 1)


def _answers(scorings: Sequence[ScoringRecord]) -> list[tuple[str, float]]:
    """Return the answers that a scorer names, each with the reward of its sample."""
    return [
        (str(scorer.extra["pred"]), scoring.value)
        for scoring in scorings
        for scorer in scoring.scorers.values()
        if "pred" in scorer.extra and scoring.value is not None
    ]
