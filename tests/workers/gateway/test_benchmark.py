"""The short form of benchmarks/gateway.py: every sample of every caller is scored, and the figures are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.bench
def test_every_sample_is_scored_and_measured(quick_benchmark: Callable[..., dict[str, Any]]) -> None:
    figures = quick_benchmark("gateway")
    assert figures["samples_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert all(figures[f"cpu_{name}"] > 0 for name in ("redis", "scoring", "gateway", "client"))
