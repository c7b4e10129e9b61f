from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "start.py"


@pytest.mark.bench
def test_the_start_benchmark_tells_seconds_cpu_and_memory_until_the_first_score(tmp_path: Path) -> None:
    result = tmp_path / "start.json"
    run = subprocess.run([sys.executable, str(BENCHMARK), "--quick", "--json", str(result)], check=False)
    assert run.returncode == 0
    [row] = json.loads(result.read_text())["rows"]
    assert row["example"] == "07-reward-service"
    assert row["cpu_s"] > 0
    assert row["seconds"] > 0
    assert 50 < row["private_mb"] <= row["pss_mb"] < 500
