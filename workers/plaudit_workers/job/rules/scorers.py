"""The rules about ``spec.reward``: what scorers say together, and what belongs to which kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from plaudit_reward.errors import ConfigurationError
from plaudit_reward.rules.routing import RULES, read_arguments
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rules.judges import judge_problems
from plaudit_workers.job.spec.scorers import ScorerSpec

if TYPE_CHECKING:
    from plaudit_workers.job.spec.rljob import Spec

_SECTION_OF_KIND = {"python": "python", "judge": "judge", "model": "model"}


def scorer_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that the scorers, and their combination, say against each other."""
    for index, scorer in enumerate(spec.reward.scorers):
        field = f"spec.reward.scorers[{index}]"
        earlier = spec.reward.scorers[:index]
        yield from _name(field, scorer, earlier)
        yield from _kind(field, scorer)
        yield from _when(field, scorer, earlier)
        yield from _scope(field, scorer, spec)
        yield from judge_problems(field, scorer)
    yield from _weights(spec)
    yield from _combine(spec)


def _name(field: str, scorer: ScorerSpec, earlier: list[ScorerSpec]) -> Iterator[Problem]:
    if any(other.name == scorer.name for other in earlier):
        yield Problem(f"{field}.name", f"{scorer.name!r} is there twice", "Give each scorer a name of its own")


def _kind(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    for kind, section in _SECTION_OF_KIND.items():
        given = getattr(scorer, section) is not None
        if kind == scorer.kind and not given:
            yield Problem(
                f"{field}.{section}", f"is missing, and kind {kind} needs it", f"Add {section}: {_FORMS[section]}"
            )
        if kind != scorer.kind and given:
            yield Problem(
                f"{field}.{section}",
                f"belongs to kind {kind}, but the kind is {scorer.kind}",
                f"Set kind to {kind}, or leave {section} out",
                also=(f"{field}.kind",),
            )
    if scorer.kind == "rule" and scorer.rule is not None and scorer.rule not in RULES:
        yield Problem(f"{field}.rule", f"there is no rule {scorer.rule!r}", f"Rules are {', '.join(sorted(RULES))}")
    elif scorer.kind == "rule":
        yield from _rule_arguments(field, scorer)
    yield from _foreign(field, scorer)


def _rule_arguments(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    try:
        read_arguments(scorer.rule, scorer.rule_arguments)
    except ConfigurationError as error:
        remedy = "The arguments of each rule are in docs/rewards/rules.md"
        yield Problem(f"{field}.ruleArguments", str(error), remedy, also=(f"{field}.rule",))


def _foreign(field: str, scorer: ScorerSpec) -> Iterator[Problem]:
    for name, given, kinds in (
        ("rule", scorer.rule is not None, ("rule",)),
        ("ruleArguments", bool(scorer.rule_arguments), ("rule",)),
        ("isolation", scorer.isolation is not None, ("python",)),
        ("limits", scorer.limits is not None, ("judge",)),
    ):
        if given and scorer.kind not in kinds:
            yield Problem(
                f"{field}.{name}",
                f"has no meaning for kind {scorer.kind}",
                f"Leave it out; it belongs to kind {' or '.join(kinds)}",
                also=(f"{field}.kind",),
            )


_FORMS = {
    "python": "{path: rewards.py, function: compute_score}",
    "judge": "{baseUrl: …, model: …, promptTemplate: {path: …}, parse: {regex: …}}",
    "model": "{source: …}",
}


def _when(field: str, scorer: ScorerSpec, earlier: list[ScorerSpec]) -> Iterator[Problem]:
    if scorer.when is None:
        return
    target = next((other for other in earlier if other.name == scorer.when.scorer), None)
    if target is None:
        names = ", ".join(other.name for other in earlier) or "none: this is the first"
        yield Problem(
            f"{field}.when.scorer",
            f"{scorer.when.scorer!r} is not a scorer earlier in the list (there are: {names})",
            "Name an earlier scorer, or move this one behind it",
            also=tuple(f"spec.reward.scorers[{i}].name" for i in range(len(earlier))),
        )
    elif target.scope == "group":
        yield Problem(
            f"{field}.when.scorer",
            f"{target.name!r} scores whole groups, after all samples are scored",
            "Name a scorer of scope sample",
        )


def _scope(field: str, scorer: ScorerSpec, spec: Spec) -> Iterator[Problem]:
    if scorer.scope != "group":
        return
    if scorer.kind in {"rule", "model"}:
        yield Problem(
            f"{field}.scope",
            f"group is not possible for kind {scorer.kind}, which scores one sample at a time",
            "Set scope to sample, or use kind python or judge",
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
            "chooses single samples, but scope is group",
            "Leave when out, or set scope to sample",
            also=(f"{field}.scope",),
        )


def _weights(spec: Spec) -> Iterator[Problem]:
    scorers = spec.reward.scorers
    if spec.reward.combine.kind == "weightedSum" and all(scorer.weight == 0 for scorer in scorers):
        yield Problem(
            "spec.reward.scorers",
            "all have weight 0, so every reward would be 0",
            "Give one of them a weight",
            also=tuple(f"spec.reward.scorers[{i}].weight" for i in range(len(scorers))),
        )


def _combine(spec: Spec) -> Iterator[Problem]:
    combine = spec.reward.combine
    given = bool(combine.path or combine.function)
    if combine.kind == "python" and not (combine.path and combine.function):
        yield Problem(
            "spec.reward.combine", "has no path or no function, and kind python needs both", "Give path and function"
        )
    if combine.normalize == "group":
        yield from _normalize(spec)
    if combine.kind == "weightedSum" and given:
        yield Problem(
            "spec.reward.combine",
            "path and function belong to kind python, but the kind is weightedSum",
            "Set kind to python, or leave them out",
        )


def _normalize(spec: Spec) -> Iterator[Problem]:
    if spec.reward.combine.kind == "python":
        yield Problem(
            "spec.reward.combine.normalize",
            "group belongs to kind weightedSum, but the kind is python",
            "Set kind to weightedSum, or normalize in a function of scope group",
            also=("spec.reward.combine.kind",),
        )
    if not spec.trains:
        return
    algorithm = spec.algorithm
    if algorithm.samples_per_prompt < 2:
        yield Problem(
            "spec.reward.combine.normalize",
            f"group compares samples of a prompt, but samplesPerPrompt is {algorithm.samples_per_prompt}",
            "Set samplesPerPrompt to 2 or more, or leave normalize out",
            also=("spec.algorithm.samplesPerPrompt",),
        )
    if algorithm.advantage == "grpo":
        yield Problem(
            "spec.algorithm.advantage",
            "grpo divides by the spread of a group's rewards, which combine.normalize has done scorer by scorer",
            "Set advantage to reinforcePlusPlus (as GDPO: normalised over the batch) or drGrpo (not once more)",
            also=("spec.reward.combine.normalize",),
        )
