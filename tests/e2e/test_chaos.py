"""Every kind of process killed once in a running job: the short form of benchmarks/chaos.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.timeout(900)
def test_a_job_survives_the_kill_of_each_of_its_processes(tmp_path: Path) -> None:
    figures_file = tmp_path / "chaos.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(figures_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(figures_file.read_text())
    assert figures["kills"] == 4
    assert figures["same_prompts_trained"]
    assert figures["trained_twice"] == 0
    assert figures["poison"] == 0
