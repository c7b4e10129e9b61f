from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_the_start_benchmark_tells_seconds_cpu_and_memory_until_the_first_score(
    quick_benchmark: Callable[..., dict[str, Any]],
) -> None:
    [row] = quick_benchmark("start")["rows"]
    assert row["example"] == "07-reward-service"
    assert row["cpu_s"] > 0
    assert row["seconds"] > 0
    assert 50 < row["private_mb"] <= row["pss_mb"] < 500
