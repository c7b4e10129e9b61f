"""Rules that verl's table does not hold: lengths, forms, and the limit of symbolic work."""

from __future__ import annotations

import gc
import signal
import sys
from typing import Any

import pytest

from plaudit_reward.rules.string_rules import matches_format, overlong, search_r1_like_qa_em
from plaudit_reward.rules.symbolic_rules import OutOfTimeError, cpu_limit, geo3k, math_verify, prime_math, verified
from plaudit_wire.errors import DataError
from reward_samples import make_sample


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0)]
)  # 100 tokens at most, a buffer of 20, penalty factor 2
def test_a_response_pays_for_the_buffer_that_it_uses(tokens: int, value: float) -> None:
    score = overlong(make_sample(response_tokens=tokens, max_tokens=100), buffer_tokens=20, penalty_factor=2.0)
    assert (score.value, score.extra) == (pytest.approx(value), {"overlong": float(value < 0)})


def test_the_longest_response_may_be_given() -> None:
    sample = make_sample(response_tokens=95, max_tokens=1000)
    assert overlong(sample, buffer_tokens=10, max_tokens=100).value == -0.5
    with pytest.raises(DataError, match="longest response has 0 tokens, the buffer 10: set overlong's maxTokens"):
        overlong(make_sample(), buffer_tokens=10)


@pytest.mark.parametrize(
    ("response", "full", "start", "anywhere"),
    [
        ("<think>a\nb</think>", 1.0, 1.0, 1.0),
        ("<think>a</think> c", 0.0, 1.0, 1.0),
        ("so <think>a</think>", 0.0, 0.0, 1.0),
        ("<think>a", 0.0, 0.0, 0.0),
    ],
)
def test_a_form_is_matched_where_it_must_be(response: str, full: float, start: float, anywhere: float) -> None:
    sample, pattern = make_sample(response), "<think>.*</think>"
    assert matches_format(sample, pattern=pattern) == full
    assert matches_format(sample, pattern=pattern, match="start") == start
    assert matches_format(sample, pattern=pattern, match="anywhere") == anywhere


def test_work_is_ended_after_its_cpu_seconds_although_it_catches_everything() -> None:
    before = signal.getsignal(signal.SIGPROF)

    def stubborn() -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    with pytest.raises(OutOfTimeError), cpu_limit(0.02):
        stubborn()
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_work_whose_first_end_was_ignored_is_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class Finalised:
        def __del__(self) -> None:  # Python ignores what is raised here
            while True:
                sum(range(1000))

    def finalise() -> None:
        Finalised()
        while True:
            sum(range(1000))

    with pytest.raises(OutOfTimeError), cpu_limit(0.02):
        finalise()


def test_an_answer_that_math_verify_cannot_confirm_within_its_limit_is_wrong() -> None:
    assert verified(r"\boxed{1}", "1")  # imports SymPy
    sample = make_sample(r"\boxed{(x+1)^3 (x+2)^2}", ground_truth="x^5 + 7x^4 + 19x^3 + 25x^2 + 16x + 4")
    gc.disable()  # Hypothesis has a callback there, where Python would ignore the end
    try:
        assert math_verify(sample, limit_seconds=0.001) == 0.0
    finally:
        gc.enable()
    assert math_verify(sample) == 1.0


@pytest.mark.parametrize(
    ("prompt", "response", "formed"),
    [
        ("Add.<|assistant|><think>\n", "I add.</think> \\boxed{4}", 1.0),
        ("Add.<|assistant|><think>\n", "<think>I add.</think> \\boxed{4}", 1.0),
        ("Add.<|assistant|>\n", "I add.</think> \\boxed{4}", 0.0),
        ("What does <think> mean?<|assistant|>\n", "I add.</think> \\boxed{4}", 0.0),
        ("Add.<|assistant|><think>\n", "I add. \\boxed{4}", 0.0),
    ],
)
def test_a_thought_that_the_template_opened_has_its_form(prompt: str, response: str, formed: float) -> None:
    sample = make_sample(response, prompt=prompt)
    assert matches_format(sample, pattern="<think>.*</think>.*") == formed
    assert geo3k(sample).extra["format"] == formed


@pytest.mark.parametrize(
    ("response", "truth", "options", "values"),
    [
        ("We have $\\boxed{5}$ apples, so it is \\boxed{72}", "72", {"last_box_wins": True}, (0.0, 1.0)),
        ("\\boxed{1.0000001}", "1.0000002", {"float_rounding": 12}, (1.0, 0.0)),
        ("\\boxed{x+1}", "y+1", {"strict": False}, (0.0, 1.0)),
        ("\\boxed{5 \\text{ km}}", "5 \\text{ m}", {"units": False}, (1.0, 0.0)),
    ],
)
def test_options_of_math_verify(
    response: str, truth: str, options: dict[str, Any], values: tuple[float, float]
) -> None:
    sample = make_sample(response, ground_truth=truth)
    assert (math_verify(sample), math_verify(sample, **options)) == values


@pytest.mark.parametrize(
    ("response", "truth", "options"),
    [
        ("\\boxed{100009}", "100000", {"tolerance": 0.0}),
        ("It is \\boxed{5}. The answer is 6", "6", {"last_box_wins": True}),
    ],
)
def test_options_of_prime_math(response: str, truth: str, options: dict[str, Any]) -> None:
    sample = make_sample(response, ground_truth=truth)
    assert (prime_math(sample), prime_math(sample, **options)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "target", "values"),
    [
        ("the", "A", (1.0, 0.0)),
        ("A", "A", (1.0, 1.0)),
        ("C", "C#", (1.0, 0.0)),
        ("15", "1.5", (1.0, 0.0)),
        ("???", "$$$", (1.0, 0.0)),
        ("Beyonce\u0301", "Beyonc\u00e9", (0.0, 1.0)),
        ("The U.S.", "US", (1.0, 1.0)),
        ("Paris!", "paris", (1.0, 1.0)),
        ("Lyon", "Paris", (0.0, 0.0)),
    ],
)
def test_a_careful_search_rule_keeps_what_is_inside_words(
    answer: str, target: str, values: tuple[float, float]
) -> None:
    sample = make_sample(f"<answer>{answer}</answer>", ground_truth={"target": [target]})
    assert (search_r1_like_qa_em(sample), search_r1_like_qa_em(sample, careful=True)) == values


def test_a_root_of_nothing_is_a_wrong_answer() -> None:
    assert prime_math(make_sample(response=r"= \sqrt,", ground_truth=r"\sqrt")) == 0.0
