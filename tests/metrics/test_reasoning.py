"""The reasons that are told for a verdict are the rule's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plaudit_metrics.statistics.verdict import CAUSES, HELD_KEY, LIMITER_KEY, reasoning

SECONDS = st.sampled_from([0.0, 1.0, 2.0, 5.0, 6.0, 10.0]) | st.floats(0, 1e5)
OUTCOMES = ("reward_pipeline/outcome/scored", "reward_pipeline/outcome/data_error")
KEYS = (
    "step_s",
    "trainer_wait_s",
    "straggler_s",
    *(f"wait/{cause}_s" for cause in CAUSES),
    *OUTCOMES,
    HELD_KEY,
    LIMITER_KEY,
)


@given(st.dictionaries(st.sampled_from(KEYS), SECONDS))
def test_the_first_rule_that_holds_is_the_last_that_is_told(statistics: dict[str, float]) -> None:
    rules = reasoning(statistics)
    assert [rule.holds for rule in rules] == [False] * (len(rules) - 1) + [True]


def test_each_rule_tells_its_numbers() -> None:
    figures = {
        "step_s": 20.0,
        "trainer_wait_s": 10.0,
        "straggler_s": 1.0,
        "wait/generation_s": 2.0,
        "wait/score_s": 8.0,
    }
    numbers = [rule.numbers for rule in reasoning(figures)]
    assert numbers == [
        "pauses for them took 0.00 s of 20.00 s, 0% of the step",
        "waited 10.00 s of 20.00 s, 50% of the step",
        "a single one was missing for 1.00 s of 10.00 s, 10% of the waiting",
        "generation took 2.00 s of 10.00 s, 20% of the waiting",
        "rewards took 8.00 s of 10.00 s, 80% of the waiting; the largest cause is score: 8.00 s",
    ]
