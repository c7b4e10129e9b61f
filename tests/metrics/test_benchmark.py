"""The benchmark of the statistics runs, agrees with itself, and finds arrays well ahead of a loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "step_statistics.py"


@pytest.mark.bench
def test_arrays_are_several_times_faster_than_a_loop_over_dictionaries(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    subprocess.run([sys.executable, str(BENCHMARK), "--quick", "--json", str(results)], check=True, capture_output=True)
    (row,) = json.loads(results.read_text())["results"]
    assert row["samples"] == 8192
    assert row["ratio"] >= 5
