"""Scripted stories of audited runs: what a reward and an independent auditor say of the same groups, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from plaudit_metrics.statistics.audits import AuditedGroup, AuditedSample
from plaudit_wire.records import ScorerRecord

AUDITOR = "honest"
SAMPLES = 8
Story = Callable[[int], tuple[float, float, float]]
"""From the step to the mean quality of the responses, the length bonus's size, and the shift of the auditor's scale."""


def _learning(step: int) -> float:
    return 0.2 + 0.5 * (1 - math.exp(-step / 60))


def healthy(step: int) -> tuple[float, float, float]:
    """The policy learns the task."""
    return _learning(step), 0.0, 0.0


def saturated(step: int) -> tuple[float, float, float]:
    """The policy has learnt what it can: nothing changes but by chance."""
    return 0.7, 0.0, 0.0


def length_hack(step: int) -> tuple[float, float, float]:
    """From step 80 the policy writes longer and worse responses, for a bonus."""
    hacked = max(step - 80, 0) / 60
    return _learning(min(step, 80)) * math.exp(-hacked), 1.5 * min(hacked, 1), 0.0


def to_the_top(step: int) -> tuple[float, float, float]:
    """The policy learns all there is: in the end the responses of a group are alike."""
    return 0.2 + 0.77 * (1 - math.exp(-step / 80)), 0.0, 0.0


def drifting_reward(step: int) -> tuple[float, float, float]:
    """The judge that rewards gives more from step to step for the same responses, which stay as they are."""
    return 0.5, 0.004 * step, 0.0


STORIES: dict[str, Story] = {
    "healthy": healthy,
    "saturated": saturated,
    "to the top": to_the_top,
    "length hack": length_hack,
    "drifting reward": drifting_reward,
}


def audited_groups(
    story: Story,
    steps: int,
    *,
    groups: float = 3.2,
    noise: float = 0.15,
    failed: float = 0.0,
    seed: int = 0,
    code: tuple[float, Story] | None = None,
) -> list[AuditedGroup]:
    """Return the audited groups of a run.

    Args:
        story: what happens.
        groups: mean number of audited groups a step (Poisson).
        noise: standard deviation of the auditor's error for one sample.
        failed: share of the samples for which the auditor fails.
        seed: of the run.
        code: share of the groups that are of a second data source, and their story.
    """
    draw = np.random.default_rng(seed)
    found = []
    for step in range(1, steps + 1):
        for number in range(draw.poisson(groups)):
            source, (quality, bonus, shift) = "math", story(step)
            if code is not None and draw.random() < code[0]:
                source, (quality, bonus, shift) = "code", code[1](step)
            difficulty = draw.normal(0, 0.15)
            samples = []
            for index in range(SAMPLES):
                own = float(np.clip(draw.normal(quality + difficulty, 0.25), 0, 1))
                reward = own + bonus * float(draw.uniform(0.5, 1))
                record = ScorerRecord("scored", own + shift + float(draw.normal(0, noise)))
                if draw.random() < failed:
                    record = ScorerRecord("infra_error", reason="the judge is down")
                samples.append(AuditedSample(index, reward, {AUDITOR: record}))
            found.append(AuditedGroup(f"t-{step * 100 + number}-1.0", step, source, samples))
    return found
