from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_the_transport_benchmark_tells_speed_cost_and_latency(quick_benchmark: Callable[..., dict[str, Any]]) -> None:
    [row] = quick_benchmark("transport", "--no-ray")["rows"]
    assert row["samples"] == 1024
    assert row["samples_per_s"] > 0
    assert row["cpu_s_per_1000"] > 0
    assert {hop: told["n"] for hop, told in row["hop_ms"].items()} == {"prompts": 125, "samples": 1000, "ready": 125}
    assert all(0 <= told["p50"] <= told["p99"] for told in row["hop_ms"].values())
