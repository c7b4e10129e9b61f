"""The short form of benchmarks/reward_loop.py: it runs, every batch ends, nobody innocent is hurt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_every_batch_ends_and_no_innocent_is_hurt(
    quick_benchmark: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = quick_benchmark("reward_loop")["plaudit"]
    assert len(cases) == 8
    assert {case["ended"] for case in cases} == {"yes"}
    assert {case["innocents_hurt"] for case in cases} == {0}
    printed = capsys.readouterr().out
    assert all(case["case"] in printed for case in cases)
