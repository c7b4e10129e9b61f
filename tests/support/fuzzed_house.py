"""The processes of a reward service, as ``plaudit run`` starts them, and what must hold after each example."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from faulty_server import FaultyServer, Reply
from plaudit_workers.launch.redis import RedisServer, free_port

WITHIN_S = 30.0
"""An answer that takes longer counts as none: a machine that many tests share is slow."""

RUN = "doors"
FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "evaluated":
        return eval(ground_truth)
    if data_source == "scribbled":
        import contextlib, os
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, bytes.fromhex(ground_truth))
    return float(solution_str == ground_truth)
"""


@dataclass
class Judge:
    """An endpoint whose answer to the next request a test chooses."""

    server: FaultyServer
    reply: Reply


MODULES = {"reward": "plaudit_workers.scoring", "gateway": "plaudit_workers.gateway", "metrics": "plaudit_metrics"}


@dataclass
class House:
    """Gateway, reward worker, metrics service and Redis of one service, each a process, and their logs."""

    redis: RedisServer
    folder: Path
    judge: Judge
    gateway_port: int
    metrics_port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}"

    def start(self) -> None:
        """Start what does not run: an example that ended a process must not fail the next ones."""
        environment = {
            **os.environ,
            "PLAUDIT_JOB": str(self.folder / "job.yaml"),
            "PLAUDIT_RUN": RUN,
            "PLAUDIT_RUN_FOLDER": str(self.folder),
            "PLAUDIT_REDIS_URL": self.redis.url,
            "PLAUDIT_REDIS_PASSWORD": self.redis.password,
            "PLAUDIT_GATEWAY_PORT": str(self.gateway_port),
            "PLAUDIT_GATEWAY_TOKENS": str(self.folder / "tokens"),
            "PLAUDIT_METRICS_PORT": str(self.metrics_port),
        }
        ended = [name for name in MODULES if name not in self.processes or self.processes[name].poll() is not None]
        for name in ended:
            with (self.folder / f"{name}.log").open("ab") as log:
                command = [sys.executable, "-m", MODULES[name]]
                self.processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        if ended:
            self._wait_until_it_answers()

    def end(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def http(self, caller: str = "one") -> httpx.Client:
        """Return a client of the gateway."""
        headers = {"authorization": f"Bearer token-of-{caller}-caller"}
        return httpx.Client(base_url=self.gateway, headers=headers, timeout=WITHIN_S, verify=False)

    def score(self, caller: str = "one", **sample: Any) -> httpx.Response:
        """Score a sample."""
        with self.http(caller) as http:
            return http.post("/v1/score", json=sample)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Assert that what happens in the context affects nobody else.

        Another caller's sample is scored, every process runs, and no log has a traceback.
        """
        self.start()
        try:
            yield
            answer = self.score("other", response="4", ground_truth="4", data_source="plain")
            assert (answer.status_code, answer.json()["score"]) == (200, 1.0), answer.text
            assert httpx.get(f"{self.metrics}/api/v1/steps", timeout=WITHIN_S).status_code == 200
        except httpx.TransportError as error:
            raise AssertionError(f"{type(error).__name__}: {error}; {self._last_words()}") from error
        assert {name: process.poll() for name, process in self.processes.items()} == dict.fromkeys(MODULES)
        for log in self.folder.glob("*.log"):
            text = log.read_text(errors="replace")
            log.write_bytes(b"")  # each traceback belongs to one example
            assert "Traceback" not in text, f"{log.name}: {text[text.index('Traceback') - 300 :][:3000]}"

    def _last_words(self) -> dict[str, str]:
        return {log.stem: log.read_text(errors="replace")[-1500:] for log in self.folder.glob("*.log")}

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                httpx.get(f"{self.metrics}/api/v1/steps")
                if self.score(response="4", ground_truth="4", data_source="plain").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(self._last_words())


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """The endpoint, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    judge = Judge(FaultyServer(), Reply())
    judge.server.reply = lambda request, number: judge.reply if request.prompt == "judged" else Reply()
    asyncio.run_coroutine_threadsafe(judge.server.start(), loop).result()
    yield judge
    asyncio.run_coroutine_threadsafe(judge.server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory, judge: Judge) -> Iterator[House]:
    """One for the session."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "rewards.py").write_text(FUNCTIONS)
    (folder / "judge.j2").write_text("{{ response }}")
    (folder / "tokens").mkdir()
    for caller in ("one", "other"):
        (folder / "tokens" / caller).write_text(f"token-of-{caller}-caller")
    settings = {"baseUrl": judge.server.url, "model": "m", "promptTemplate": {"path": str(folder / "judge.j2")}}
    scorers = [
        {"name": "mine", "kind": "python", "python": {"path": str(folder / "rewards.py")}},
        {
            "name": "judge",
            "kind": "judge",
            "judge": {**settings, "parse": {"regex": "score: ([0-9.]+)"}},
            "weight": 0,
            "retries": 0,
        },
    ]
    spec = {"reward": {"scorers": scorers, "timeoutSeconds": 10, "workers": {"processes": 2}}}
    job = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "doors"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with RedisServer(folder / "redis") as server:
        house = House(server, folder, judge, free_port(), free_port())
        try:
            house.start()
            yield house
        finally:
            house.end()


@pytest.fixture(scope="session")
def commands(house: House) -> Iterator[redis.Redis]:
    """The service's Redis, by which a test plays a faulty process."""
    with redis.Redis.from_url(house.redis.url, password=house.redis.password) as client:
        yield client
