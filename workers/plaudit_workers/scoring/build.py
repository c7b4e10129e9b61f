"""Makes the pipeline of a job: ``spec.reward`` in, opened scorers out."""

from __future__ import annotations

import asyncio

from plaudit_reward.combiner import Combiner, FunctionCombiner, WeightedSum
from plaudit_reward.errors import ConfigurationError
from plaudit_reward.function_scorer import FunctionScorer, PostProcess
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rule_scorer import RuleScorer
from plaudit_reward.stage import GroupStage, Rules, Stage, When
from plaudit_reward.target import Target
from plaudit_workers.job.reward import Reward
from plaudit_workers.job.scorers import Scorer
from plaudit_workers.process import RefusedError


async def build_pipeline(reward: Reward, worker: str) -> Pipeline:
    """Builds and opens every scorer of a job; nothing is left running when one is refused.

    Args:
        reward: the job's section, paths absolute.
        worker: name of this process, for the records.

    Raises:
        RefusedError: a scorer cannot be built as configured.
    """
    made = [_make(scorer, reward) for scorer in reward.scorers]
    combining = _combining(reward)
    functions = [scorer for scorer in [*made, combining] if isinstance(scorer, FunctionScorer)]
    outcomes = await asyncio.gather(*(function.open() for function in functions), return_exceptions=True)
    problems = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if problems:
        await asyncio.gather(*(function.close() for function in functions))
        others = [problem for problem in problems if not isinstance(problem, ConfigurationError)]
        raise others[0] if others else RefusedError("\n".join(str(problem) for problem in problems))
    stages: list[Stage] = []
    group_stages: list[GroupStage] = []
    for scorer, built in zip(reward.scorers, made, strict=True):
        _place(built, _rules(scorer, reward), scorer.scope, stages, group_stages)
    return Pipeline(
        stages, group_stages, combiner=_combiner(combining, reward), timeout_s=reward.timeout_seconds, worker=worker
    )


def _make(scorer: Scorer, reward: Reward) -> RuleScorer | FunctionScorer:
    if scorer.kind == "rule":
        return RuleScorer(scorer.name, scorer.rule)
    if scorer.kind == "python" and scorer.python is not None:
        target = Target(
            path=scorer.python.path,
            function=scorer.python.function,
            arguments=dict(scorer.python.arguments),
            scope=scorer.scope,
            isolation=scorer.isolation,
        )
        return _function(scorer.name, target, reward)
    raise RefusedError(
        f"scorer {scorer.name}: kind {scorer.kind} is not available in this version; use kind rule or python"
    )


def _function(name: str, target: Target, reward: Reward) -> FunctionScorer:
    workers = reward.workers
    return FunctionScorer(name, target, processes=workers.processes, max_concurrent=workers.max_concurrent_samples)


def _combining(reward: Reward) -> FunctionScorer | None:
    if reward.combine.kind != "python":
        return None
    target = Target(reward.combine.path, reward.combine.function, scope="combine")
    return _function("combine", target, reward)


def _combiner(function: FunctionScorer | None, reward: Reward) -> Combiner:
    if function is None:
        return WeightedSum()
    return FunctionCombiner(function, timeout_s=reward.timeout_seconds, retries=reward.retries)


def _rules(scorer: Scorer, reward: Reward) -> Rules:
    return Rules(
        weight=scorer.weight,
        retries=reward.retries if scorer.retries is None else scorer.retries,
        timeout_s=scorer.timeout_seconds,
        on_failure=scorer.on_failure or reward.on_failure,
        when=When(scorer.when.scorer, scorer.when.equals) if scorer.when is not None else None,
    )


def _place(
    built: RuleScorer | FunctionScorer,
    rules: Rules,
    scope: str,
    stages: list[Stage],
    group_stages: list[GroupStage],
) -> None:
    """Puts a scorer where its scope says; a class with ``post_process_scores`` stands in both."""
    if not isinstance(built, FunctionScorer):
        stages.append(Stage(built, rules))
    elif scope == "group":
        group_stages.append(GroupStage(built, rules, replaces=built.replaces_values))
    else:
        stages.append(Stage(built, rules))
        if built.post_processes:
            group_stages.append(GroupStage(PostProcess(built), rules, of=built.name))
