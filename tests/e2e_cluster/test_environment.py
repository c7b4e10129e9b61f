"""An environment as a role of a job in pods: its server is killed and its pod replaced, and no score is invented."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as parquet
import pytest
from paced_job import NAMESPACE, PROMPTS, SAMPLES, PacedJob
from pod_processes import main_process
from real_cluster import Cluster

pytestmark = pytest.mark.timeout(900)

STEPS = 40
SERVER = """
import http.server, os

class Grader(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"ready")

    def do_POST(self):
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        self.answer(str(sum(int(token) < 8 for token in text.split()) / 6).encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Grader).serve_forever()
"""
REWARD = """
import os, pathlib, time, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if pathlib.Path("/plaudit/slow-{name}").exists():
        time.sleep(1.0)
    request = urllib.request.Request(os.environ["PLAUDIT_ENVIRONMENT_GRADER_URL"], data=solution_str.encode())
    with urllib.request.urlopen(request, timeout=5) as response:
        return float(response.read())
"""


@pytest.fixture(scope="module")
def job(shared: Cluster) -> Iterator[PacedJob]:
    """Yield a job whose scores come from a server in a pod of its own."""
    if not shared.own:
        pytest.skip("kills processes of this machine")
    job = PacedJob(shared, "graded", STEPS, REWARD)
    manifest = job.manifest()
    server = {"name": "grader", "command": ["python3", "-c", SERVER], "readiness": {"path": "/"}}
    manifest["spec"]["environments"] = [server]
    job.start(manifest)
    yield job
    job.delete()


def delete(job: PacedJob, pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    job.cluster.kubectl("--namespace", NAMESPACE, "delete", "pod", name, "--grace-period=0", "--force")


def kill(job: PacedJob, pod: dict[str, Any]) -> None:
    os.kill(main_process(pod), signal.SIGKILL)


@pytest.mark.parametrize("strike", [kill, delete])
def test_a_lost_server_is_replaced_and_the_job_goes_on(
    job: PacedJob, strike: Callable[[PacedJob, dict[str, Any]], None], capsys: pytest.CaptureFixture[str]
):
    (before,), began = job.pods("environment"), time.monotonic()
    strike(job, before)

    def another() -> bool:
        pods = job.pods("environment")
        return any(state(pod) != state(before) and is_ready(pod) for pod in pods)

    job.cluster.until("another server", another)
    job.goes_on()
    assert {"name": "environment/grader", "desired": 1, "ready": 1}.items() <= role(job).items()
    with capsys.disabled():
        print(f"\n  environment {strike.__name__}: goes on after {time.monotonic() - began:.1f} s", end=" ")


def test_every_score_is_the_servers_or_has_a_reason(job: PacedJob):
    assert job.finish()["phase"] == "Complete"
    ledger = job.ledger()
    assert ledger["problems"] == []
    assert ledger["trained"] == STEPS * PROMPTS
    rows = [row for file in job.folder.glob("samples/*.parquet") for row in parquet.read_table(file).to_pylist()]
    assert len(rows) >= STEPS * PROMPTS * SAMPLES
    for row in rows:
        if row["score"] is None:
            assert row["outcome"] in ("infra_error", "timeout"), row["reason"]
        else:
            assert row["score"] == pytest.approx(sum(int(token) < 8 for token in row["response"].split()) / 6)


def state(pod: dict[str, Any]) -> tuple[str, int]:
    return pod["metadata"]["uid"], sum(c["restartCount"] for c in pod["status"].get("containerStatuses", []))


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def role(job: PacedJob) -> dict[str, Any]:
    return next(role for role in job.status["roles"] if role["name"] == "environment/grader")
