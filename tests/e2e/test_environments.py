"""A whole run with a server of ``spec.environments`` that dies now and then."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_metrics.sources.steps import read_steps

pytestmark = pytest.mark.timeout(300)

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    num_answers = 0
    def do_GET(self):
        Handler.num_answers += 1
        if Handler.num_answers > 12:
            os._exit(1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"0.5")
http.server.HTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Handler).serve_forever()
"""
REWARD = """
import os, time, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    for _ in range(200):
        try:
            return float(urllib.request.urlopen(os.environ["PLAUDIT_ENVIRONMENT_BOX_URL"], timeout=5).read())
        except OSError:
            time.sleep(0.1)
"""


def test_an_environment_that_dies_is_started_again_and_no_score_is_lost(
    example: Callable[[str], Path], change_job: Callable[..., Path], scripted: dict[str, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(example("06-trl-reward"), tmp_path / "job")
    (folder / "server.py").write_text(SERVER)
    (folder / "box_reward.py").write_text(REWARD)
    job = change_job(
        folder / "job.yaml",
        environments=[
            {"name": "box", "command": [sys.executable, str(folder / "server.py")], "readiness": {"path": "/"}}
        ],
        rollout__engine=scripted,
        algorithm__promptsPerStep=2,
        reward__scorers=[{"name": "box", "kind": "python", "python": {"path": "box_reward.py"}}],
        reward__combine=None,
        reward__timeoutSeconds=60,
    )
    command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(job), "--steps", "2"]
    where = ["--runs-folder", str(tmp_path), "--run", "run"]
    done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [step for step in read_steps(tmp_path / "run" / "steps.jsonl") if step.num_samples]
    assert [step.statistics["reward/mean"] for step in steps] == [0.5, 0.5]
    assert "environment-box" in (done.stdout + done.stderr)
