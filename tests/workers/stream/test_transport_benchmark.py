from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "transport.py"


@pytest.mark.bench
def test_the_transport_benchmark_tells_speed_cost_and_latency(tmp_path: Path) -> None:
    result = tmp_path / "transport.json"
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--no-ray", "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    [row] = json.loads(result.read_text())["rows"]
    assert row["samples"] == 1024
    assert row["samples_per_s"] > 0
    assert row["cpu_s_per_1000"] > 0
    assert {hop: told["n"] for hop, told in row["hop_ms"].items()} == {"prompts": 125, "samples": 1000, "ready": 125}
    assert all(0 <= told["p50"] <= told["p99"] for told in row["hop_ms"].values())
