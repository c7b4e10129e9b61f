"""The benchmark of conversations with slow tools runs, and counts every sample."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_conversations_with_slow_tools_are_measured(quick_benchmark: Callable[[str], dict[str, Any]]) -> None:
    found = quick_benchmark("agent_loop")["conversations"]
    assert found["samples"] == 24
    assert found["ratio"] >= 1
    assert 0 <= found["loop"]["p50_ms"] <= found["loop"]["p99_ms"] <= found["loop"]["max_ms"]
