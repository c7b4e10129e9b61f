"""The benchmark of conversations with slow tools, beside verl's own tool agent loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_environments import CACHE, python

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "agent_loop.py"


@pytest.mark.timeout(900)
def test_the_same_conversations_are_held_in_verls_tool_agent_loop(tmp_path: Path) -> None:
    interpreter = python("verl")
    if interpreter is None:
        pytest.skip(f"the environment verl is not built in {CACHE}: make trainers-build")
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(out), "--verl", str(interpreter)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(out.read_text())["verl"]
    assert found["workers"] == 2
    assert [(row["kind"], row["samples"]) for row in found["rows"]] == [("blocking", 24), ("async", 24)]
    assert all(row["ratio"] >= 1 for row in found["rows"])
    assert "async tools, 2 workers" in done.stdout
