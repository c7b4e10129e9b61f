"""Looks at the signatures of the functions that a job names against the arguments that it gives them.

Unlike ``check_files`` this imports the files, each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from plaudit_reward.functions.check import problem_of
from plaudit_reward.functions.target import Target
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob

_AT_A_TIME = 4


def check_functions(job: RLJob) -> list[Problem]:
    """Everything that would keep a reward function of the job from being called.

    Args:
        job: resolved (``load_job``), its files there (``check_files``).
    """
    targets = dict(_targets(job))
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        found = pool.map(problem_of, targets.values())
    return [
        Problem(field, problem.rstrip("."), "Nothing was started")
        for field, problem in zip(targets, found, strict=True)
        if problem is not None
    ]


def _targets(job: RLJob) -> Iterator[tuple[str, Target]]:
    reward = job.spec.reward
    for index, scorer in enumerate(reward.scorers):
        if scorer.kind == "python" and scorer.python is not None:
            function = scorer.python
            yield (
                f"spec.reward.scorers[{index}].python",
                Target(function.path, function.function, dict(function.arguments), scorer.scope, scorer.isolation),
            )
    if reward.combine.kind == "python":
        yield "spec.reward.combine", Target(reward.combine.path, reward.combine.function, scope="combine")
