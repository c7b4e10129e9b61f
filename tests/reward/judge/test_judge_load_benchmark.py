"""The short form of benchmarks/judge_load.py: every sample is scored, and no sample pays for its neighbours' faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "judge_load.py"


@pytest.mark.bench
def test_every_sample_is_scored_and_none_pays_for_its_neighbours(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run = subprocess.run([sys.executable, BENCHMARK, "--quick", "--json", out], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert {row["client"] for row in found["steady"]} >= {"judge", "model", "aiohttp"}
    for row in [*found["faulty"], *(row for row in found["steady"] if row["client"] in {"judge", "model"})]:
        assert row["outcomes"] == {"scored": row["samples"]}
        assert row["server"]["innocents_asked_again"] == 0
        assert row["server"]["most_at_a_time"] <= row["in_flight"]
    assert found["faulty"][0]["server"]["faults"] > 0
