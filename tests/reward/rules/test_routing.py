"""Data sources find their rules; unknown ones are named beforehand and never score."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plaudit_reward.errors import ConfigurationError, DataError
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rule_scorer import RuleScorer
from plaudit_reward.rules.routing import RULES, SOURCES, by_data_source, unknown_sources
from plaudit_reward.sample import Sample
from plaudit_reward.stage import Stage


def test_every_source_leads_to_a_rule() -> None:
    assert set(SOURCES.values()) <= RULES.keys()


def test_a_sample_is_scored_by_the_rule_of_its_source(make_sample: Callable[..., Sample]) -> None:
    assert by_data_source(make_sample("#### 4")) == 1.0


def test_an_unknown_source_is_a_data_error_with_a_remedy(make_sample: Callable[..., Sample]) -> None:
    with pytest.raises(DataError, match=r"'copy'.*known are openai/gsm8k.*kind: python"):
        by_data_source(make_sample(data_source="copy"))


def test_unknown_sources_are_found_before_anything_runs() -> None:
    assert unknown_sources({"openai/gsm8k", "copy", "apps"}) == ["apps", "copy"]


def test_a_rule_can_be_named_whatever_the_source_says() -> None:
    with pytest.raises(ConfigurationError, match="no rule 'gsm9k'; rules are gsm8k, gsm8k_flexible"):
        RuleScorer("correct", "gsm9k")


async def test_a_named_rule_scores_any_source(make_sample: Callable[..., Sample]) -> None:
    pipeline = Pipeline([Stage(RuleScorer("correct", "gsm8k_flexible"))])
    assert (await pipeline.score(make_sample("it is 4", data_source="copy"))).value == 1.0


async def test_a_bad_ground_truth_is_the_samples_outcome(make_sample: Callable[..., Sample]) -> None:
    scoring = await Pipeline([Stage(RuleScorer("correct"))]).score(make_sample(ground_truth=4))
    assert (scoring.outcome, scoring.value) == ("data_error", None)
    assert "needs the number as text" in (scoring.reason or "")
