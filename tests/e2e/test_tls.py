"""A run whose Redis is somebody else's, and asks every process for a certificate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stream_protocol import secure_redis as secure

pytestmark = pytest.mark.timeout(900)


def test_every_process_of_a_run_uses_tls(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    scripted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = secure.Authority(tmp_path / "tls").start()
    certificate, key = authority.sign("client", "client")
    monkeypatch.setenv("PLAUDIT_SECRET_REDIS_WORD", secure.PASSWORD)
    with secure.secure_redis(tmp_path, authority, authority.sign("redis", "localhost"), asks="yes") as redis:
        transport = {
            "url": f"rediss://localhost:{redis.port}/0",
            "passwordSecret": {"name": "redis", "key": "word"},
            "tls": {"caFile": authority.ca, "certificateFile": certificate, "keyFile": key},
        }
        job = change_job(
            example("01-copy-digits") / "job.yaml", transport=transport, rollout__engine=scripted, data__validation=None
        )
        run = plaudit_run(job, "--steps", "3")
    assert run.exit_code == 0, run.output
    assert run.trained_steps == [1, 2, 3]
    assert run.ledger["admitted"] == run.ledger["trained"] == 3 * 16
    assert run.steps[-1].statistics["reward_pipeline/outcome/scored"] == 16 * 16
