"""The process of a reward model server: one that cannot serve ends the run with a message. The rest: tests/e2e."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plaudit_wire.errors import RefusedError
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.child_server import ServerDiedError
from plaudit_workers.launch.served_models import ServerIdentity, serve
from plaudit_workers.process import ProcessSettings

JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  reward:
    scorers:
      - {name: helpful, kind: model, model: {source: ./rm, engine: plaudit, arguments: {max_queue: 0}}}
"""


@pytest.mark.parametrize(("restarted", "error"), [("", RefusedError), ("1", ServerDiedError)])
async def test_a_server_that_does_not_start_is_refused_with_the_end_of_its_log_or_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: str, error: type[Exception]
) -> None:
    monkeypatch.setenv("PLAUDIT_RESTARTED", restarted)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text("{}")
    monkeypatch.setenv("PLAUDIT_MODEL_SERVER", "helpful/0")
    monkeypatch.setenv("PLAUDIT_MODEL_SERVER_HOST", "127.0.0.1")
    settings = ProcessSettings(
        job_path=tmp_path / "job.yaml",
        run="run",
        run_folder=tmp_path,
        redis=RedisAddress("redis://127.0.0.1:1/0"),
        worker="model-helpful-0",
        health_port=0,
        log_file=tmp_path / "log",
    )
    with pytest.raises(error, match=r"(?s)Its log ends:.*argument --max-queue: '0' is not a whole number"):
        await serve(settings, asyncio.Event())
    assert not ServerIdentity("helpful", 0, "", 0).file(tmp_path).exists()
