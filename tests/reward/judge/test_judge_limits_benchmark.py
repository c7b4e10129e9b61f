"""The short form of benchmarks/judge_limits.py: never over the budget at the judge's door, and everybody is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_the_judge_never_sees_more_than_the_budget(quick_benchmark: Callable[..., dict[str, Any]]) -> None:
    found = quick_benchmark("judge_limits")
    assert found["offered"] > 5 * found["budget"]
    assert 0.5 < found["most_in_any_window"] <= 1.0
    assert found["jain"] > 0.8
