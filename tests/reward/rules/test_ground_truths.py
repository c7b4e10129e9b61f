"""A ground truth that gives every response the same score is an error of the row, in every rule."""

from __future__ import annotations

from typing import Any

import pytest

from plaudit_job.rules.arguments import RULE_ARGUMENTS
from plaudit_reward.rules.ground_truths import ground_truth_problem

MATHS = ("geo3k", "math", "math_dapo", "math_reward", "math_verify", "prime_math")
BARE = ("geo3k", "math_dapo", "math_reward", "prime_math")
PROSE = "She buys two apples and four pears, so that in the end the number of fruits in her basket is 6."
SOLUTION = "We add $2+4$ to get $\\boxed{6}$."


@pytest.mark.parametrize("rule", MATHS)
@pytest.mark.parametrize(
    "truth", ["", "  ", "$$", "%", "{", "\\\\", "???", "proof", "notfound", "nan", "TBD", None, True, ["6"]]
)
def test_a_truth_without_an_answer_is_refused_by_every_rule_of_mathematics(rule: str, truth: Any) -> None:
    problem = ground_truth_problem(rule, {}, truth)
    assert problem is not None
    assert problem.startswith("ground_truth ")
    assert ": " in problem


@pytest.mark.parametrize("rule", MATHS)
@pytest.mark.parametrize(
    "truth", ["6", "\\frac{1}{2}", "(1,2)", "\\emptyset", "\\infty", "\\text{Evelyn}", "B", "x^2+1", "[0,1)", "50\\%"]
)
def test_answers_are_accepted(rule: str, truth: str) -> None:
    assert ground_truth_problem(rule, {}, truth) is None


@pytest.mark.parametrize("rule", BARE)
@pytest.mark.parametrize("truth", [SOLUTION, PROSE])
def test_a_whole_solution_is_refused_where_the_answer_alone_is_compared(rule: str, truth: str) -> None:
    problem = ground_truth_problem(rule, {}, truth)
    assert problem is not None
    assert "use rule: math" in problem
    assert ground_truth_problem("math", {}, truth) is None


@pytest.mark.parametrize("rule", BARE)
def test_an_answer_of_several_words_is_no_solution(rule: str) -> None:
    assert ground_truth_problem(rule, {}, "\\text{all real numbers except zero and one}") is None


@pytest.mark.parametrize(
    ("rule", "arguments", "truth", "part"),
    [
        ("math_dapo", {}, "dollars", "blank in the normal form of math_dapo"),
        ("geo3k", {}, "None", "reads from a response without a box"),
        ("math", {}, "\\text{None}", None),
        ("math", {}, "\\frac{1}{2", "braces that do not match"),
        ("math_verify", {}, "\\sqrt{}", "holds no answer"),
        ("gsm8k", {}, "", "is no number"),
        ("gsm8k", {}, "72 clips", "is no number"),
        ("gsm8k", {}, "#### none", "no number behind ####"),
        ("gsm8k", {}, "1,072", "set numeric"),
        ("gsm8k", {"numeric": True}, "1,072", None),
        ("gsm8k", {}, "She adds.\n#### 1,072", None),
        ("gsm8k_flexible", {}, "1,072", None),
        ("gsm8k_flexible", {}, "$72", "set numeric"),
        ("gsm8k", {}, 72, "is int, not text"),
        ("prime_math", {}, 72, None),
        ("math", {}, 72, "is int, not text"),
        ("search_r1_like_qa_em", {}, {"target": []}, "has no target"),
        ("search_r1_like_qa_em", {}, {"target": [""]}, "is blank"),
        ("search_r1_like_qa_em", {}, {"target": ["Paris", "A"]}, "nothing but articles"),
        ("search_r1_like_qa_em", {}, {"target": ["The"]}, "or set careful"),
        ("search_r1_like_qa_em", {"careful": True}, {"target": ["A"]}, None),
        ("search_r1_like_qa_em", {}, {"target": [1969]}, "must be {target: text}"),
        ("search_r1_like_qa_em", {}, {"target": ["Paris"]}, None),
        ("code", {}, "{", "is not JSON"),
        ("code", {}, {"inputs": ["1"], "outputs": ["1"]}, None),
        ("format", {}, None, None),
        ("overlong", {}, None, None),
    ],
)
def test_each_rule_says_what_it_needs(rule: str, arguments: dict[str, Any], truth: Any, part: str | None) -> None:
    problem = ground_truth_problem(rule, arguments, truth)
    assert problem is None if part is None else part in (problem or "")


@pytest.mark.parametrize("rule", sorted(RULE_ARGUMENTS))
def test_a_long_truth_is_judged_at_once_and_shown_in_short(rule: str) -> None:
    for truth in ("x" * 1_000_000, "\\boxed{" * 100_000, "{" * 200_000, " " * 1_000_000 + "%"):
        problem = ground_truth_problem(rule, {}, truth)
        assert problem is None or len(problem) < 1_000
