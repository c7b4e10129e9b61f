"""The job's table of rules and their arguments agrees with the rules themselves."""

from __future__ import annotations

import inspect
import typing

import msgspec
import pytest

from plaudit_job.rules.arguments import RULE_ARGUMENTS
from plaudit_reward.rules.rule import FunctionRule
from plaudit_reward.rules.scorer import RULES


def test_a_job_can_name_every_rule_and_no_other() -> None:
    assert RULE_ARGUMENTS.keys() == RULES.keys()


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if isinstance(rule, FunctionRule)])
def test_a_rules_function_takes_its_arguments_with_the_same_types_and_defaults(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule, FunctionRule)
    hints = typing.get_type_hints(rule.function, include_extras=True)
    taken = {
        parameter.name: (hints[parameter.name], parameter.default)
        for parameter in inspect.signature(rule.function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    fields = msgspec.structs.fields(RULE_ARGUMENTS[name])
    described = {
        field.name: (field.type, inspect.Parameter.empty if field.required else field.default) for field in fields
    }
    assert described == taken
