"""An external Redis over TLS, with a throw-away authority: who is let in, and what each mistake is called."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import job_document
from plaudit_job.load import load_job
from plaudit_metrics.service.serve import serve as serve_metrics
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_wire.errors import RefusedError
from plaudit_wire.redis import RedisAddress, RedisTls
from plaudit_workers.launch.transport import external_redis
from plaudit_workers.process import EXIT_REFUSED, ProcessSettings
from plaudit_workers.service.client import RewardClient, ServiceError
from plaudit_workers.service.worker import serve as serve_reward
from plaudit_workers.stream.transport import Transport
from stream_protocol import secure_redis as secure

RUN = "secure-1"


StartRedis = Callable[..., str]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return secure.Authority(tmp_path_factory.mktemp("tls") / "ours").start()


@pytest.fixture(scope="module")
def start_redis(authority: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRedis]:
    """Starts a Redis that shows the certificate of that name; gives its address. Each is started once."""
    running: dict[tuple[str, str], Any] = {}

    def start(certificate: str, asks: str = "no", **signed: Any) -> str:
        if (certificate, asks) not in running:
            running[certificate, asks] = secure.secure_redis(
                tmp_path_factory.mktemp(certificate),
                authority,
                authority.sign(certificate, **{"host": "localhost", **signed}),
                asks=asks,
            )
            running[certificate, asks].__enter__()
        return f"rediss://localhost:{running[certificate, asks].port}/0"

    yield start
    for redis in running.values():
        redis.__exit__()


@pytest.fixture(scope="module")
def mutual(start_redis: StartRedis, authority: Any) -> RedisAddress:
    """A Redis that asks for a certificate, and one to show it."""
    certificate, key = authority.sign("client", "client")
    url = start_redis("mutual", asks="yes")
    return RedisAddress(url, "word", tls=RedisTls(authority.ca, certificate, key))


SCORER = {"name": "right", "kind": "rule", "rule": "gsm8k"}
JOB = job_document("secure", reward={"scorers": [SCORER], "workers": {"processes": 1}})
SAMPLES = [{"response": "#### 4", "ground_truth": "4"}, {"response": "#### 5", "ground_truth": "4"}]


def written(folder: Path, transport: dict[str, Any]) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, "spec": {**JOB["spec"], "transport": transport}}))
    return file


async def test_a_service_scores_over_tls_with_certificates_on_both_sides(mutual: RedisAddress, tmp_path: Path) -> None:
    stop = asyncio.Event()
    environment = {
        "PLAUDIT_JOB": str(written(tmp_path, {})),
        "PLAUDIT_RUN": RUN,
        "PLAUDIT_RUN_FOLDER": str(tmp_path),
        **mutual.environment(),
    }
    reward = ProcessSettings.from_environment(environment)
    metrics = ServiceSettings.from_environment(environment)
    running = [asyncio.create_task(serve_reward(reward, stop)), asyncio.create_task(serve_metrics(metrics, stop))]
    async with RewardClient(mutual, run=RUN, wait_s=10.0) as client:
        ids = await client.submit(SAMPLES)
        scores = {result.id: result.score async for result in client.results()}
    assert [scores[id_] for id_ in ids] == [1.0, 0.0]
    stop.set()
    assert await asyncio.gather(*running) == [0, None]


@pytest.mark.parametrize("way", ["files", "secrets"])
async def test_the_job_names_certificates_as_files_or_as_secrets(
    mutual: RedisAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    ca, certificate, key = mutual.tls.ca_file, mutual.tls.certificate_file, mutual.tls.key_file
    tls: dict[str, Any] = {"caFile": ca, "certificateFile": certificate, "keyFile": key}
    if way == "secrets":
        tls = {
            "caSecret": {"name": "redis", "key": "ca.crt"},
            "certificateSecret": {"name": "redis", "key": "tls.crt"},
            "keySecret": {"name": "redis", "key": "tls.key"},
        }
        for name, file in (("CA_CRT", ca), ("TLS_CRT", certificate), ("TLS_KEY", key)):
            monkeypatch.setenv(f"PLAUDIT_SECRET_REDIS_{name}", Path(file).read_text())
    monkeypatch.setenv("PLAUDIT_SECRET_REDIS_WORD", "word")
    password = {"passwordSecret": {"name": "redis", "key": "word"}}
    job = load_job(written(tmp_path, {"url": mutual.url, **password, "tls": tls}))
    address = external_redis(job, tmp_path)
    assert "word" not in repr(address)
    if way == "secrets":
        assert Path(address.tls.key_file).stat().st_mode & 0o777 == 0o600
    transport = await Transport.open(address, RUN)
    await transport.close()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return secure.Authority(tmp_path_factory.mktemp("tls") / "others").start()


@pytest.fixture(params=["authority", "system", "expired", "name", "no certificate", "other certificate", "file"])
def mistake(
    request: pytest.FixtureRequest, start_redis: StartRedis, authority: Any, others: Any, tmp_path: Path
) -> tuple[RedisAddress, str]:
    """An address with one thing wrong, and what is to be said of it."""
    ours = RedisTls(authority.ca)
    if request.param == "authority":
        return RedisAddress(start_redis("good"), "word", tls=RedisTls(others.ca)), "not of a trusted authority.*caFile"
    if request.param == "system":
        return RedisAddress(start_redis("good"), "word"), "not of a trusted authority.*PLAUDIT_REDIS_TLS_CA"
    if request.param == "expired":
        return RedisAddress(start_redis("expired", days=-1), "word", tls=ours), "has expired"
    if request.param == "name":
        url = start_redis("named", host="redis.example")
        return RedisAddress(url, "word", tls=ours), "for another name than localhost.*checkServerName"
    if request.param == "no certificate":
        url = start_redis("mutual", asks="yes")
        return RedisAddress(url, "word", tls=ours), "asks for a client's certificate.*certificateSecret"
    if request.param == "other certificate":
        certificate, key = others.sign("stranger", "stranger")
        url = start_redis("mutual", asks="yes")
        return RedisAddress(url, "word", tls=RedisTls(authority.ca, certificate, key)), "refuses the client's cert"
    missing = str(tmp_path / "nowhere.pem")
    return RedisAddress(start_redis("good"), "word", tls=RedisTls(missing)), r"nowhere\.pem holds no certificate"


async def test_each_mistake_has_one_clear_message(mistake: tuple[RedisAddress, str]) -> None:
    address, words = mistake
    with pytest.raises(RefusedError, match=words) as refused:
        await Transport.open(address, RUN)
    assert "word" not in str(refused.value)
    with pytest.raises(ServiceError, match=words):  # at once, though a service that is not there would be waited for
        async with asyncio.timeout(10), RewardClient(address, run=RUN, wait_s=60.0):
            pass


async def test_a_connection_that_was_cut_off_is_explained(mistake: tuple[RedisAddress, str]) -> None:
    """A server's alert can be lost when a command is sent at once."""
    address, words = mistake
    assert re.search(words, await address.tls_problem(ConnectionResetError()))


