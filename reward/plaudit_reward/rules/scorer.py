"""``kind: rule``: a built-in rule, named by the job or found by the sample's data source."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from plaudit_reward.rules.routing import RULES, known_rule_of
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt, Scorer
from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_wire.sample import Sample
from plaudit_workers.job.rule_arguments import RULE_ARGUMENTS, read_arguments

_ALWAYS_ROOM = 1_000_000


class RuleScorer:
    """Score by the named rule, or by the rule of the sample's data source.

    Args:
        arguments: the rule's; by data source, a mapping from rule names to their arguments.

    Raises:
        ConfigurationError: there is no rule of that name, or it has no such arguments.
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
        scorer = self._scorers.get(rule) or await self._started(rule, attempt)
        return await scorer.score(sample, attempt)

    def room(self) -> int:
        """Return the free capacity of the rule with the least."""
        return min((scorer.room() for scorer in self._scorers.values()), default=_ALWAYS_ROOM)

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

    async def _start(self, rule: str) -> Scorer:
        arguments = self._arguments[rule] if rule in self._arguments else RULE_ARGUMENTS[rule].read({})
        scorer = RULES[rule].scorer(self.name, arguments, self._processes)
        await scorer.open()
        self._scorers[rule] = scorer
        return scorer
