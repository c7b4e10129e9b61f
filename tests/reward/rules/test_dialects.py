"""``rule: math`` reads answers in the digits, words and TeX of other languages, packages and formats."""

from __future__ import annotations

import pytest

from plaudit_reward.rules.symbolic_rules import math_answer
from plaudit_wire.records import Sample

RIGHT = {
    "digits": [
        (r"\boxed{٥}", "5"),
        (r"\boxed{١٢٫٥٪}", r"12.5\%"),
        (r"\boxed{۱۲٬۳۴۵}", "12345"),
        (r"\boxed{٣/٤}", "0.75"),
        (r"\boxed{٣، ٥}", "3, 5"),
        (r"\boxed{१२}", "12"),
        ("الإجابة: ٥", "5"),
        ("الجواب النهائي: ٥", "5"),
        ("Đáp án: 5", "5"),
    ],
    "joints": [
        (r"\boxed{x=1 或 x=2}", "1, 2"),
        (r"\boxed{2\text{或}1}", "1或2"),
        (r"\boxed{1\text{和}2}", "1, 2"),
        (r"\boxed{（1，2）或（3，4）}", "(3,4), (1,2)"),
        (r"\boxed{x<-1 或 x>3}", r"(-\infty,-1)\cup(3,\infty)"),
        (r"\boxed{\{x|x<-1或x>3\}}", r"(-\infty,-1)\cup(3,\infty)"),
        (r"\boxed{甲和乙}", "甲和乙"),
        (r"\boxed{①, ②, ④}", "①②④"),
        (r"\boxed{①②④}", "①、②、④"),
    ],
    "sets": [
        (r"\boxed{(-∞, -1) U (3, ∞)}", r"(-\infty,-1)\cup(3,\infty)"),
        (r"\boxed{x = \frac{\pi}{4} + k\pi \ (k \in Z)}", r"\frac{\pi}{4} + n\pi, n \in \mathbb{Z}"),
        (r"\boxed{k\pi（k∈Z）}", r"n\pi"),
        (r"\boxed{x \in R}", r"\mathbb{R}"),
    ],
    "functions": [
        (r"\boxed{\tg 45^\circ}", "1"),
        (r"\boxed{\operatorname{arctg} 1}", r"\frac{\pi}{4}"),
        (r"\boxed{\operatorname{ctg} x}", r"\cot x"),
        (r"\boxed{∛8}", "2"),
        (r"\boxed{\pi \approx 3.14}", r"\pi"),
    ],
    "matrices": [
        (r"\boxed{\begin{psmallmatrix}1&2\\3&4\end{psmallmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\boxed{\begin{pmatrix}1 & 2\cr 3 & 4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\boxed{\pmatrix{1&2\cr3&4}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ],
    "json": [
        (r'{"answer": "\\frac{1}{2}"}', "1/2"),
        (r'{"answer": "\frac{1}{2}"}', "1/2"),
        (r'{"answer": "\\begin{pmatrix}1\\\\2\\end{pmatrix}"}', r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r'{"reasoning": "x > 4", "final_answer": "x = 5"}', "5"),
        ('\\boxed{"42"}', "42"),
    ],
}
WRONG = [
    (r"\boxed{٤}", "5"),
    (r"\boxed{1或3}", "1, 2"),
    (r"\boxed{甲和乙}", "甲或乙"),
    (r"\boxed{①②}", "①③"),
    (r"\boxed{④②①}", "①②④"),  # the steps of a procedure have an order
    (r"\boxed{(0,1)U(2,4)}", r"(0,1)\cup(2,3)"),
    (r"\boxed{\ctg x}", r"\tan x"),
    (r"\boxed{5 \approx 7}", "7"),
    (r"\boxed{\begin{psmallmatrix}1&2\\3&4\end{psmallmatrix}}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r'{"answer": "\\frac{1}{3}"}', "1/2"),
]


def _value(response: str, truth: str) -> float | None:
    return math_answer(Sample("g", 0, "", "", response, truth)).value


@pytest.mark.parametrize("kind", RIGHT)
def test_an_answer_in_another_dialect_is_right(kind: str) -> None:
    assert [case for case in RIGHT[kind] if _value(*case) != 1.0] == []


def test_another_answer_in_another_dialect_is_wrong() -> None:
    assert [case for case in WRONG if _value(*case) != 0.0] == []
