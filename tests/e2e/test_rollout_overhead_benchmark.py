"""The benchmark of the worker against bare vLLM runs, and both generate the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rollout_overhead.py"


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_worker_generates_what_bare_vllm_generates(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(results)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(results.read_text())
    for name in ("long", "short"):
        assert found[name]["same_responses"]
        assert found[name]["ratio"] > 0.1
