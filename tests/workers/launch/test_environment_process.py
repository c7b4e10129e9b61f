"""The process of one entry of ``spec.environments`` under ``plaudit run``; its server is a real child."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from plaudit_job.load import load_job
from plaudit_wire.errors import RefusedError
from plaudit_wire.redis import RedisAddress
from plaudit_workers.job_start import await_environments, environment_url, is_reachable
from plaudit_workers.launch.child_server import ServerDiedError, serve_environment
from plaudit_workers.launch.redis import free_port
from plaudit_workers.process import ProcessSettings

SERVER = """
import http.server, os, sys
print("secret is", os.environ.get("PLAUDIT_REDIS_PASSWORD"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
http.server.HTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Handler).serve_forever()
"""
JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {{name: j}}
spec:
  reward: {{scorers: [{{name: a, kind: rule, rule: gsm8k}}]}}
  environments:
    - {{name: code-box, command: [{python}, {file}], readiness: {{path: /ready, timeoutSeconds: {limit}}}}}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(program: str, limit: float = 30) -> ProcessSettings:
        (tmp_path / "server.py").write_text(program)
        job = JOB.format(python=sys.executable, file=tmp_path / "server.py", limit=limit)
        (tmp_path / "job.yaml").write_text(job)
        monkeypatch.setenv("PLAUDIT_ENVIRONMENT_SERVER", "code-box")
        monkeypatch.setenv("PLAUDIT_ENVIRONMENT_CODE_BOX_URL", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("PLAUDIT_REDIS_PASSWORD", "hidden")
        return ProcessSettings(
            job_path=tmp_path / "job.yaml",
            run="run",
            run_folder=tmp_path,
            redis=RedisAddress("redis://127.0.0.1:1/0"),
            worker="environment-code-box",
            health_port=0,
            log_file=tmp_path / "log",
        )

    return make


async def test_a_server_is_awaited_served_and_stopped(settings) -> None:
    own, stop = settings(SERVER), asyncio.Event()
    serving = asyncio.create_task(serve_environment(own, stop))
    await asyncio.wait_for(await_environments(load_job(own.job_path)), 30)
    url = environment_url("code-box")
    assert await is_reachable(url, "")
    assert not await is_reachable(url, "/elsewhere")
    stop.set()
    assert await serving == 0
    assert not await is_reachable(url, "")
    assert "secret is None" in own.log_file.read_text()


async def test_a_server_that_dies_ends_its_process_which_the_supervisor_starts_anew(settings) -> None:
    own = settings(SERVER)
    serving = asyncio.create_task(serve_environment(own, asyncio.Event()))
    await asyncio.wait_for(await_environments(load_job(own.job_path)), 30)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(environment_url("code-box").rpartition(":")[2]))
    writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
    os.kill(int((await reader.read()).split()[-1]), signal.SIGKILL)
    writer.close()
    with pytest.raises(ServerDiedError, match="environment code-box ended with exit code -9; its log: "):
        await serving


@pytest.mark.parametrize(
    ("program", "limit", "message"),
    [
        ("raise ValueError('no display')", 30, "ended with exit code 1 at its start. Its log ends:.*no display"),
        ("import time; time.sleep(60)", 0.4, r"was not ready at http://127.0.0.1:\d+/ready within 0.4 s"),
    ],
)
async def test_a_server_that_does_not_start_is_refused_with_its_log(settings, program, limit, message) -> None:
    with pytest.raises(RefusedError, match=f"(?s){message}"):
        await serve_environment(settings(program, limit), asyncio.Event())


async def test_a_server_that_ends_at_a_later_start_may_be_started_again(settings, monkeypatch) -> None:
    monkeypatch.setenv("PLAUDIT_RESTARTED", "1")
    with pytest.raises(ServerDiedError, match="ended with exit code 1 at its start"):
        await serve_environment(settings("raise ValueError('killed by a request')", 30), asyncio.Event())


def test_a_process_without_the_url_of_an_environment_is_refused() -> None:
    with pytest.raises(RefusedError, match="PLAUDIT_ENVIRONMENT_CODE_BOX_URL is not set"):
        environment_url("code-box")
