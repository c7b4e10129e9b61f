"""Check the fields that ``sleepDuringUpdates`` of rollouts and of served models depends on."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rewards.scorers import RewardModelSpec
from plaudit_workers.job.spec.rljob import Spec

_OWN_ROUTES = ("enable_sleep_mode", "middleware")
"""Arguments of vLLM's server by which it sleeps."""


def rollout_turn_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what contradicts rollouts that sleep."""
    if not spec.rollout.sleep_during_updates:
        return
    if spec.trainer.lora is not None:
        yield Problem(
            "spec.rollout.sleepDuringUpdates",
            "discards the weights of the engine, but with trainer.lora only adapters are published to load again",
            "Remove sleepDuringUpdates, or lora",
            also=("spec.trainer.lora",),
        )
    if any(group.pods_per_replica > 1 for group in spec.rollout.by_group.values()):
        yield Problem(
            "spec.rollout.sleepDuringUpdates",
            "is not supported for replicas of several pods",
            "Remove sleepDuringUpdates, or set podsPerReplica to 1",
            also=("spec.rollout.podsPerReplica",),
        )


def model_turn_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what contradicts served models that sleep."""
    for index, scorer in enumerate(spec.reward.scorers):
        model = scorer.served
        if model is None or not model.sleep_during_updates:
            continue
        section = f"spec.reward.scorers[{index}].{scorer.served_field}"
        if not spec.trains:
            yield Problem(
                f"{section}.sleepDuringUpdates",
                "needs a trainer, whose updates the model sleeps through, and this job has none",
                "Remove sleepDuringUpdates",
            )
        own_server = isinstance(model, RewardModelSpec) and model.engine == "plaudit"
        if not own_server and (taken := [name for name in _OWN_ROUTES if name in model.arguments]):
            yield Problem(
                f"{section}.arguments.{taken[0]}",
                "is set by sleepDuringUpdates",
                f"Remove {taken[0]}, or sleepDuringUpdates",
                also=(f"{section}.sleepDuringUpdates",),
            )
