"""Check the settings of the policy loss against each other."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import Spec


def loss_problems(spec: Spec) -> Iterator[Problem]:
    """Find settings of the loss that contradict each other."""
    loss = spec.algorithm.loss
    if loss.kind == "python" and not (loss.path and loss.function):
        yield Problem(
            "spec.algorithm.loss.path",
            "or function is missing; kind python requires both",
            "Give path: … and function: …",
        )
    if loss.correction_floor > loss.correction_cap:
        yield Problem(
            "spec.algorithm.loss.correctionFloor",
            f"{loss.correction_floor:g} is above correctionCap {loss.correction_cap:g}, so no token is left",
            "Give less than correctionCap",
            also=("spec.algorithm.loss.correctionCap",),
        )
    if loss.correction == "tis" and loss.correction_floor > 0:
        yield Problem(
            "spec.algorithm.loss.correctionFloor",
            f"is {loss.correction_floor:g}, but correction tis truncates weights above the cap only and has no floor",
            "Set correction to decoupled or reject, which leave out what is below the floor, or remove it",
            also=("spec.algorithm.loss.correction",),
        )
    bound = loss.clip_ratio_c
    if 0 < bound <= 1:
        yield Problem(
            "spec.algorithm.loss.clipRatioC",
            f"{bound:g} would bound tokens whose probability did not change",
            "Give more than 1, such as 3, or 0 for no bound",
        )
