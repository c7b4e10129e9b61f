"""``kind: rule``: a built-in rule, run where the pipeline runs."""

from __future__ import annotations

from plaudit_reward.rules.routing import by_data_source, rule_named
from plaudit_reward.sample import Sample
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt

_ALWAYS_ROOM = 1_000_000


class RuleScorer:
    """Scores by the named rule, or by the one that the sample's data source has.

    Args:
        name: of the scorer in the job.
        rule: name of the rule; None = by data source.

    Raises:
        ConfigurationError: there is no rule of that name.
    """

    def __init__(self, name: str, rule: str | None = None) -> None:
        self.name = name
        self._rule = by_data_source if rule is None else rule_named(rule)

    async def open(self) -> None:
        """Nothing to start."""

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Scores at once: rules are plain string work."""
        return Score.scored(self._rule(sample))

    def room(self) -> int:
        """Rules never wait."""
        return _ALWAYS_ROOM

    async def close(self) -> None:
        """Nothing to end."""
