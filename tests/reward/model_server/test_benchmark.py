"""The benchmark runs in its short form: every way to the logits gives the same ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "reward_model.py"


@pytest.mark.bench
def test_all_ways_give_the_same_logits(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(results)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    found = json.loads(results.read_text())
    assert set(found["sequences_per_s"]) == {"loop, one by one", "loop, batches", "model_server"}
    assert max(found["logits_apart"].values()) < 1e-4
