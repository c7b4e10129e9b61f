"""Whole jobs under seeded faults: the short form of benchmarks/soak.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.timeout(900)
def test_every_position_is_trained_once_whatever_fails(tmp_path: Path) -> None:
    figures_file = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(figures_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(figures_file.read_text())
    assert figures["runs"] == 6
    assert sum(figures["faults"].values()) > 10
