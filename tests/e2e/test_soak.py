"""Whole jobs under seeded faults: the short form of benchmarks/soak.py."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(900)
def test_every_position_is_trained_once_whatever_fails(quick_benchmark: Callable[[str], dict[str, Any]]) -> None:
    figures = quick_benchmark("soak")
    assert figures["runs"] == 6
    assert sum(figures["faults"].values()) > 10