async def test_a_server_that_is_content_has_no_problem_of_tls(mutual: RedisAddress) -> None:
    assert await mutual.tls_problem(ConnectionResetError()) == ""


async def test_a_frozen_server_does_not_spoil_the_end_of_a_process(mutual: RedisAddress) -> None:
    client = mutual.client(timeout_s=5.0, retries=0)
    server = (await client.info("server"))["process_id"]
    os.kill(server, signal.SIGSTOP)
    try:
        await client.aclose(close_connection_pool=True)
    finally:
        os.kill(server, signal.SIGCONT)


async def test_a_name_that_is_not_checked_is_let_through(start_redis: StartRedis, authority: Any) -> None:
    url = start_redis("named", host="redis.example")
    address = RedisAddress(url, "word", tls=RedisTls(authority.ca, check_server_name=False))
    await (await Transport.open(address, RUN)).close()


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "plaudit_workers.scoring"],
        ["-m", "plaudit_metrics"],
        ["-m", "plaudit_workers.cli", "submit", "samples.jsonl", "--run", RUN],
        ["-m", "plaudit_workers.cli", "dead", "list", RUN],
        ["-m", "plaudit_workers.cli", "run", "job.yaml"],
    ],
    ids=["reward worker", "metrics", "submit", "dead", "run"],
)
def test_a_process_ends_with_code_2(start_redis: StartRedis, others: Any, tmp_path: Path, command: list[str]) -> None:
    address = RedisAddress(start_redis("good"), "word", tls=RedisTls(others.ca))
    (tmp_path / "samples.jsonl").write_text('{"response": "a"}\n')
    environment = {
        "PLAUDIT_JOB": str(written(tmp_path, {"url": address.url, "tls": {"caFile": others.ca}})),
        "PLAUDIT_RUN": RUN,
        "PLAUDIT_RUN_FOLDER": str(tmp_path),
        **address.environment(),
    }
    given = ["--redis", address.url] if RUN in command else []
    done = subprocess.run(
        [sys.executable, *command, *given], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_REFUSED
    assert (done.stdout + done.stderr).count("is not of a trusted authority") == 1


async def test_the_address_goes_through_the_environment(mutual: RedisAddress) -> None:
    for address in (mutual, replace(mutual, username="me", tls=RedisTls(check_server_name=False))):
        assert RedisAddress.from_environment(address.environment()) == address
