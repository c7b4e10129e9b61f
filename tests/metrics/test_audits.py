"""The figures of auditors, and the trend of a reward that parts from them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit_stories import AUDITOR, STORIES, audited_groups
from plaudit_metrics.statistics.audits import (
    MOST_SOURCES,
    AuditedGroup,
    AuditedSample,
    audit_figures,
    auditor_reports,
    divergences,
    group_figures,
    rank_correlation,
    step_figures,
)
from plaudit_wire.records import ScorerRecord

PAIRS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8)


def group_of(*pairs: tuple[float | None, float | None], name: str = "t-1-1.0", step: int = 1, source: str = "math"):
    """A group of (reward, audit) pairs; None where there is none."""
    return AuditedGroup(
        name,
        step,
        source,
        [
            AuditedSample(
                index,
                reward,
                {AUDITOR: ScorerRecord("scored", value) if value is not None else ScorerRecord("infra_error")},
            )
            for index, (reward, value) in enumerate(pairs)
        ],
    )


def first_alarm(story: str, steps: int, **about: Any) -> int | None:
    """The first step after which the reward's parting from the auditor is reported."""
    (report,) = auditor_reports(audited_groups(STORIES[story], steps, **about), range(1, steps + 1), 1)
    return report.diverged_at


def test_the_gap_is_what_the_update_reinforces_in_the_auditors_units():
    found = audit_figures([group_of((1.0, 0.2), (1.0, 0.4), (0.0, 0.9), (None, 5.0), (0.0, None))], AUDITOR)
    assert found.gap is not None
    assert found.gap.value == pytest.approx(0.3 - 0.9)
    assert found.value is not None
    assert found.value.value == pytest.approx(0.5)
    assert found.reward is not None
    assert found.reward.value == pytest.approx(2 / 3)
    assert (found.groups, found.failed) == (1, 1)


def test_agreement_compares_ranks_within_groups_only():
    # Between the groups reward and auditor disagree; within each they agree, though not linearly.
    groups = [group_of((0.0, 5.0), (1.0, 6.0), (2.0, 100.0)), group_of((7.0, -3.0), (8.0, -2.0), name="t-2-1.0")]
    found = audit_figures(groups, AUDITOR)
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx(1.0)


def test_without_audits_or_differences_there_are_no_figures():
    assert audit_figures([], AUDITOR).value is None
    equal = audit_figures([group_of((1.0, 0.5), (1.0, 0.7))], AUDITOR)
    assert equal.gap is None
    assert equal.agreement is None
    assert divergences([]) == {}


@given(PAIRS, st.floats(0.1, 10), st.floats(-5, 5))
def test_agreement_does_not_depend_on_an_auditors_scale(pairs, factor, shift):
    pairs = [(round(reward, 3), round(value, 3)) for reward, value in pairs]
    one = audit_figures([group_of(*pairs)], AUDITOR)
    other = audit_figures([group_of(*((reward, value * factor + shift) for reward, value in pairs))], AUDITOR)
    assert (one.agreement is None) == (other.agreement is None)
    if one.agreement is not None and other.agreement is not None:
        assert -1 - 1e-9 <= one.agreement.value <= 1 + 1e-9
        assert other.agreement.value == pytest.approx(one.agreement.value)
    if one.gap is not None and other.gap is not None:
        assert other.gap.value == pytest.approx(one.gap.value * factor, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_length_hack_from_step_80_is_found_within_seventy_steps(seed):
    alarm = first_alarm("length hack", 200, seed=seed)
    assert alarm is not None
    assert 80 < alarm <= 150


@pytest.mark.long
def test_a_hack_of_one_data_source_is_found_and_forgotten_when_the_source_no_longer_occurs():
    code = (0.4, STORIES["length hack"])
    alarm = first_alarm("healthy", 250, code=code)
    assert alarm is not None
    assert 80 < alarm <= 180
    groups = audited_groups(STORIES["healthy"], alarm, code=code)
    healthy = [group for group in audited_groups(STORIES["healthy"], alarm + 30) if group.step > alarm]
    (report,) = auditor_reports(groups, range(1, alarm + 1), 1)
    assert report.diverged_sources == {"code": alarm}
    figures = [step_figures(each, [AUDITOR], {}, alarm) for each in (groups, groups + healthy)]
    key = f"audit/{AUDITOR}/diverges"
    assert figures[0][key] == figures[0][f"{key}/code"] < 0.01 < figures[0][f"{key}/math"]
    assert figures[1][key] > 0.01
    assert f"{key}/code" not in figures[1]


@pytest.mark.long
def test_a_trend_of_one_of_many_data_sources_can_still_be_found():
    groups = audited_groups(STORIES["length hack"], 160, groups=30, seed=3)
    many = [msgspec.structs.replace(group, data_source=f"source-{place % 30}") for place, group in enumerate(groups)]
    found = divergences(group_figures(many, AUDITOR))
    assert len(found) == 1 + MOST_SOURCES
    assert any(chance < 0.01 for source, chance in found.items() if source)


@pytest.mark.parametrize("story", ["healthy", "saturated", "drifting reward", "to the top"])
def test_no_alarm_while_the_auditor_does_not_fall(story):
    assert first_alarm(story, 400, seed=1) is None
    assert first_alarm(story, 200, seed=4, code=(0.4, STORIES[story])) is None


def test_few_and_noisy_audits_raise_no_alarm():
    assert first_alarm("healthy", 600, groups=0.3, noise=0.5, seed=2) is None
    assert first_alarm("length hack", 100, groups=0.3, seed=2) is None  # thirty groups are too few to say anything


def test_an_auditor_that_fails_says_nothing():
    groups = audited_groups(STORIES["length hack"], 150, failed=1.0)
    assert divergences(group_figures(groups, AUDITOR)) == {}
    assert audit_figures(groups, AUDITOR).failed == sum(len(group.samples) for group in groups)
    assert first_alarm("healthy", 200, failed=0.6, seed=3) is None


def test_a_steps_figures_cover_the_newest_steps_and_count_what_waits():
    groups = audited_groups(STORIES["healthy"], 60)
    newest = [group for group in groups if group.step > 30]
    drawn = {AUDITOR: {newest[-1].group, "t-not-yet-audited"}}
    figures = step_figures(groups, [AUDITOR], drawn, 50)
    assert figures[f"audit/{AUDITOR}/groups"] == sum(30 < group.step <= 50 for group in groups)
    assert figures[f"audit/{AUDITOR}/waiting"] == 2  # the last group's step is 60: it has not closed yet
    assert figures[f"audit/{AUDITOR}/value_low"] < figures[f"audit/{AUDITOR}/value"]
    assert figures[f"audit/{AUDITOR}/source/math"] == pytest.approx(figures[f"audit/{AUDITOR}/agreement"])
    assert f"audit/{AUDITOR}/diverges" in figures


def test_rank_correlations_are_those_of_the_textbook():
    iq, television = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert rank_correlation(np.array(iq, float), np.array(television, float)) == pytest.approx(-29 / 165)
    assert rank_correlation(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(3**0.5 / 2)
    assert math.isnan(rank_correlation(np.array([1.0, 1]), np.array([1.0, 2])))
    assert math.isnan(rank_correlation(np.empty(0), np.empty(0)))
