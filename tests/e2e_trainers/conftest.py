"""A reward service of real processes (Redis, a reward worker, a gateway), and programs of trainers that use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from trainer_environments import CACHE, python

from builders import job_document
from plaudit_workers.launch.redis import RedisServer, free_port

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "client"
TOKEN = "token-of-the-trainers"
RUN = "trainers"


class Service:
    """A reward service whose processes can be killed and started again.

    Args:
        redis: keeps its run.
        folder: of its files.
    """

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self._port = free_port()
        self._log = folder / "log"
        scorer = {"name": "right", "kind": "python", "python": {"path": str(HERE / "rewards.py")}}
        reward = {"scorers": [scorer], "workers": {"processes": 1}, "retries": 5}
        (folder / "job.yaml").write_text(yaml.safe_dump(job_document("trainers", reward=reward)))
        (folder / "tokens").mkdir()
        (folder / "tokens" / "trainer").write_text(TOKEN)
        self._environment = {
            **os.environ,
            "PLAUDIT_JOB": str(folder / "job.yaml"),
            "PLAUDIT_RUN": RUN,
            "PLAUDIT_RUN_FOLDER": str(folder),
            "PLAUDIT_REDIS_URL": redis.url,
            "PLAUDIT_REDIS_PASSWORD": redis.password,
            "PLAUDIT_GATEWAY_PORT": str(self._port),
            "PLAUDIT_GATEWAY_TOKENS": str(folder / "tokens"),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the gateway and a reward worker."""
        for module in ("gateway", "scoring"):
            command = [sys.executable, "-m", f"plaudit_workers.{module}"]
            with self._log.open("ab") as log:
                process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
            self._processes.append(process)

    def wait(self) -> None:
        """Wait until a sample could be scored."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        for _ in range(600):
            try:
                seen = httpx.get(f"{self.url}/v1/service", headers=headers, timeout=5).json()
                if seen["health"]["workers_ready"]:
                    return
            except (httpx.HTTPError, KeyError, ValueError):
                pass
            assert all(process.poll() is None for process in self._processes), self._log.read_text()[-3000:]
            time.sleep(0.1)
        raise AssertionError(self._log.read_text()[-3000:])

    def kill(self) -> None:
        """Kill the gateway and the reward worker."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()


@pytest.fixture(scope="session")
def service(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that scores by ``rewards.py``."""
    service = Service(redis_server, tmp_path_factory.mktemp("service"))
    service.start()
    service.wait()
    yield service
    service.kill()


class Trainer:
    """Programs that run in the environments of trainers.

    Args:
        service: which scores their samples.
        folder: for their output.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self._folder = folder

    def run(self, environment: str, program: str, *arguments: str, kill_after: int) -> dict[str, Any]:
        """Run a program; once it has reported this progress, kill the service and start it again.

        Args:
            environment: of the trainer; the test is skipped where it is not built.
            program: file in ``programs``.
            arguments: of the program.
            kill_after: progress at which the service is killed.
        """
        interpreter = python(environment)
        if interpreter is None:
            pytest.skip(f"the environment {environment} is not built in {CACHE}: make trainers-build")
        variables = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ},
            "PYTHONPATH": os.pathsep.join([str(CLIENT), str(HERE)]),
            "PLAUDIT_URL": self._service.url,
            "PLAUDIT_TOKEN": TOKEN,
            "PLAUDIT_TIMEOUT_SECONDS": "120",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NO_KEY": "none",
        }
        command = [str(interpreter), str(HERE / "programs" / program), *arguments]
        errors = self._folder / "errors"
        with (
            errors.open("wb") as file,
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=file, text=True, cwd=self._folder
            ) as process,
        ):
            last, killed = "", False
            assert process.stdout is not None
            for line in process.stdout:
                last = line
                if not killed and line.startswith("progress") and int(line.split()[1]) >= kill_after:
                    killed = True
                    self._service.kill()
                    self._service.start()
        assert process.returncode == 0, last + errors.read_text()[-3000:]
        assert killed, f"{program} ended before the service was killed"
        report: dict[str, Any] = json.loads(last)
        return report


@pytest.fixture
def trainer(service: Service, tmp_path: Path) -> Trainer:
    """Programs of trainers, served by ``service``."""
    return Trainer(service, tmp_path)
