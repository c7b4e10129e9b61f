"""Check the scorers of a job against each other, and each scorer against its kind."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_wire.errors import ConfigurationError
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rule_arguments import RULE_ARGUMENTS, read_arguments
from plaudit_workers.job.rules.endpoints import cache_problems, http_problems, limits_problems, service_problems
from plaudit_workers.job.rules.judges import judge_problems
from plaudit_workers.job.spec.rewards.scorers import KINDS, ScorerSpec, kinds_with
from plaudit_workers.job.spec.rljob import Spec


def scorer_problems(spec: Spec) -> Iterator[Problem]:
    """Yield every contradiction between scorers, and between them and ``combine``."""
    for index, scorer in enumerate(spec.reward.scorers):
        field = f"spec.reward.scorers[{index}]"
        earlier = spec.reward.scorers[:index]
        yield from _name(field, scorer, earlier)
        yield from _kind(field, scorer)
        yield from _when(field, scorer, earlier)
        yield from _scope(field, scorer, spec)
        yield from judge_problems(field, scorer)
        yield from http_problems(field, scorer)
        yield from service_problems(f"{field}.service", scorer.service)
        yield from limits_problems(field, scorer)
        yield from cache_problems(field, scorer)
    if spec.reward.gateway.canary:
        yield from service_problems("spec.reward.gateway.canary.service", spec.reward.gateway.canary.service)
    yield from _weights(spec)
    yield from _combine(spec)


def _name(field: str, scorer: ScorerSpec, earlier: list[ScorerSpec]) -> Iterator[Problem]:
    if any(other.name == scorer.name for other in earlier):
        yield Problem(f"{field}.name", f"{scorer.name!r} is used twice", "Give each scorer its own name")
    if scorer.served is not None and "_" in scorer.name:
        yield Problem(
            f"{field}.name",
            f"{scorer.name!r} has '_', which the names of a served model's pods cannot have",
            f"Use '-': {scorer.name.replace('_', '-')}",
            also=(f"{field}.{scorer.served_field}",),
        )


def _kind(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    section = KINDS[scorer.kind].section
    if section and not _is_given(scorer, section):
        yield Problem(
            f"{field}.{section}",
            f"is missing; kind {scorer.kind} requires it",
            f"Add {section}: {KINDS[scorer.kind].example}",
        )
    for name in dict.fromkeys(name for traits in KINDS.values() for name in traits.fields):
        kinds = kinds_with(name)
        if scorer.kind not in kinds and _is_given(scorer, name):
            yield Problem(
                f"{field}.{name}",
                f"applies to kind {' or '.join(kinds)} only, but this scorer has kind {scorer.kind}",
                f"Set kind to {kinds[0]}, or remove {name}",
                also=(f"{field}.kind",),
            )
    if scorer.kind == "rule" and scorer.rule is not None and scorer.rule not in RULE_ARGUMENTS:
        yield Problem(
            f"{field}.rule", f"there is no rule {scorer.rule!r}", f"Rules are {', '.join(sorted(RULE_ARGUMENTS))}"
        )
    elif scorer.kind == "rule":
        yield from _rule_arguments(field, scorer)


def _is_given(scorer: ScorerSpec, written: str) -> bool:
    """Return True where the field differs from its default."""
    for name, described in type(scorer).model_fields.items():
        if described.alias == written:
            return bool(getattr(scorer, name) != described.default)
    raise KeyError(written)


def _rule_arguments(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    try:
        read_arguments(scorer.rule, scorer.rule_arguments)
    except ConfigurationError as error:
        remedy = "The arguments of each rule are in docs/rewards/rules.md"
        yield Problem(f"{field}.ruleArguments", str(error), remedy, also=(f"{field}.rule",))


def _when(field: str, scorer: ScorerSpec, earlier: list[ScorerSpec]) -> Iterator[Problem]:
    if scorer.when is None:
        return
    target = next((other for other in earlier if other.name == scorer.when.scorer), None)
    if target is None:
        names = ", ".join(other.name for other in earlier) or "none, this is the first"
        yield Problem(
            f"{field}.when.scorer",
            f"{scorer.when.scorer!r} is not an earlier scorer in the list (earlier: {names})",
            "Name an earlier scorer, or move this one after it",
            also=tuple(f"spec.reward.scorers[{i}].name" for i in range(len(earlier))),
        )
    elif target.scope == "group":
        yield Problem(
            f"{field}.when.scorer",
            f"{target.name!r} scores groups, after all their samples are scored",
            "Name a scorer with scope sample",
        )


def _scope(field: str, scorer: ScorerSpec, spec: Spec) -> Iterator[Problem]:
    if scorer.scope != "group":
        return
    if not KINDS[scorer.kind].scores_groups:
        possible = " or ".join(kind for kind, traits in KINDS.items() if traits.scores_groups)
        yield Problem(
            f"{field}.scope",
            f"kind {scorer.kind} scores one sample at a time and cannot have scope group",
            f"Set scope to sample, or use kind {possible}",
            also=(f"{field}.kind",),
        )
    if spec.trains and spec.algorithm.samples_per_prompt < 2:
        yield Problem(
            f"{field}.scope",
            f"group compares samples of a prompt, but samplesPerPrompt is {spec.algorithm.samples_per_prompt}",
            "Set samplesPerPrompt to 2 or more, or scope to sample",
            also=("spec.algorithm.samplesPerPrompt",),
        )
    if scorer.when is not None:
        yield Problem(
            f"{field}.when",
            "selects single samples, but scope is group",
            "Remove when, or set scope to sample",
            also=(f"{field}.scope",),
        )


def _weights(spec: Spec) -> Iterator[Problem]:
    scorers = spec.reward.scorers
    if spec.reward.combine.kind == "weightedSum" and all(scorer.weight == 0 for scorer in scorers):
        yield Problem(
            "spec.reward.scorers",
            "all have weight 0, so every reward is 0",
            "Give at least one a weight",
            also=tuple(f"spec.reward.scorers[{i}].weight" for i in range(len(scorers))),
        )


def _combine(spec: Spec) -> Iterator[Problem]:
    combine = spec.reward.combine
    given = bool(combine.path or combine.function)
    if combine.kind == "python" and not (combine.path and combine.function):
        yield Problem(
            "spec.reward.combine", "lacks path or function; kind python requires both", "Give path and function"
        )
    if combine.normalize == "group":
        yield from _normalize(spec)
    if combine.kind == "weightedSum" and given:
        yield Problem(
            "spec.reward.combine",
            "path and function apply to kind python only, but the kind is weightedSum",
            "Set kind to python, or remove them",
        )


def _normalize(spec: Spec) -> Iterator[Problem]:
    if spec.reward.combine.kind == "python":
        yield Problem(
            "spec.reward.combine.normalize",
            "group applies to kind weightedSum only, but the kind is python",
            "Set kind to weightedSum, or normalize in a function with scope group",
            also=("spec.reward.combine.kind",),
        )
    if not spec.trains:
        return
    algorithm = spec.algorithm
    if algorithm.samples_per_prompt < 2:
        yield Problem(
            "spec.reward.combine.normalize",
            f"group compares samples of a prompt, but samplesPerPrompt is {algorithm.samples_per_prompt}",
            "Set samplesPerPrompt to 2 or more, or remove normalize",
            also=("spec.algorithm.samplesPerPrompt",),
        )
    if algorithm.advantage == "grpo":
        yield Problem(
            "spec.algorithm.advantage",
            "grpo divides by the spread of a group's rewards, as combine.normalize already does for each scorer",
            "Set advantage to reinforcePlusPlus (GDPO: normalised over the batch) or drGrpo (no second division)",
            also=("spec.reward.combine.normalize",),
        )
