"""The short form of benchmarks/scorers.py: it runs, and a rule of each kind has its rates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "scorers.py"


@pytest.mark.bench
def test_a_rule_of_each_kind_has_its_rates(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, BENCHMARK, "--quick", "--json", out, "--rules", "gsm8k", "format"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rules = json.loads(out.read_text())["rules"]
    assert [one["rule"] for one in rules] == ["gsm8k", "format"]
    assert all(set(one["samples_per_s"]) == {"1", "2"} and one["rule"] in run.stdout for one in rules)
    assert all(rate > 0 for one in rules for rate in one["samples_per_s"].values())
