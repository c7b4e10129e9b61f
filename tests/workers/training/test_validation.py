"""The figures of a validation."""

from __future__ import annotations

import msgspec
import pytest

from plaudit_wire.messages import Sampling
from plaudit_workers.training.state import ValidationPlan
from plaudit_workers.training.validation import validation_figures


@pytest.mark.parametrize("before", [True, False])
def test_the_first_policy_is_validated_unless_that_is_left_out(before):
    plan = ValidationPlan(2, 1, Sampling(8), before)
    assert [step for step in range(6) if plan.is_due(step, 5)] == [0, 2, 4, 5][not before :]


def test_several_samples_a_prompt_have_best_of_n(make_groups):
    groups = make_groups([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, None, 0.0]])
    source = groups[0].prompt.data_source
    figures = validation_figures(groups)
    assert figures[f"val/{source}/reward"] == pytest.approx(2 / 7)
    # 1 - C(2, 2) / C(4, 2) for the first group, 0 for the second.
    assert figures[f"val-core/{source}/reward/best@2/mean"] == pytest.approx(5 / 12)
    assert figures[f"val-core/{source}/reward/best@2/prompts_share"] == 1
    assert figures[f"val-core/{source}/reward/best@4/mean"] == 1
    assert figures[f"val-core/{source}/reward/best@4/prompts_share"] == 0.5
    assert {key for key in figures if "best@3" in key or "maj@" in key} == set()


def test_n_is_the_number_of_samples_of_a_prompt_although_some_have_no_score(make_groups):
    figures = validation_figures(make_groups([[1.0, 0.0, 0.0, 0.0, 0.0, None], [1.0, None, None, None, None, None]]))
    counts = {key.split("@")[1].split("/")[0]: value for key, value in figures.items() if "prompts_share" in key}
    assert counts == {"2": 0.5, "4": 0.5}
    assert max(value for key, value in figures.items() if "best@" in key) <= 1
    complete = validation_figures(make_groups([[0.0] * 5 + [1.0]]))
    assert {key.split("@")[1] for key in complete if "best@" in key and "mean" in key} == {"2/mean", "4/mean", "6/mean"}


def test_answers_that_a_scorer_names_are_voted_on(make_groups):
    (group,) = make_groups([[0.0, 1.0, 1.0]])
    answered = [
        msgspec.structs.replace(
            sample,
            scoring=msgspec.structs.replace(
                sample.scoring,
                scorers={"mine": msgspec.structs.replace(sample.scoring.scorers["mine"], extra={"pred": answer})},
            ),
        )
        for sample, answer in zip(group.samples, ["7", "12", "12"], strict=True)
    ]
    figures = validation_figures([msgspec.structs.replace(group, samples=answered)])
    assert figures[f"val-core/{group.prompt.data_source}/reward/maj@3/mean"] == 1
    assert figures[f"val-core/{group.prompt.data_source}/reward/maj@3/prompts_share"] == 1
    assert validation_figures(make_groups([[1.0]])).keys() == {
        f"val/{group.prompt.data_source}/reward",
        f"val/{group.prompt.data_source}/mine",
    }
