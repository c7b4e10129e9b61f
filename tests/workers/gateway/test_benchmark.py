"""The short form of benchmarks/gateway.py: every sample of every caller is scored, and the figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "gateway.py"


@pytest.mark.bench
def test_every_sample_is_scored_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run = subprocess.run([sys.executable, BENCHMARK, "--quick", "--json", out], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    figures = json.loads(out.read_text())
    assert figures["samples_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert all(figures[f"cpu_{name}"] > 0 for name in ("redis", "scoring", "gateway", "client"))
