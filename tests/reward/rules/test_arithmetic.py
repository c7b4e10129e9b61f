"""A model's text is evaluated as arithmetic, never run as code."""

from __future__ import annotations

from pathlib import Path

import pytest

from plaudit_reward.rules.symbolic_rules import evaluate, prime_math
from reward_samples import make_sample


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 2*3.5", 7.0),
        ("-(1 + 2)**2 / 4", -2.25),
        ("7 // 2 % 2", 1),
        ("1, 2*3", (1, 6)),
        ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        ("{1, 1}", {1}),
        ("True", True),
    ],
)
def test_arithmetic_has_its_value(text: str, value: object) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "x + 1",
        "f(1)",
        "'a' * 9",
        "__import__('os')",
        "2 ** 10 ** 10",
        "[1] * 9",
        "1 / 0",
        "(" * 500,
        "1 if 1 else 2",
        "",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|too large"):
        evaluate(text)


@pytest.mark.parametrize("code", ["__import__('pathlib').Path({!r}).touch()", "open({!r}, 'w')"])
def test_code_in_an_answer_is_not_run(tmp_path: Path, code: str) -> None:
    trap = tmp_path / "run"
    answer = f"The answer is [{code.format(str(trap))}, \\pi]"
    for truth in (r"[0, \pi]", r"\begin{pmatrix}0\end{pmatrix}"):
        assert prime_math(make_sample(answer, ground_truth=truth)) == 0.0
    assert not trap.exists()
