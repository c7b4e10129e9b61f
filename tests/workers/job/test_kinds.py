"""Every kind of scorer is declared, made, and checked by the CRD."""

from typing import get_args

import pytest

from plaudit_operator.crd.rules import RULES
from plaudit_workers.job.spec.scorers import KINDS, Kind, ScorerSpec
from plaudit_workers.scoring.kinds.registry import MAKERS


def test_kinds_have_traits_and_makers() -> None:
    assert set(KINDS) == set(MAKERS) == set(get_args(Kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_a_kind_are_fields_of_a_scorer_and_only_of_this_kind(kind: Kind) -> None:
    written = {field.alias for field in ScorerSpec.model_fields.values()}
    others = {name for other, traits in KINDS.items() if other != kind for name in traits.fields}
    assert set(KINDS[kind].fields) <= written - others


@pytest.mark.parametrize("kind", KINDS)
def test_the_crd_requires_the_section_of_a_kind(kind: Kind) -> None:
    section = KINDS[kind].section
    rules = [rule["rule"] for rule in RULES["reward.scorers[]"]]
    assert (f"self.kind != '{kind}' || has(self.{section})" in rules) == bool(section)
