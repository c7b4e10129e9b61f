"""docs/rewards/rules.md names every rule, data source and argument."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from plaudit_reward.rules.rule import FunctionRule
from plaudit_reward.rules.scorer import PREFIXES, RULES, SOURCES

PAGE = (Path(__file__).parents[3] / "docs" / "rewards" / "rules.md").read_text()


@pytest.mark.parametrize("source", [*SOURCES, *PREFIXES])
def test_every_data_source_is_documented_with_its_rule(source: str) -> None:
    rule = {**SOURCES, **PREFIXES}[source]
    (row,) = re.findall(rf"^\| `{rule}` \| (.*?) \|", PAGE, re.MULTILINE)[:1]
    short = source.replace("searchR1", "") if source.startswith("searchR1") else source
    assert f"`{source}`" in row or f"`{short}`" in row or f"`{source}…`" in row


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if isinstance(rule, FunctionRule)])
def test_every_argument_is_documented_with_its_default(rule: str) -> None:
    told = PAGE.partition("## Arguments")[2].partition("\n## ")[0]
    rows = {row[0]: row[1].strip(" `") for row in re.findall(r"^\|[^|]*\| `(\w+)` \|([^|]*)\|", told, re.MULTILINE)}
    function = RULES[rule]
    assert isinstance(function, FunctionRule)
    for name, parameter in inspect.signature(function.function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            camel = re.sub("_(.)", lambda found: found[1].upper(), name)
            default = rows[camel]
            if camel == "limitSeconds":
                assert f"`{camel}` | {parameter.default:g} |" in told
            elif isinstance(parameter.default, bool | int | float | str):
                assert default == str(parameter.default).lower()
