"""The short form of benchmarks/reward_loop.py: it runs, every batch ends, nobody innocent is hurt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reward_loop.py"


@pytest.mark.bench
def test_every_batch_ends_and_no_innocent_is_hurt(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run = subprocess.run([sys.executable, BENCHMARK, "--quick", "--json", out], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    cases = json.loads(out.read_text())["plaudit"]
    assert len(cases) == 8
    assert {case["ended"] for case in cases} == {"yes"}
    assert {case["innocents_hurt"] for case in cases} == {0}
    assert all(case["case"] in run.stdout for case in cases)
