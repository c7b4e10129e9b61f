"""GSM8K gives what verl's scorer gives, on a table of answers."""

from __future__ import annotations

import pytest

from plaudit_reward.rules.string_rules import gsm8k, gsm8k_flexible
from plaudit_wire.errors import DataError
from reward_samples import make_sample

# response, ground truth, strict result, flexible result; the results are those of verl 0.9.1's gsm8k.compute_score.
CASES = [
    ("She sold 72 clips.\n#### 72", "72", 1.0, 1.0),
    ("#### 72", "72", 1.0, 1.0),
    ("The answer is 72", "72", 0.0, 1.0),
    ("####72", "72", 0.0, 1.0),
    ("#### 71\n#### 72", "72", 1.0, 1.0),
    ("#### 72\n#### 71", "72", 0.0, 0.0),
    ("#### -72", "-72", 1.0, 1.0),
    ("#### 1,072", "1072", 1.0, 0.0),
    ("#### 1,072", "1,072", 0.0, 1.0),
    ("#### $72", "72", 0.0, 1.0),
    ("#### 72.", "72", 0.0, 0.0),
    ("#### 72.0", "72", 0.0, 0.0),
    ("72 apples .", "72", 0.0, 1.0),
    ("72 apples , indeed", "72", 0.0, 0.0),
    ("nothing here", "72", 0.0, 0.0),
    ("...", "72", 0.0, 0.0),
    (".", ".", 0.0, 1.0),
    ("", "72", 0.0, 0.0),
    ("#### 72" + "x" * 293, "72", 1.0, 1.0),
    ("#### 72" + "x" * 294, "72", 0.0, 1.0),
    ("#### 72" + "x" * 400, "72", 0.0, 0.0),
    ("#### 7 2", "72", 0.0, 0.0),
]


@pytest.mark.parametrize(("response", "ground_truth", "strict", "flexible"), CASES)
def test_results_are_verls(response: str, ground_truth: str, strict: float, flexible: float) -> None:
    sample = make_sample(response, ground_truth=ground_truth)
    assert gsm8k(sample) == strict
    assert gsm8k_flexible(sample) == flexible


@pytest.mark.parametrize("ground_truth", [72, None, ["72"]])
def test_a_ground_truth_that_is_no_text_is_an_error_and_not_a_zero(ground_truth: object) -> None:
    with pytest.raises(DataError, match="gsm8k needs it as text"):
        gsm8k(make_sample("#### 72", ground_truth=ground_truth))


SOLUTION = "She had 16 - 3 = <<16-3=13>>13 eggs.\nShe makes 9 * 2 = <<9*2=18>>18 dollars.\n#### "


@pytest.mark.parametrize(
    ("response", "end", "strict", "flexible"),
    [
        ("#### 18", "18", 1.0, 1.0),
        ("It is 18", "18", 0.0, 1.0),
        ("#### 13", "18", 0.0, 0.0),
        ("#### 1,018", "1,018", 1.0, 0.0),
        ("#### 1018", "$1,018.", 1.0, 1.0),
        ("#### -18", "-18", 1.0, 1.0),
    ],
)
def test_of_a_whole_solution_as_ground_truth_its_last_number_counts(
    response: str, end: str, strict: float, flexible: float
) -> None:
    sample = make_sample(response, ground_truth=SOLUTION + end)
    assert (gsm8k(sample), gsm8k_flexible(sample)) == (strict, flexible)


def test_a_solution_without_a_number_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(DataError, match="no number behind ####"):
        gsm8k(make_sample("#### 18", ground_truth=SOLUTION + "eighteen"))


@pytest.mark.parametrize("response", ["#### 1,072.", "#### 1072.00", "#### 1072"])
def test_numbers_are_compared_as_numbers_when_asked(response: str) -> None:
    sample = make_sample(response, ground_truth="1,072")
    assert (gsm8k(sample), gsm8k(sample, numeric=True)) == (0.0, 1.0)
    assert gsm8k(make_sample("#### 1073", ground_truth="1,072"), numeric=True) == 0.0
