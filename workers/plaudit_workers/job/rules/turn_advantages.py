"""Check the fields that ``algorithm.advantagePer: turn`` depends on."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import Spec

_FIELD = "spec.algorithm.advantagePer"
_AGENTS = ("environment", "custom")


def turn_advantage_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what contradicts advantages of turns."""
    algorithm, reward, agent = spec.algorithm, spec.reward, spec.rollout.agent
    if algorithm.advantage_per == "sample":
        return
    if agent.kind not in _AGENTS:
        yield Problem(
            _FIELD,
            f"is turn, but agent kind {agent.kind} has no rewards of turns",
            "Remove advantagePer, or choose agent kind environment or custom",
            also=("spec.rollout.agent.kind",),
        )
    if not any(reward.environment_weights.values()):
        yield Problem(
            _FIELD,
            "is turn, but no scorer makes the environment's reward a part of the sample's",
            "Add {name: …, kind: environment} with a weight to reward.scorers, or remove advantagePer",
            also=("spec.reward.scorers",),
        )
    if reward.combine.kind == "python" or reward.combine.normalize == "group":
        combined = "kind is python" if reward.combine.kind == "python" else "normalize is group"
        yield Problem(
            _FIELD,
            f"is turn, which subtracts rewards of turns from the sample's, but combine.{combined}: "
            "the sample's reward is not their weighted sum",
            "Use the plain weightedSum, or remove advantagePer",
            also=("spec.reward.combine",),
        )
    if algorithm.loss.penalises_reward:
        yield Problem(
            _FIELD,
            "is turn, but klIn: reward lowers the reward of whole samples: a turn would pay for the turns before it",
            "Choose klIn: loss, or remove advantagePer",
            also=("spec.algorithm.loss.klIn",),
        )
    if algorithm.dynamic_sampling:
        yield Problem(
            _FIELD,
            "is turn, but dynamicSampling drops groups with equal scores, whose turns may differ",
            "Remove dynamicSampling or advantagePer",
            also=("spec.algorithm.dynamicSampling",),
        )
