"""The benchmarks run, and the one of the statistics finds arrays well ahead of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Quick = Callable[[str], dict[str, Any]]


@pytest.mark.bench
def test_arrays_are_several_times_faster_than_a_loop_over_dictionaries(quick_benchmark: Quick) -> None:
    (row,) = quick_benchmark("step_statistics")["results"]
    assert row["samples"] == 8192
    assert row["ratio"] >= 5


@pytest.mark.bench
def test_the_cost_of_events_is_printed_for_every_variant(quick_benchmark: Quick) -> None:
    figures = quick_benchmark("events_cost")
    assert set(figures) == {"without", "events", "events and service"}
    assert all(told["samples_per_s"] > 0 for told in figures.values())


@pytest.mark.bench
def test_the_delay_of_the_service_is_measured_before_at_and_after_the_close_of_a_step(quick_benchmark: Quick) -> None:
    figures = quick_benchmark("step_close")["results"]
    assert figures["samples"] == 8192
    assert set(figures["wall_ms"]) == set(figures["cpu_ms"]) == {"reading", "closing", "timeline"}


@pytest.mark.bench
def test_reading_stored_samples_is_measured_for_every_request(quick_benchmark: Quick) -> None:
    figures = quick_benchmark("stored_samples")
    assert figures["samples"] == 20_000
    assert all(row["found"] > 0 and row["slowest_page_s"] > 0 for row in figures["results"])
