"""The short form of benchmarks/delay_profile.py: it runs, trains every group, and nothing beats its lower bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "delay_profile.py"


@pytest.mark.bench
def test_the_delay_profile_runs_and_its_lower_bound_is_one(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--strategy", "both", "--json", str(figures)]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = json.loads(figures.read_text())["results"]
    assert [(result["strategy"], result["cap"]) for result in results] == [("both", "8"), ("both", "none")]
    assert all(result["wall_s"] >= result["bound_s"] > 0 for result in results)
    assert {result["bound_by"] for result in results if result["cap"] == "8"} == {"reward"}
    assert len(table.splitlines()) == 3
