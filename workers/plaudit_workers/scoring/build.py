"""Build the pipeline of a job from ``spec.reward``, with its scorers opened. The kinds of scorers: ``kinds``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from plaudit_reward.endpoint.cached_scorer import CachedScorer
from plaudit_reward.functions.target import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer, PostProcess
from plaudit_reward.pipeline.combiner import Combiner, FunctionCombiner, WeightedSum
from plaudit_reward.pipeline.pipeline import Pipeline
from plaudit_reward.pipeline.stage import GroupStage, Rules, Stage, When
from plaudit_reward.scorer import GroupScorer, Scorer
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_workers.job.spec.rewards.reward import RewardSpec
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.process import model_servers
from plaudit_workers.scoring.kinds.context import AnyScorer, BuildContext
from plaudit_workers.scoring.kinds.python import function_scorer
from plaudit_workers.scoring.kinds.registry import MAKERS


async def build_pipeline(reward: RewardSpec, worker: str, context: BuildContext | None = None) -> Pipeline:
    """Build and open every scorer of a job; if one is refused, close all others.

    Args:
        context: the environment of the scorers. Default: outside a run.
    """
    context = context or BuildContext(reward, worker, model_servers=model_servers())
    made = _made(reward, context)
    combining = _combining(context)
    await _opened([*made, combining] if combining else made)
    stages: list[Stage] = []
    group_stages: list[GroupStage] = []
    for scorer, built in zip(reward.scorers, made, strict=True):
        _place(built, _rules(scorer, reward), scorer.scope, stages, group_stages)
    return Pipeline(
        stages,
        group_stages,
        combiner=_combiner(combining, reward),
        timeout_s=reward.timeout_seconds,
        worker=worker,
        normalize=reward.combine.normalize == "group",
    )


def _made(reward: RewardSpec, context: BuildContext) -> list[AnyScorer]:
    made, problems = [], []
    for scorer in reward.scorers:
        try:
            made.append(MAKERS[scorer.kind](scorer, context))
        except (ConfigurationError, RefusedError) as error:
            problems.append(str(error))
    if problems:
        raise RefusedError("\n".join(problems))
    return made


async def _opened(scorers: Sequence[AnyScorer]) -> None:
    """Open all concurrently; if one is refused, close all and report every refusal."""
    outcomes = await asyncio.gather(*(scorer.open() for scorer in scorers), return_exceptions=True)
    problems = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not problems:
        return
    await asyncio.gather(*(scorer.close() for scorer in scorers))
    others = [problem for problem in problems if not isinstance(problem, ConfigurationError)]
    raise others[0] if others else RefusedError("\n".join(str(problem) for problem in problems))


def _combining(context: BuildContext) -> FunctionScorer | None:
    reward = context.reward
    if reward.combine.kind != "python":
        return None
    return function_scorer("combine", Target(reward.combine.path, reward.combine.function, scope="combine"), context)


def _combiner(function: FunctionScorer | None, reward: RewardSpec) -> Combiner:
    if function is None:
        return WeightedSum()
    return FunctionCombiner(function, timeout_s=reward.timeout_seconds, retries=reward.retries)


def _rules(scorer: ScorerSpec, reward: RewardSpec) -> Rules:
    return Rules(
        weight=scorer.weight,
        retries=reward.retries if scorer.retries is None else scorer.retries,
        timeout_s=scorer.timeout_seconds,
        on_failure=scorer.on_failure or reward.on_failure,
        when=When(scorer.when.scorer, scorer.when.equals) if scorer.when is not None else None,
    )


def _place(built: AnyScorer, rules: Rules, scope: str, stages: list[Stage], group_stages: list[GroupStage]) -> None:
    """Add a scorer to the stages of its scope; a class with ``post_process_scores`` goes into both."""
    if scope == "group":
        replaces = isinstance(built, FunctionScorer) and built.replaces_values
        group_stages.append(GroupStage(cast(GroupScorer, built), rules, replaces=replaces))
        return
    stages.append(Stage(cast(Scorer, built), rules))
    scorer = built.scorer if isinstance(built, CachedScorer) else built
    if isinstance(scorer, FunctionScorer) and scorer.post_processes:
        group_stages.append(GroupStage(PostProcess(scorer), rules, of=scorer.name))
