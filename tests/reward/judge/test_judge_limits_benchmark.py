"""The short form of benchmarks/judge_limits.py: never over the budget at the judge's door, and everybody is served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "judge_limits.py"


@pytest.mark.bench
def test_the_judge_never_sees_more_than_the_budget(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run = subprocess.run([sys.executable, BENCHMARK, "--quick", "--json", out], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert found["offered"] > 5 * found["budget"]
    assert 0.5 < found["most_in_any_window"] <= 1.0
    assert found["jain"] > 0.8
