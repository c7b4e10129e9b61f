"""Whether length pays, and who escapes a score: figures of steps, quiet in healthy runs and loud in scripted hacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.statistics.integrity import (
    CORRELATION,
    LONGEST,
    OTHERS,
    WINDOW_STEPS,
    correlation,
    escape_probability,
    length_pays,
    masked_by_length,
    step_integrity,
    variance_shares,
)
from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.records import ScorerRecord
from stage_records import build_group, build_sample

GROUPS, SIZE = 8, 8
GROUP = np.repeat(np.arange(GROUPS), SIZE)


def drawn(random: np.random.Generator, *, bonus: float = 0.0, escape: float = 0.0, failed: float = 0.02) -> Any:
    """Return rewards and lengths of a step: hard prompts need more words, a bonus pays for them, long ones escape."""
    difficulty = np.repeat(random.normal(0, 0.5, GROUPS), SIZE)
    tokens = np.exp(random.normal(5.5 + 0.5 * difficulty, 0.4))
    reward = (random.normal(0, 1, len(tokens)) > 0.5 * difficulty).astype(float) + bonus * np.log(tokens)
    missing = random.random(len(tokens)) < failed
    missing |= (tokens > np.quantile(tokens, 0.75)) & (random.random(len(tokens)) < escape)
    return np.where(missing, np.nan, reward), tokens


def steps_of(seed: int, count: int, **story: float) -> list[dict[str, float]]:
    random = np.random.default_rng(seed)
    return [step_integrity(*drawn(random, **story), {}, GROUP) for _ in range(count)]


def test_a_steps_figures_are_those_of_an_audit_over_its_samples() -> None:
    reward, tokens = drawn(np.random.default_rng(3), failed=0.1)
    scorers = {"task": np.nan_to_num(reward), "form": np.nan_to_num(reward) * 0.1 + tokens * 1e-3}
    kept = ~np.isnan(reward)
    figures = step_integrity(reward, tokens, scorers, GROUP)
    estimate = correlation(tokens[kept], reward[kept], GROUP[kept])
    assert estimate is not None
    assert figures[CORRELATION] == pytest.approx(estimate.value)
    assert (figures[LONGEST], figures[OTHERS]) == masked_by_length(tokens, kept)
    shares = variance_shares({name: values[kept] for name, values in scorers.items()}, reward[kept], GROUP[kept])
    assert {name: figures[f"integrity/variance/{name}"] for name in scorers} == pytest.approx(shares)


def test_a_step_without_scores_or_without_lengths_that_differ_has_fewer_figures() -> None:
    nothing, equal = np.full(8, np.nan), np.full(8, 12.0)
    assert step_integrity(nothing, equal, {}, np.zeros(8, dtype=np.int64)) == {}
    figures = step_integrity(np.ones(8), equal, {}, np.zeros(8, dtype=np.int64))
    assert figures == {"integrity/groups/saturated": 1.0, "integrity/groups/dead": 0.0}
    assert step_integrity(np.empty(0), np.empty(0), {}, np.empty(0, dtype=np.int64)) == {}


@pytest.mark.parametrize("failed", [0.0, 0.02, 0.25])
def test_healthy_runs_are_quiet(failed: float) -> None:
    steps = steps_of(5, 400, failed=failed)
    windows = [steps[end - WINDOW_STEPS : end] for end in range(WINDOW_STEPS, len(steps) + 1)]
    assert max(length_pays(window) or 0.0 for window in windows) < 0.5
    likely = [escape_probability(window) for window in windows]
    assert sum(found is not None and found < 0.001 for found in likely) <= 1


def test_a_length_bonus_and_an_escape_are_found_within_twenty_steps() -> None:
    assert length_pays(steps_of(6, WINDOW_STEPS, bonus=2.0)) == 1.0
    assert length_pays(steps_of(6, WINDOW_STEPS - 1, bonus=2.0)) is None
    escaped = escape_probability(steps_of(7, WINDOW_STEPS, escape=0.3))
    assert escaped is not None
    assert escaped < 0.0001
    assert escape_probability(steps_of(7, WINDOW_STEPS - 1, escape=0.3)) is None


def test_the_gauges_follow_the_closed_steps_and_their_restored_past() -> None:
    def closed(number: int) -> Any:
        samples = []
        for index in range(4):
            score = {"value": None, "outcome": "timeout"} if index == 3 else {"value": 0.1 * index}
            scorer = {"judge": ScorerRecord(score.get("outcome", "scored"), score["value"], call_s=1.0)}
            made = build_sample(
                f"t-{number}-1.0",
                index,
                score=1.0,
                scorers=scorer,
                step=number,
                response_tokens=10 * (index + 1),
                **score,
            )
            samples.append(made)
        return step_record(
            number, 1, samples, groups=[build_group(samples)], opened=number * 10.0, closed=number * 10.0 + 9
        )

    series = RunSeries()
    series.restore_steps(closed(number) for number in range(1, WINDOW_STEPS))
    assert series.registry.get_sample_value("plaudit_length_pays_share") is None
    series.count_step(closed(WINDOW_STEPS), records_missing=0)
    assert series.registry.get_sample_value("plaudit_length_pays_share") == 1.0
    assert series.registry.get_sample_value("plaudit_length_escapes_probability") == pytest.approx(2.0**-WINDOW_STEPS)
    assert series.registry.get_sample_value("plaudit_last_step_masked_longest_share") == 1.0
