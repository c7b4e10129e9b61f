"""Rules that verl's table does not hold: lengths, forms, and the limit of symbolic work."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable

import pytest

from plaudit_reward.rules.string_rules import matches_format, overlong
from plaudit_reward.rules.symbolic_rules import OutOfTimeError, cpu_limit, math_verify, verified
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample

MakeSample = Callable[..., Sample]


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0)]
)  # 100 tokens at most, a buffer of 20, penalty factor 2
def test_a_response_pays_for_the_buffer_that_it_uses(make_sample: MakeSample, tokens: int, value: float) -> None:
    score = overlong(make_sample(response_tokens=tokens, max_tokens=100), buffer_tokens=20, penalty_factor=2.0)
    assert (score.value, score.extra) == (pytest.approx(value), {"overlong": float(value < 0)})


def test_the_longest_response_may_be_given(make_sample: MakeSample) -> None:
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
def test_a_form_is_matched_where_it_must_be(
    make_sample: MakeSample, response: str, full: float, start: float, anywhere: float
) -> None:
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


def test_an_answer_that_math_verify_cannot_confirm_within_its_limit_is_wrong(make_sample: MakeSample) -> None:
    assert verified(r"\boxed{1}", "1")  # imports SymPy
    sample = make_sample(r"\boxed{(x+1)^3 (x+2)^2}", ground_truth="x^5 + 7x^4 + 19x^3 + 25x^2 + 16x + 4")
    gc.disable()  # Hypothesis has a callback there, where Python would ignore the end
    try:
        assert math_verify(sample, limit_seconds=0.001) == 0.0
    finally:
        gc.enable()
    assert math_verify(sample) == 1.0
