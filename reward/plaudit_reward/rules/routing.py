"""Which rule scores which data source: verl's names.

A new rule is a file beside this one and a line in ``RULES``; a new data source is a line in ``SOURCES``.
"""

from __future__ import annotations

from collections.abc import Callable

from plaudit_reward.errors import ConfigurationError, DataError
from plaudit_reward.rules.gsm8k import gsm8k, gsm8k_flexible
from plaudit_reward.sample import Sample

Rule = Callable[[Sample], float]
"""Scores one sample; raises ``DataError`` where its ground truth is unusable. Plain string work, so it runs inline."""

RULES: dict[str, Rule] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
}
"""By the name that a job gives in ``rule:``."""

SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
}
"""Data source to rule name."""


def rule_named(name: str) -> Rule:
    """The rule that a job names.

    Raises:
        ConfigurationError: there is no such rule.
    """
    try:
        return RULES[name]
    except KeyError:
        raise ConfigurationError(f"there is no rule {name!r}; rules are {', '.join(sorted(RULES))}") from None


def unknown_sources(data_sources: set[str]) -> list[str]:
    """Those data sources that no rule scores, sorted: a job whose data holds one of them is refused beforehand."""
    return sorted(data_sources - SOURCES.keys())


def by_data_source(sample: Sample) -> float:
    """Scores the sample with the rule of its data source.

    Raises:
        DataError: no rule scores that data source.
    """
    name = SOURCES.get(sample.data_source)
    if name is None:
        raise DataError(
            f"no rule scores data source {sample.data_source!r}; known are {', '.join(sorted(SOURCES))}. "
            "Name the rule in the scorer (rule: gsm8k) or score it with a function (kind: python)"
        )
    return RULES[name](sample)
