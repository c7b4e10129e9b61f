"""The benchmarks run, and the one of the statistics finds arrays well ahead of a loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.bench
def test_arrays_are_several_times_faster_than_a_loop_over_dictionaries(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    (row,) = run_quickly("step_statistics.py", results)["results"]
    assert row["samples"] == 8192
    assert row["ratio"] >= 5


@pytest.mark.bench
def test_the_cost_of_events_is_printed_for_every_variant(tmp_path: Path) -> None:
    figures = run_quickly("events_cost.py", tmp_path / "results.json")
    assert set(figures) == {"without", "events", "events and service"}
    assert all(told["samples_per_s"] > 0 for told in figures.values())


@pytest.mark.bench
def test_the_delay_of_the_service_is_measured_before_at_and_after_the_close_of_a_step(tmp_path: Path) -> None:
    figures = run_quickly("step_close.py", tmp_path / "results.json")["results"]
    assert figures["samples"] == 8192
    assert set(figures["wall_ms"]) == set(figures["cpu_ms"]) == {"reading", "closing", "timeline"}


@pytest.mark.bench
def test_reading_stored_samples_is_measured_for_every_request(tmp_path: Path) -> None:
    figures = run_quickly("stored_samples.py", tmp_path / "results.json")
    assert figures["samples"] == 20_000
    assert all(row["found"] > 0 and row["slowest_page_s"] > 0 for row in figures["results"])


def run_quickly(name: str, results: Path) -> Any:
    command = [sys.executable, str(BENCHMARKS / name), "--quick", "--json", str(results)]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads(results.read_text())
