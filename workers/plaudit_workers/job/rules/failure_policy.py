"""Check ``lifecycle.failurePolicy``."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import Spec

_POLICY = "spec.lifecycle.failurePolicy"


def failure_policy_problems(spec: Spec) -> Iterator[Problem]:
    """Yield rules that apply to nothing or to two things at once, and pauses that contradict each other."""
    policy = spec.lifecycle.failure_policy
    for number, rule in enumerate(policy.rules):
        if (rule.on_exit_codes is not None) == bool(rule.on_reasons):
            yield Problem(
                f"{_POLICY}.rules[{number}]",
                "has both onExitCodes and onReasons" if rule.on_reasons else "has neither onExitCodes nor onReasons",
                "Give exactly one of onExitCodes and onReasons",
            )
    pauses = policy.backoff
    if pauses.initial_seconds > pauses.max_seconds:
        yield Problem(
            f"{_POLICY}.backoff.initialSeconds",
            f"{pauses.initial_seconds:g} is more than maxSeconds {pauses.max_seconds:g}",
            "Lower initialSeconds, or raise maxSeconds",
            also=(f"{_POLICY}.backoff.maxSeconds",),
        )
