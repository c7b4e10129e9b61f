"""Data sources find their rules; unknown ones are named beforehand and never score."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from plaudit_reward.attempts import Rules, Stage
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rules.scorer import PREFIXES, RULES, SOURCES, RuleScorer, rule_of
from plaudit_wire.errors import ConfigurationError
from reward_samples import make_sample

OpenRule = Callable[..., Awaitable[Pipeline]]


@pytest.fixture
async def open_rule() -> AsyncIterator[OpenRule]:
    opened: list[Pipeline] = []

    async def make(
        rule: str | None = None, arguments: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Pipeline:
        scorer = RuleScorer("rule", rule, arguments, processes=1)
        opened.append(Pipeline([Stage(scorer, Rules(timeout_s=timeout_s))]))
        await scorer.open()
        return opened[-1]

    yield make
    for pipeline in opened:
        await pipeline.close()


def test_every_source_leads_to_a_rule() -> None:
    assert {*SOURCES.values(), *PREFIXES.values()} <= RULES.keys()


def test_sources_that_begin_with_aime_are_scored_like_dapos() -> None:
    assert rule_of("aime_2024") == rule_of("math_dapo") == "math_dapo"


async def test_samples_are_scored_by_the_rule_of_their_source(open_rule: OpenRule) -> None:
    pipeline = await open_rule()
    assert (await pipeline.score(make_sample("#### 4"))).value == 1.0
    wrong = await pipeline.score(make_sample("#### 4", data_source="aime25"))
    assert (wrong.value, wrong.scorers["rule"].extra) == (-1.0, {"acc": 0.0, "pred": "[INVALID]"})
    computed = await pipeline.score(make_sample("So it is 1 + x", ground_truth="x + 1", data_source="numina_cn_k12"))
    assert computed.value == 1.0


async def test_an_unknown_source_is_a_data_error_with_a_remedy(open_rule: OpenRule) -> None:
    scoring = await (await open_rule()).score(make_sample(data_source="copy"))
    assert scoring.outcome == "data_error"
    assert re.search(r"'copy'.*known sources: DigitalLearningGmbH.* and aime…\..*kind: python", scoring.reason or "")


async def test_a_named_rule_scores_any_source(open_rule: OpenRule) -> None:
    pipeline = await open_rule("gsm8k_flexible")
    assert (await pipeline.score(make_sample("it is 4", data_source="copy"))).value == 1.0


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        (4, "ground_truth 4 is int, not text: write it in quotes"),
        (None, "ground_truth None is missing: remove the row, or give its answer"),
    ],
)
async def test_a_bad_ground_truth_is_the_samples_outcome(open_rule: OpenRule, truth: Any, reason: str) -> None:
    scoring = await (await open_rule()).score(make_sample(ground_truth=truth))
    assert (scoring.outcome, scoring.value) == ("data_error", None)
    assert reason in (scoring.reason or "")


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        ("gsm9k", {}, "there is no rule 'gsm9k'; rules are code, format, geo3k, gsm8k, "),
        ("math_dapo", {"strictBox": True}, "rule math_dapo: there is no argument 'strictBox': they are strictBoxed, "),
        ("math_dapo", {"strictBoxed": "yes"}, "strictBoxed is 'yes': expected `bool`, got `str`"),
        ("overlong", {}, "rule overlong: bufferTokens is missing"),
        ("overlong", {"bufferTokens": 0}, "bufferTokens is 0: expected `int` >= 1"),
        ("overlong", {"bufferTokens": 9, "maxTokens": 8}, "bufferTokens is 9, more than maxTokens, 8"),
        ("format", {"pattern": "(a"}, r"pattern '\(a' is not a regular expression: missing \)"),
        ("search_r1_like_qa_em", {"x": 1}, "there is no argument 'x'"),
        (None, {"strictBoxed": True}, "there is no rule 'strictBoxed'"),
        (None, {"math_dapo": True}, "without rule, give each rule's arguments by its name"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(rule: str | None, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RuleScorer("correct", rule, arguments)


async def test_arguments_go_to_the_rule_of_the_source(open_rule: OpenRule) -> None:
    pipeline = await open_rule(None, {"gsm8k": {"numeric": True}})
    assert (await pipeline.score(make_sample("#### 4.00"))).value == 1.0


@pytest.mark.long
async def test_a_rule_that_never_ends_costs_its_sample_only(open_rule: OpenRule) -> None:
    pipeline = await open_rule("format", {"pattern": "(a*)*b"}, timeout_s=2.0)
    stuck, fine = await asyncio.gather(pipeline.score(make_sample("a" * 40)), pipeline.score(make_sample("aab")))
    assert (stuck.outcome, fine.value) == ("timeout", 1.0)


@pytest.mark.long
async def test_an_answer_that_cannot_be_computed_is_wrong_by_cpu_seconds_and_not_masked(open_rule: OpenRule) -> None:
    pipeline = await open_rule("math_verify", {"limitSeconds": 0.5})
    power, fine = make_sample("\\boxed{9^{9^{9}}}", ground_truth="3"), make_sample("\\boxed{3}", ground_truth="3")
    stuck, right = await asyncio.gather(pipeline.score(power), pipeline.score(fine))
    assert (stuck.outcome, stuck.value, right.value) == ("scored", 0.0, 1.0)


async def test_the_rule_of_mathematics_gives_its_reason_and_reads_solutions(open_rule: OpenRule) -> None:
    pipeline = await open_rule("math")
    solution = "We add $2+4$ to get $\\boxed{6}$."
    right = await pipeline.score(make_sample("Draft \\boxed{5}, then \\boxed{\\frac{12}{2}}", ground_truth=solution))
    blank = await pipeline.score(make_sample("\\boxed{6}", ground_truth=" "))
    (record,) = right.scorers.values()
    assert (right.value, record.extra["reason"]) == (1.0, "last box: \\frac{12}{2}; equal as integers")
    assert blank.outcome == "data_error"
    assert "ground_truth ' ' is blank: remove the row" in (blank.reason or "")
