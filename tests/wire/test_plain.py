"""What passes the door is held, sent and read again by every process; the rest is refused by name."""

import datetime
import decimal
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_sample
from plaudit_wire.messages import RecordError, encode
from plaudit_wire.plain import MOST_LEVELS, PlainDataError, error_text, json_value, plain, plain_json, plain_text

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=4)
    | st.decimals()
    | st.datetimes()
    | st.just(object()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters()) | st.integers() | st.floats(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(ANYTHING)
def test_what_passes_is_the_same_after_every_codec(value: Any) -> None:
    try:
        passed = plain(value, "extra_info")
    except PlainDataError:
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(passed)) == passed
    assert msgspec.json.decode(msgspec.json.encode(passed)) == passed
    assert plain(passed) == passed


@given(st.text(st.characters()))
def test_a_text_that_can_be_encoded_is_untouched(text: str) -> None:
    passed = plain_text(text)
    passed.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert passed == text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (2**64, "extra_info: is an integer beyond 64 bits (18446744073709551616); write it as text"),
        ({"n": [1, 2, 3, -(2**63) - 1]}, "extra_info.n[3]: is an integer beyond 64 bits"),
        ({"a": {"b": 2**5000}}, "extra_info.a.b: is an integer beyond 64 bits (5001 bits)"),
        ([math.inf], "extra_info[0]: is inf, which JSON cannot hold"),
        (b"x", "extra_info: is bytes: b'x'; write text, such as base64"),
        ({"a": object}, "extra_info.a: is of type type"),
        ({1: 1, "1": 2}, "extra_info: has two keys '1'"),
        ({(1, 2): 3}, "extra_info: has the key (1, 2) of type tuple"),
        (["x" * (17 << 20)], "extra_info[0]: is larger than 16 Mi characters"),
    ],
)
def test_what_cannot_travel_is_refused_where_it_stands(value: Any, error: str) -> None:
    with pytest.raises(PlainDataError) as refused:
        plain(value, "extra_info")
    assert error in str(refused.value)


def test_a_value_that_holds_itself_or_unfolds_without_end_is_refused() -> None:
    own: list[Any] = []
    own.append(own)
    many: Any = "x"
    for _ in range(40):
        many = [many] * 10
    for value in (own, many):
        with pytest.raises(PlainDataError) as refused:
            plain(value, "a")
        assert len(str(refused.value)) < 300


def test_levels_are_counted_alike_for_values_and_for_texts() -> None:
    text = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert plain_json(text) is not None
    for deeper in (f"[{text}]", "[" * 100_000 + "]" * 100_000):
        with pytest.raises(PlainDataError, match=f"nested more than {MOST_LEVELS} levels deep"):
            plain_json(deeper, "body")


@pytest.mark.parametrize("text", ["{", "NaN", "[-Infinity]", b"\xff", "", "1 2", "\ud800"])
def test_a_text_that_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlainDataError, match="body: is not JSON"):
        plain_json(text, "body")


def test_a_reader_of_nan_names_other_constants_of_python() -> None:
    assert math.isnan(json_value('{"a": NaN}', nan=True)["a"])
    with pytest.raises(PlainDataError, match=r"is not JSON \(-Infinity is no value of JSON\)"):
        json_value('{"a": -Infinity}', nan=True)


def test_halves_of_a_surrogate_pair_in_json_are_replaced_and_huge_numbers_refused() -> None:
    assert plain_json('{"a": "\\ud800b", "c": "\\ud83d\\ude00"}') == {"a": "\ufffdb", "c": "😀"}
    with pytest.raises(PlainDataError, match=r"body: holds a number beyond the largest of 64 bits; write it as text"):
        plain_json('{"a": 1e999}', "body")


class NotATime(datetime.datetime):
    """As pandas' NaT, which equals nothing, not even itself."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


class Faulty(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("no reading")


class Unending:
    """Its plain form is another of its kind, and so on."""

    def tolist(self) -> Any:
        return type("Unending", (Unending,), {})()

    def __repr__(self) -> str:
        raise RuntimeError("no text either")


class HostileError(Exception):
    def __str__(self) -> str:
        raise HostileError


class Unwritten(datetime.date):
    def isoformat(self) -> str:
        raise HostileError


def misspelt(text: str) -> decimal.Decimal:
    """Return a number that writes itself in its own way."""
    return type("Misspelt", (decimal.Decimal,), {"__str__": lambda self: text})(1)


class Lying(str):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    "value",
    [
        *(Faulty([1]), Unending(), memoryview(np.array(5)), memoryview(b"x"), [Unending()], Unwritten(1, 1, 1)),
        type("NoText", (Unwritten,), {"isoformat": lambda self: 5})(1, 1, 1),
    ],
)
def test_a_value_whose_own_code_fails_is_refused(value: Any) -> None:
    with pytest.raises(PlainDataError, match=r"^x.* (cannot be read|is bytes)"):
        plain(value, "x")


def test_what_a_values_own_code_writes_is_judged_as_well() -> None:
    assert plain(misspelt("half \ud800")) == "half \ufffd"
    long = "x" * (17 << 20)
    for value in (misspelt(long), Lying(long)):
        with pytest.raises(PlainDataError, match="is larger than 16 Mi characters"):
            plain(value)


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise HostileError


def test_an_error_is_told_whatever_its_own_code_does() -> None:
    assert error_text(ValueError("half \ud800")) == "ValueError: half \ufffd"
    assert error_text(HostileError()) == "HostileError"
    assert error_text(Nameless("Odd", (Exception,), {})("why")) == "Odd: why"


def test_types_of_other_libraries_become_python_s_own() -> None:
    given_value = {
        1: np.float32(1.5),
        None: np.arange(2),
        "when": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.20"),
        "absent": float("nan"),
        "ids": (np.uint64(2**63), np.bool_(True)),
        "times": np.array(["2026-01-02T03:04:05.000000006", "NaT"], "datetime64[ns]"),
        "span": np.timedelta64(1_500_000_000, "ns"),
        "not a time": NotATime(1, 1, 1),
    }
    passed = plain(given_value)
    assert passed == {
        "1": 1.5,
        "null": [0, 1],
        "when": "2026-01-02",
        "price": "1.20",
        "absent": None,
        "ids": [2**63, True],
        "times": ["2026-01-02T03:04:05", None],
        "span": "0:00:01.500000",
        "not a time": None,
    }
    assert type(passed["ids"][0]) is int


def test_halves_of_a_surrogate_pair_are_replaced_and_pairs_joined() -> None:
    assert plain({"a\ud800": "b\udfff, \ud83d\ude00"}) == {"a\ufffd": "b\ufffd, 😀"}


@pytest.mark.parametrize("value", [2**64, "\ud800", object()])
def test_a_record_with_what_passed_no_gate_is_a_typed_error(value: Any) -> None:
    with pytest.raises(RecordError, match="a Sample that cannot be encoded: "):
        encode(make_sample(extra_info={"x": value}))
