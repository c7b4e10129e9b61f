"""Comparing what programs wrote: linear in its length, bounded in depth and digits, in a process that can be killed."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import AsyncIterator

import pytest

from plaudit_reward.code.outputs import OutputComparison, OutputForm, equals, judge


@functools.cache
def equal_hashes(number: int) -> list[list[int]]:
    """Return keys that a dict would compare with one another, each with a value: hours for many of them."""
    return [[k * sys.hash_info.modulus, 0] for k in range(1, number + 1)]


@pytest.fixture
async def comparison() -> AsyncIterator[OutputComparison]:
    started = OutputComparison()
    yield started
    await started.close()


@pytest.mark.parametrize("kind", ["dict", "set", "Counter"])
@pytest.mark.parametrize("wanted", [{1: 0}, {0: 0}, [1], dict(equal_hashes(50))])
def test_keys_with_equal_hashes_take_no_longer_than_others(kind: str, wanted: object) -> None:
    pairs = equal_hashes(100_000)
    content = [key for key, _ in pairs] if kind == "set" else pairs
    assert not equals([kind, content], wanted)
    assert not equals([kind, content], set(wanted) if isinstance(wanted, dict) else wanted)


async def test_a_large_result_is_compared_by_a_process(comparison: OutputComparison) -> None:
    right = list(range(50_000))
    written = json.dumps(["list", right]).encode()
    assert await comparison.compare("result", written, json.dumps(right))
    assert not await comparison.compare("result", written, json.dumps([*right[:-1], 0]))
    assert not await comparison.compare("result", json.dumps(["dict", equal_hashes(100_000)]).encode(), '{"1": 0}')
    assert await comparison.compare("printed", b"7\n" * 100_000, "7\n" * 100_000)


async def test_a_comparison_past_its_limit_is_wrong_and_the_next_one_right() -> None:
    hurried = OutputComparison(within_s=0.001)
    lines = b"1.5\n" * 500_000
    try:
        assert not await hurried.compare("printed", lines, lines.decode())
    finally:
        await hurried.close()
    patient = OutputComparison()
    try:
        assert await patient.compare("printed", lines, lines.decode())
    finally:
        await patient.close()


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("result", b"[" * 50_000),
        ("result", b'["list", [' * 5_000 + b"1" + b"]]" * 5_000),
        ("result", b"1" * 50_000),
        ("result", b"NaN"),
        ("result", b'["int", "0x' + b"f" * 50_000 + b'"]'),
        ("result", b'["dict", [[["dict", []], 1]]]'),
        ("result", b'["tuple"]'),
        ("result", b'[["list"], []]'),
        ("result", b"[[], []]"),
        ("result", b'["complex", 3]'),
        ("literals", b'{"answers": 3}'),
        ("literals", b'{"answers": [{"raised": []}]}'),
        ("literals", b'{"answers": []}'),
        ("literals", b"null"),
        ("printed beside", b'{"printed": 5}'),
        ("printed", b"1" * 60_000),
        ("printed", b"\xff\x00"),
    ],
)
def test_a_forged_result_is_wrong_and_raises_no_error(form: OutputForm, written: bytes) -> None:
    assert not judge(form, written, {"literals": '[[0, "3"]]'}.get(form, "3"))


@pytest.mark.parametrize(
    ("tree", "wanted", "equal"),
    [
        (True, 1, True),
        (1, 1.0, True),
        ("1", 1, False),
        (["int", hex(10**30)], 10**30, True),
        (["float", "inf"], float("inf"), True),
        (["float", "nan"], float("nan"), False),
        (["complex", ["list", [0.0, 2.0]]], 2j, True),
        (["bytes", "61"], b"a", True),
        (["list", [1, 2]], (1, 2), False),
        (["tuple", [1, ["list", [2]]]], (1, [2]), True),
        (["list", [1, 2, 3]], [1, 2], False),
        (["set", [1, 1]], {1, 2}, False),
        (["set", [1, ["tuple", [2, 3]]]], {(2, 3), 1}, True),
        (["frozenset", [1]], {1}, True),
        (["dict", [[1, 2], [1, 2]]], {1: 2, 3: 4}, False),
        (["dict", [[["tuple", [1]], ["set", []]]]], {(1,): set()}, True),
        (["dict", [[True, "x"]]], {1: "x"}, True),
        (["object", 0], 0, False),
        (["list", [["object", 0]]], [0], False),
        (None, None, True),
    ],
)
def test_values_are_equal_as_python_decides(tree: object, wanted: object, equal: bool) -> None:
    assert equals(tree, wanted) is equal
