"""``rule: math`` finds the final answer and compares it as a careful person does.

``math_cases.jsonl`` has labelled cases by kind; ``want`` is what a careful person gives. Right answers that other
graders refuse and wrong ones that they accept are of public reports about verl, Math-Verify, TRL and NeMo.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_reward.rules.symbolic_rules import math_answer
from plaudit_reward.scorer import Score
from plaudit_wire.records import Sample

CASES = [json.loads(line) for line in (Path(__file__).parent / "math_cases.jsonl").read_text().splitlines()]
KINDS = sorted({case["kind"] for case in CASES})


def _graded(response: str, truth: str) -> Score:
    return math_answer(Sample("g", 0, "", "", response, truth))


def test_the_cases_hold_both_kinds_of_answers() -> None:
    assert len(CASES) >= 400
    assert min(sum(case["want"] == value for case in CASES) for value in (0.0, 1.0)) >= 200


@pytest.mark.alike
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_has_the_value_that_a_careful_person_gives(kind: str) -> None:
    wrong: list[Any] = []
    for case in CASES:
        if case["kind"] == kind:
            score = _graded(case["response"], case["ground_truth"])
            if score.value != case["want"]:
                wrong.append((case, score.extra))
    assert wrong == []


HINGES = r"\begin{cases} x & x \ge 0 \\ -x & \text{otherwise} \end{cases}"


@pytest.mark.parametrize(
    ("response", "truth", "reason"),
    [
        (r"\boxed{15}", "15", "last box: 15; the same expression"),
        (r"\boxed{\frac{2}{4}}", "0.5", r"last box: \frac{2}{4}; equal as rational numbers"),
        (r"\boxed{\sqrt8}", r"2\sqrt2", r"last box: \sqrt8; equal to 50 digits"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", r"last box: (x+1)^2; equal for 8 values of x"),
        (r"\boxed{2,1}", r"\{1,2\}", "last box: 2,1; the same set"),
        ("Answer: 2.6458", "2.65", "Answer: 2.6458; equal when rounded to 3 significant digits"),
        (r"\boxed{H2O}", r"\ce{H2O}", "last box: H2O; the same formula"),
        (r"\boxed{7 R 2}", "7 remainder 2", "last box: 7 R 2; the same quotient and remainder"),
        (r"\boxed{|x|}", HINGES, "last box: |x|; equal for 43 values of x"),
        (r"\boxed{2|x|}", HINGES, "last box: 2|x|; not equal to the ground truth"),
        (r"\boxed{\text{Rs. }1,250}", "1250", r"last box: \text{Rs. }1,250; the same expression"),
        (r"\boxed{US\$ 40}", r"\yen 40", r"last box: US\$ 40; not equal to the ground truth"),
        (r"\boxed{y=2x,\ x>0}", r"y = 2x \ (x>0)", r"last box: y=2x,\ x>0; the same value of each name"),
        (
            r"\boxed{\{x \mid x=2 \text{ or } x=1\}}",
            r"\{1,2\}",
            r"last box: \{x \mid x=2 \text{ or } x=1\}; the same set",
        ),
        (r"\boxed{\{x \mid x=2\}}", r"\{1,2\}", r"last box: \{x \mid x=2\}; not equal to the ground truth"),
        (
            r"\boxed{\text{does not converge}}",
            "diverges",
            r"last box: \text{does not converge}; words of the same meaning",
        ),
        ("Answer: €12,50", "12.50", "Answer: €12,50; the same expression"),
        (r"\boxed{14}", "15", "last box: 14; not equal to the ground truth"),
        (r"So \boxed{15}. No: \boxed{}", "15", "the last box is empty"),
        ("I do not know.", "15", "the response gives no final answer"),
    ],
)
def test_each_score_says_why(response: str, truth: str, reason: str) -> None:
    assert _graded(response, truth).extra["reason"] == reason


PARTS = (
    *("1", "23", "0.5", "x", "i", "(", ")", "[", "]", "{", "}", r"\{", r"\}", "+", "-", "/", "^", "_", "=", "<", ","),
    *(r"\frac", r"\sqrt", r"\pi", r"\infty", r"\text{", r"\text{cm}", " and ", " or ", ":", "%", "$", r"\cup", "|"),
    *(
        r"\setminus",
        r"\in",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        "&",
        r"\\",
        r"\boxed{",
        "!",
        r"\pm",
        "...",
        "million",
    ),
    *("10:30", "PM", r"\overline{", r"\log_", r"\sin", r"\left", "Answer: ", "####", "</think>", "<answer>", "**", "²"),
)


@given(st.lists(st.sampled_from(PARTS), max_size=14), st.lists(st.sampled_from(PARTS), max_size=10))
def test_any_text_gets_a_score_and_a_boxed_truth_is_right(answer: list[str], truth: list[str]) -> None:
    assert _graded("".join(answer), "".join(truth)).value in (0.0, 1.0)


@pytest.mark.alike
@pytest.mark.parametrize(
    "response",
    [
        *("\\boxed{" * 10_000, "$" * 50_000, "\\[" * 30_000, " " * 50_000 + "x", "<answer>" * 10_000, "1," * 30_000),
        *("\\boxed{" + "(2^{60000})" * 150 + "}", "\\boxed{" + "5000!" * 300 + "}", "\\boxed{" + "9^" * 500 + "9}"),
        *("\\boxed{" + "(" * 900 + "1" + ")" * 900 + "}", "\\boxed{" + "\\{1,2\\}\\cup" * 150 + "\\{3\\}}"),
        *("\\" * 100_000, "**1** " * 16_000, "actually it is " * 6_000, "\\boxed{" + "(A)" * 600 + "}"),
        "\\boxed{\\sum_{n=1}^{10^9} \\frac{1}{n^2}}",
        *("\\boxed{" + "and a " * 300 + "half}", "\\boxed{" + "three and " * 150 + "a half}", "\\boxed{((5000!)!)!}"),
        *("\\boxed{" + "(1,2)\\cap" * 150 + "(0,3)}", "\\boxed{C(5000,2500)" * 60, "\\boxed{" + "三万" * 900 + "}"),
        *("\\boxed{0." + "12345678" * 220 + "…}", "\\boxed{" + "60°30'" * 300 + "}", "\\boxed{" + "\\pm1," * 90 + "2}"),
        *(
            "\\boxed{" + "x+C+" * 300 + "C}",
            "\\boxed{" + "\\begin{vmatrix}" + "\\\\".join(["x^2 & y & 9^9 & \\pi"] * 4) + "\\end{vmatrix}" * 3 + "}",
            "\\boxed{" + "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}+" * 45 + "1}",
            "\\boxed{" + "\\begin{cases}" + "\\\\".join(["x!^9&x>\\pi^9"] * 99) + "\\end{cases}}",
            "\\boxed{" + "Co2+" * 480 + "}",
            "\\boxed{" + "1s^22" * 390 + "}",
            "\\boxed{" + "-m" * 900 + "-1a}",
            "\\boxed{" + "3\\hat{i}-" * 200 + "2\\hat{j}}",
            "\\boxed{" + "3 \\pmod " * 200 + "7}",
        ),
    ],
)
def test_a_hostile_response_costs_little(response: str) -> None:
    before = time.process_time()
    assert _graded(response, response[7:-1][:2_000] or "1").value is not None
    assert _graded(response, "12, 13").value == 0.0
    assert time.process_time() - before < 5, "its own limit would have ended it after 10 CPU seconds"
