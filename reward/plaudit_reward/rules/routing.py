"""Map data sources to rules: verl's names and verl's table.

A new rule is a function in this folder, a line in ``RULES``, and a line in the job's ``RULE_ARGUMENTS``; a new data
source is a line in ``SOURCES``.
"""

from __future__ import annotations

from collections.abc import Iterable

from plaudit_reward.code.rule import CodeRule
from plaudit_reward.rules.format import matches_format
from plaudit_reward.rules.mathematics.geo3k import geo3k
from plaudit_reward.rules.mathematics.gsm8k import gsm8k, gsm8k_flexible
from plaudit_reward.rules.mathematics.math_dapo import math_dapo
from plaudit_reward.rules.mathematics.math_reward import math_reward
from plaudit_reward.rules.mathematics.math_verify import math_verify
from plaudit_reward.rules.mathematics.prime_math import prime_math
from plaudit_reward.rules.overlong import overlong
from plaudit_reward.rules.rule import FunctionRule, Rule
from plaudit_reward.rules.search_r1_like_qa_em import search_r1_like_qa_em
from plaudit_wire.errors import DataError

_WARM_UP = ("The answer is \\boxed{\\sqrt{x} + 1}", "1 + \\sqrt{x}")
"""Parsed and simplified by every rule that does so."""

RULES: dict[str, Rule] = {
    "code": CodeRule(),
    "format": FunctionRule(matches_format, isolated=True),
    "geo3k": FunctionRule(geo3k, isolated=True, warm_up=_WARM_UP),
    "gsm8k": FunctionRule(gsm8k),
    "gsm8k_flexible": FunctionRule(gsm8k_flexible),
    "math_dapo": FunctionRule(math_dapo),
    "math_reward": FunctionRule(math_reward),
    "math_verify": FunctionRule(math_verify, isolated=True, warm_up=_WARM_UP),
    "overlong": FunctionRule(overlong),
    "prime_math": FunctionRule(prime_math, isolated=True, warm_up=_WARM_UP),
    "search_r1_like_qa_em": FunctionRule(search_r1_like_qa_em),
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


def unknown_sources(data_sources: Iterable[str]) -> list[str]:
    """Return the data sources without a rule, sorted; a job with such data is refused."""
    return sorted({source for source in data_sources if rule_of(source) is None})


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
