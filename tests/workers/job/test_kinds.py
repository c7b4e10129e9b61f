"""Every kind of scorer is declared, made, and checked by the CRD."""

from typing import get_args

import pytest

from plaudit_job.spec.rewards import KINDS, HttpSpec, ScorerSpec, kinds_with
from plaudit_operator.crd_rules import RULES
from plaudit_reward.endpoint.shapes import SHAPES, ShapeName
from plaudit_workers.service.build import MAKERS


def test_the_shapes_of_endpoints_are_those_that_can_be_called() -> None:
    assert set(get_args(HttpSpec.model_fields["shape"].annotation)) == set(SHAPES) == set(get_args(ShapeName))


def test_kinds_have_traits_and_makers() -> None:
    assert set(KINDS) == set(MAKERS)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_a_kind_are_fields_of_a_scorer_and_its_section_is_its_own(kind: str) -> None:
    written = {field.alias for field in ScorerSpec.model_fields.values()}
    assert set(KINDS[kind].fields) <= written
    assert not KINDS[kind].section or kinds_with(KINDS[kind].section) == [kind]


def test_the_crd_lets_only_judges_and_endpoints_have_limits() -> None:
    rules = [rule["rule"] for rule in RULES["reward.scorers[]"]]
    assert "self.kind == 'judge' || self.kind == 'http' || !has(self.limits)" in rules


@pytest.mark.parametrize("kind", KINDS)
def test_the_crd_requires_the_section_of_a_kind(kind: str) -> None:
    section = KINDS[kind].section
    rules = [rule["rule"] for rule in RULES["reward.scorers[]"]]
    assert (f"self.kind != '{kind}' || has(self.{section})" in rules) == bool(section)
