"""The Redis of a run: a user for each role, passwords in files of this user only."""

import stat
from pathlib import Path

import pytest
import redis

from builders import job_document
from plaudit_job.load import parse_job
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.transport import run_redis
from plaudit_workers.stream.transport import Transport

JOB = parse_job(job_document(reward={"scorers": [{"name": "a", "kind": "rule", "rule": "gsm8k"}]}))


async def test_each_role_reads_its_password_from_a_private_file_and_may_do_no_more_than_its_work(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "scores"
    async with run_redis(JOB, folder, host="127.0.0.1") as access:
        await (await Transport.open(access.admin, "scores")).close()
        environment = access.environment("reward")
        assert "PLAUDIT_REDIS_PASSWORD" not in environment
        file = Path(environment["PLAUDIT_REDIS_PASSWORD_FILE"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        address = RedisAddress.from_environment(environment)
        transport = await Transport.open(address, "scores")
        try:
            await transport.now()
            with pytest.raises(redis.exceptions.NoPermissionError):
                await transport.commands.flushall()
            with pytest.raises(redis.exceptions.NoPermissionError):
                await transport.commands.hset(transport.names.state, "step", "9")
        finally:
            await transport.close()
        stranger = RedisAddress(address.url).client(timeout_s=5, retries=0)
        with pytest.raises(redis.exceptions.AuthenticationError):
            await stranger.ping()
        await stranger.aclose()
