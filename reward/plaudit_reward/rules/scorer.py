"""``kind: rule``: score by a built-in rule, named by the job or found by the sample's data source in verl's table.

A new rule is a function in this folder, a line in ``RULES``, and a line in the job's ``RULE_ARGUMENTS``; a new data
source is a line in ``SOURCES``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_job.rules.arguments import RULE_ARGUMENTS, read_arguments
from plaudit_reward.code.scorer import CodeScorer
from plaudit_reward.rules import string_rules, symbolic_rules
from plaudit_reward.rules.ground_truths import ground_truth_problem
from plaudit_reward.rules.rule import FunctionRule, Rule
from plaudit_reward.scorer import ALWAYS_ROOM, Attempt, Score, Scorer
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError
from plaudit_wire.records import Sample

_WARM_UP = ("The answer is \\boxed{\\sqrt{x} + 1}", "1 + \\sqrt{x}")
"""Parsed and simplified by every rule that does so."""
RULES: dict[str, Rule] = {
    "code": CodeScorer,
    "format": FunctionRule(string_rules.matches_format, isolated=True),
    "geo3k": FunctionRule(symbolic_rules.geo3k, isolated=True, warm_up=_WARM_UP),
    "gsm8k": FunctionRule(string_rules.gsm8k),
    "gsm8k_flexible": FunctionRule(string_rules.gsm8k_flexible),
    "math": FunctionRule(symbolic_rules.math_answer, isolated=True, warm_up=_WARM_UP),
    "math_dapo": FunctionRule(string_rules.math_dapo),
    "math_reward": FunctionRule(string_rules.math_reward),
    "math_verify": FunctionRule(symbolic_rules.math_verify, isolated=True, warm_up=_WARM_UP),
    "overlong": FunctionRule(string_rules.overlong),
    "prime_math": FunctionRule(symbolic_rules.prime_math, isolated=True, warm_up=_WARM_UP),
    "search_r1_like_qa_em": FunctionRule(string_rules.search_r1_like_qa_em),
}
"""Rules by the name in ``rule:``; verl's module names where verl has such a module."""
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH_R1 = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math_reward"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "math_dapo"),
    **dict.fromkeys((f"numina_{name}" for name in _NUMINA), "prime_math"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    "hiyouga/geometry3k": "geo3k",
    **dict.fromkeys((f"searchR1_{name}" for name in _SEARCH_R1), "search_r1_like_qa_em"),
}
"""Data source to rule name."""
PREFIXES: dict[str, str] = {"aime": "math_dapo"}
"""Beginning of a data source to rule name, for sources that ``SOURCES`` does not name."""


def rule_of(data_source: str) -> str | None:
    """Return the name of the rule for a data source, or None."""
    if data_source in SOURCES:
        return SOURCES[data_source]
    return next((rule for prefix, rule in PREFIXES.items() if data_source.startswith(prefix)), None)


def known_rule_of(data_source: str) -> str:
    """Return the name of the rule for a data source; raise ``DataError`` if none scores it."""
    rule = rule_of(data_source)
    if rule is None:
        raise DataError(
            f"no rule scores data source {data_source!r}; known sources: {', '.join(sorted(SOURCES))} and "
            f"{', '.join(f'{prefix}…' for prefix in PREFIXES)}. Name the rule in the scorer (rule: gsm8k) or score it "
            "with a function (kind: python)"
        )
    return rule


class RuleScorer:
    """Score by the named rule, or by the rule of the sample's data source.

    ``arguments`` are the rule's; by data source, a mapping from rule names to theirs. Raises ``ConfigurationError`` if
    there is no rule of that name, or it has no such arguments.
    """

    def __init__(
        self, name: str, rule: str | None = None, arguments: Mapping[str, Any] | None = None, *, processes: int = 2
    ) -> None:
        self.name = name
        self._rule = rule
        self._arguments = read_arguments(rule, arguments or {})
        self._processes = processes
        self._scorers: dict[str, Scorer] = {}
        self._opening: dict[str, asyncio.Task[Scorer]] = {}

    async def open(self) -> None:
        """Start the named rule; by data source, each rule starts when the first sample needs it."""
        if self._rule is not None:
            await self._start(self._rule)

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score with the rule that the sample needs; of a conversation, rules read the policy's last turn."""
        if sample.completion:
            sample = msgspec.structs.replace(sample, response=sample.answer)
        rule = self._rule or known_rule_of(sample.data_source)
        if rule != "code":  # it reads all test cases, and says itself what is wrong with them
            problem = ground_truth_problem(rule, self._arguments_of(rule), sample.ground_truth)
            if problem is not None:
                raise DataError(problem)
        scorer = self._scorers.get(rule) or await self._started(rule, attempt)
        return await scorer.score(sample, attempt)

    def room(self) -> int:
        """Return the free capacity of the rule with the least."""
        return min((scorer.room() for scorer in self._scorers.values()), default=ALWAYS_ROOM)

    async def close(self) -> None:
        """Stop child processes."""
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))

    async def _started(self, rule: str, attempt: Attempt) -> Scorer:
        """Start a rule for all samples that wait for it; the wait counts as queueing."""
        began_s = time.monotonic()
        if rule not in self._opening:
            self._opening[rule] = asyncio.create_task(self._start(rule))
        try:
            return await asyncio.shield(self._opening[rule])
        except ConfigurationError as error:  # the machine cannot start a process; the rule itself is valid
            self._opening.pop(rule, None)
            raise InfrastructureError(f"rule {rule} cannot be started: {error}") from error
        finally:
            attempt.queued_s += time.monotonic() - began_s

    def _arguments_of(self, rule: str) -> Any:
        return self._arguments[rule] if rule in self._arguments else RULE_ARGUMENTS[rule].read({})

    async def _start(self, rule: str) -> Scorer:
        scorer = RULES[rule](self.name, self._arguments_of(rule), self._processes)
        await scorer.open()
        self._scorers[rule] = scorer
        return scorer
