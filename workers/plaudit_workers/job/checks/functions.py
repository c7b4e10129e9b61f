"""Check the reward functions of a job: their imports, signatures, arguments and the columns that they require.

Unlike ``check_files`` this imports the files, each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from plaudit_reward.functions.check import check
from plaudit_reward.functions.forms import ENVIRONMENTS
from plaudit_reward.functions.target import Target
from plaudit_workers.job.checks.data_files import shared_extra_info
from plaudit_workers.job.function_target import function_target
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob

_AT_A_TIME = 4


def check_functions(job: RLJob, broken: Collection[str] = ()) -> list[Problem]:
    """Find what would keep a reward function from being called; skip files of ``broken`` fields (``check_files``)."""
    targets = {
        field: target
        for field, target in _targets(job)
        if not any(other == field or other.startswith(f"{field}.") for other in broken)
    }
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        found = list(pool.map(check, targets.values()))
    problems = [
        Problem(field, report.problem.rstrip("."), "See docs/rewards/python.md")
        for field, report in zip(targets, found, strict=True)
        if report.problem is not None
    ]
    wanted = {field: report.columns for field, report in zip(targets, found, strict=True) if report.columns}
    problems += _missing_environments(job, targets, wanted)
    data = {field: [column for column in columns if column != ENVIRONMENTS] for field, columns in wanted.items()}
    return [*problems, *_missing_columns(job, targets, data, broken)]


def _missing_environments(
    job: RLJob, targets: Mapping[str, Target], wanted: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Compare TRL's argument ``environments`` with the job's agent: a class of TRL's form has attributes."""
    agent = job.spec.rollout.agent
    if not job.spec.trains or (agent.kind == "environment" and agent.class_name):
        return
    for field, columns in wanted.items():
        if ENVIRONMENTS in columns:
            yield Problem(
                field,
                f"{targets[field].function} requires environments, but no sample is played in an environment's class",
                "Set rollout.agent to kind environment with path and class, or give the parameter a default",
                also=("spec.rollout.agent.kind",),
            )


def _missing_columns(
    job: RLJob, targets: Mapping[str, Target], wanted: Mapping[str, Sequence[str]], broken: Collection[str]
) -> Iterator[Problem]:
    """Compare the columns that TRL functions require with the ``extra_info`` of every row."""
    if not wanted or not job.spec.trains:
        return
    data = job.spec.data
    paths = {"spec.data.train.path": data.train.path}
    if data.validation:
        paths["spec.data.validation.path"] = data.validation.path
    for path_field, path in paths.items():
        if path_field in broken:
            continue
        there = shared_extra_info(path)
        for field, columns in wanted.items():
            if missing := [column for column in columns if column not in there]:
                yield Problem(
                    field,
                    f"{targets[field].function} requires column {', '.join(missing)}, which extra_info of {path} does "
                    f"not have in every row (it has {', '.join(sorted(there)) or 'none'})",
                    "Add it to extra_info of every row, or give the parameter a default",
                    also=(path_field,),
                )


def _targets(job: RLJob) -> Iterator[tuple[str, Target]]:
    reward = job.spec.reward
    for index, scorer in enumerate(reward.scorers):
        if scorer.kind == "python" and scorer.python is not None:
            yield f"spec.reward.scorers[{index}].python", function_target(scorer, scorer.python)
    if reward.combine.kind == "python":
        yield "spec.reward.combine", Target(reward.combine.path, reward.combine.function, scope="combine")
