"""What functions return becomes a typed score; nothing that is no finite number becomes one."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_reward.functions.result import to_score, to_scores
from plaudit_reward.scorer import Score

VALUES = [
    (1, 1.0),
    (0.5, 0.5),
    (True, 1.0),
    (False, 0.0),
    (np.float32(0.5), 0.5),
    (np.array(2), 2.0),
    (Decimal("0.25"), 0.25),
    (Fraction(1, 4), 0.25),
    ({"score": 1, "acc": True}, 1.0),
    ((0.5, "asked", "because"), 0.5),
    (Score.scored(3.0), 3.0),
]


@pytest.mark.parametrize(("returned", "value"), VALUES)
def test_numbers_are_values(returned: Any, value: float) -> None:
    score = to_score(returned)
    assert (score.outcome, score.value) == ("scored", value)


NOT_VALUES = [
    (None, "skipped", "returned None"),
    ({"score": None}, "skipped", "returned None"),
    (math.nan, "data_error", "nan is not finite"),
    (math.inf, "data_error", "inf is not finite"),
    ({"score": -math.inf}, "data_error", "-inf is not finite"),
    (10**400, "data_error", "not a number"),
    ("1.0", "data_error", "returned str"),
    ([1.0], "data_error", "returned list"),
    (np.array([1.0, 2.0]), "data_error", "not a number"),
    (np.complex64(1j), "data_error", "returned complex64"),
    (np.array(1j), "data_error", "returned ndarray"),
    ({"acc": 1.0}, "data_error", "without 'score' (its keys: acc)"),
    ({}, "data_error", "its keys: none"),
    ((1.0, "asked"), "data_error", "tuple of 2"),
    (object(), "data_error", "returned object"),
    (Score.failed("infra_error", "away"), "infra_error", "away"),
    (Score.failed("poison", "mine"), "data_error", "returned the outcome 'poison', which is not a function's to give"),
    (Score.failed("given_up", "mine"), "data_error", "returned the outcome 'given_up'"),
]


@pytest.mark.parametrize(("returned", "outcome", "reason"), NOT_VALUES)
def test_everything_else_has_no_value(returned: Any, outcome: str, reason: str) -> None:
    score = to_score(returned)
    assert (score.outcome, score.value) == (outcome, None)
    assert reason in (score.reason or "")


def test_extras_keep_numbers_and_texts_and_leave_out_other_values() -> None:
    score = to_score({"score": 1, "acc": True, "text": "t" * 3000, "nan": math.nan, "none": None, "list": [1, "a"]})
    assert score.extra == {"acc": 1.0, "text": "t" * 2000, "list": '[1, "a"]'}


class Unreadable:
    def __float__(self) -> float:
        raise RuntimeError("no number")

    __str__ = __repr__ = __float__  # type: ignore[assignment]


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        (1 << 67, float(1 << 67)),
        (10**400, str(10**400)),
        ([10**5000], "a list"),
        ("half \ud800", "half \ufffd"),
        ({"n": 1 << 67}, f'{{"n": {1 << 67}}}'),
        ({1: {2}, "nan": math.nan}, '{"1": [2], "nan": null}'),
        ({(1,): 2}, "{(1,): 2}"),
        (b"\xff", "\"b'\\\\xff'\""),
        (endless, "[[...]]"),
        (Unreadable(), "a Unreadable"),
        ([Unreadable()], "a list"),
    ],
)
def test_no_extra_loses_the_score(item: Any, kept: float | str) -> None:
    score = to_score({"score": 1, "item": item, "\udfff": 1})
    assert (score.outcome, score.value, score.extra) == ("scored", 1.0, {"item": kept, "\ufffd": 1.0})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(score), type=Score) == score


def test_a_value_that_cannot_be_read_costs_its_own_sample() -> None:
    class Hostile(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            raise RuntimeError("no keys")

    class Exits:
        def __float__(self) -> float:
            raise SystemExit(3)

    values = [1.0, Hostile(), Unreadable(), Score("unknown"), Exits()]  # type: ignore[arg-type]
    assert [score.outcome for score in to_scores(values, 5)] == ["scored", *["data_error"] * 4]


def test_the_judges_texts_of_a_tuple_are_extras() -> None:
    assert to_score((1.0, "asked", "because")).extra == {"request_text": "asked", "explanation": "because"}


def test_extras_of_a_users_own_score_are_cleaned_as_well() -> None:
    dirty = Score("scored", 1.0, extra={"flag": True, "bad": math.nan})
    assert to_score(dirty).extra == {"flag": 1.0}


def test_a_list_gives_one_score_a_sample() -> None:
    scores = to_scores([1.0, None, math.nan], 3)
    assert [score.outcome for score in scores] == ["scored", "skipped", "data_error"]


class Lying(list[float]):
    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "returned",
    [[1.0], 1.0, None, "ab", b"ab", {0.0, 1.0}, {"score": [1, 2]}, Lying([1.0]), Lying([1.0, 1.0, 1.0])],
)
def test_a_list_of_the_wrong_length_or_kind_scores_no_sample(returned: Any) -> None:
    scores = to_scores(returned, 2)
    assert [score.outcome for score in scores] == ["data_error", "data_error"]


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner),
    max_leaves=5,
)


@given(anything | st.dictionaries(st.just("score"), anything))
def test_a_value_only_ever_comes_from_a_finite_number_that_was_returned(returned: Any) -> None:
    score = to_score(returned)
    if score.value is None:
        return
    source = returned
    if isinstance(returned, dict):
        source = returned["score"]
    elif isinstance(returned, tuple):
        source = returned[0]
    assert isinstance(source, int | float)
    assert score.value == float(source)
    assert math.isfinite(score.value)
