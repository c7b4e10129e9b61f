"""Builders of records, a Prometheus for the session, and a real run that it has scraped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from faulty_server import FaultyServer
from otlp_receiver import Receiver
from plaudit_job.spec.rewards import RewardSpec
from plaudit_metrics.generate import yaml_of
from plaudit_metrics.monitoring.alerts import alert_rules, recording_rules
from plaudit_metrics.monitoring.rules import THRESHOLDS, Windows
from plaudit_metrics.service.serve import serve
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_wire.messages import Announcement, PolicyVersion, Prompt
from plaudit_wire.records import (
    CallRecord,
    EngineStatus,
    SandboxRecord,
)
from plaudit_wire.redis import RedisAddress
from plaudit_workers.agents.messages import Trajectory
from plaudit_workers.launch.redis import RedisServer, free_port
from plaudit_workers.rollout.agents.agent import Generate, MachineCounts, SingleTurn
from plaudit_workers.rollout.scripted import ScriptedEngine
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.service.worker import ScoringOptions, ScoringWorker
from plaudit_workers.stream.consumer import ConsumerOptions
from plaudit_workers.stream.groups import Group
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.scripted import ScriptedBackend
from simulated_run import Simulation, make_plan

_VALUES = THRESHOLDS | dict.fromkeys(("toolSlowSeconds", "sandboxSlowSeconds", "sandboxWaitSeconds"), 0.3)
"""A tool that takes a minute would take a test as long."""


class Prometheus:
    """A real Prometheus that evaluates the committed rules with every window shortened 300 times.

    Args:
        folder: its configuration and data.
        program: its path.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self.windows = Windows(scale=1 / 300, least_s=2)
        (folder / "rules.yaml").write_text(yaml_of(recording_rules(self.windows)))
        (folder / "alerts.yaml").write_text(yaml_of(alert_rules("run", self.windows, _VALUES)))
        (folder / "targets").mkdir()
        (folder / "prometheus.yaml").write_text(
            "global: {scrape_interval: 250ms, evaluation_interval: 250ms}\n"
            "rule_files: [rules.yaml, alerts.yaml]\n"
            "scrape_configs: [{job_name: plaudit, file_sd_configs: [{files: [targets/*.json]}]}]\n"
        )
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._targets = folder / "targets"
        self._http = httpx.Client(base_url=self.address, timeout=30)
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def scrape(self, port: int, **labels: str) -> None:
        """Scrapes a port from now on; its series carry the labels."""
        target = self._targets / f"{port}.json.new"
        target.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": labels}]))
        target.rename(target.with_suffix(""))

    @contextlib.contextmanager
    def scraping(self, registry: CollectorRegistry, **labels: str) -> Iterator[None]:
        """Serves a registry and scrapes it while the context lasts; the port stays a target."""
        server, thread = start_http_server(port=0, addr="127.0.0.1", registry=registry)
        self.scrape(server.server_port, **labels)
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def query(self, expression: str, time: float | None = None) -> list[dict[str, Any]]:
        """What an instant query returns; nothing while Prometheus is not up yet."""
        given = {"query": expression} | ({} if time is None else {"time": str(time)})
        try:
            response = self._http.get("/api/v1/query", params=given)
        except httpx.TransportError:
            return []
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it listens, and is not ready
            return []
        answer = response.json()
        assert answer["status"] == "success", answer
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def firing(self, run: str) -> set[str]:
        """The names of a run's alerts that fire now."""
        found = self.query(f'ALERTS{{alertstate="firing", run="{run}"}}')
        return {alert["metric"]["alertname"] for alert in found}

    def suspend(self) -> None:
        """Stops it where it is: it evaluates all rules four times a second, which takes 7 % of a core."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it continue."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it."""
        self.resume()
        self._process.terminate()
        self._process.wait()
        self._http.close()


_prometheus: list[Prometheus] = []
"""That of the session, once a test has asked for it."""


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One for the session; runs keep apart by the label ``run``."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    _prometheus.append(Prometheus(tmp_path_factory.mktemp("prometheus"), program))
    yield _prometheus[0]
    _prometheus.pop().close()


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return program


@pytest.fixture(scope="module", autouse=True)
def prometheus_runs_where_it_is_used(request: pytest.FixtureRequest) -> Iterator[None]:
    """Suspends the Prometheus of the session while files of tests run that ask it nothing themselves.

    Its scrapes, four times a second, take a tenth of a core in this process, where the observed run's service lives.
    """
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    if any("prometheus" in item._fixtureinfo.argnames for item in here):
        for server in _prometheus:
            server.resume()
    yield
    for server in _prometheus:
        server.suspend()


@dataclass(frozen=True)
class ObservedRun:
    """A real run that is over: trainer, rollout, reward worker, metrics service and Redis were real."""

    name: str
    folder: Path
    num_steps: int
    metrics: str
    """Address of the metrics service, which is still up."""
    spans: list[Any]
    """Sent by the metrics service to a collector."""


@pytest.fixture(scope="session")
def observed_run(
    redis_server: RedisServer,
    prometheus: Prometheus,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ObservedRun]:
    """A run of a few steps, some of whose samples cannot be scored, scraped by Prometheus from its beginning."""
    folder = tmp_path_factory.mktemp("observed") / "run"
    prometheus.resume()  # another module may have suspended it: a fixture of the session begins before the module's
    with Receiver() as receiver:
        running = _RunInThread(redis_server, prometheus, folder, receiver)
        yield running.start()
        running.stop()


class _ProbingPolicy(ScriptedBackend):
    """Writes the probe beside its weights, as policies with a model do."""

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Report figures of a model's update too."""
        compared = {"actor/logprob_mismatch": 0.001, "actor/logprob_mismatch_limit": 0.05}
        return super().update(groups) | compared | {"actor/skipped_updates": 0.0}

    def publish(self, version: PolicyVersion) -> Announcement:
        announcement = super().publish(version)
        (Path(announcement.path) / "probe.json").write_text(json.dumps({"ids": [1, 2, 3], "logprobs": [-1.0, -2.0]}))
        return announcement


class _ComputingEngine(ScriptedEngine):
    """Answers the probe, as engines with a model do."""

    async def probe(self, ids: Sequence[int]) -> list[float] | None:
        return [-1.0, -2.001]

    def status(self) -> EngineStatus:
        return msgspec.structs.replace(super().status(), kv_cache_share=0.5, first_token_s=0.01)


class _SearchingAgent(SingleTurn):
    """Calls a tool once after its turn; the tool itself is not run, and there is no machine."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        trajectory = await super().run(prompt, generate)
        trajectory.add_calls([CallRecord("search", "ok", started_s=0.001, call_s=0.002)])
        trajectory.sandbox = SandboxRecord(start_s=0.001, claim_s=0.001, exec_s=0.001, num_commands=1)
        return trajectory


class _RunInThread:
    """Its own event loop in a thread: fixtures of the session outlive the loop of a test."""

    num_steps = 5

    def __init__(self, server: RedisServer, prometheus: Prometheus, folder: Path, receiver: Receiver) -> None:
        self._server = server
        self._receiver = receiver
        self._prometheus = prometheus
        self._folder = folder
        self._settings = ServiceSettings(
            "observed",
            RedisAddress(server.url, server.password),
            port=free_port(),
            job="observed",
            schedule="one-step-off-policy",
            max_staleness=1,
            traces_endpoint=receiver.address,
            traces_share=1.0,
            model="tiny",
        )
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> ObservedRun:
        self._thread.start()
        assert self._over.wait(280)
        if self._error is not None:
            raise self._error
        address = f"http://127.0.0.1:{self._settings.port}"
        return ObservedRun(self._settings.run, self._folder, self.num_steps, address, self._receiver.spans)

    def stop(self) -> None:
        self._stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._observed())
        except BaseException as error:  # told by ``start``
            self._error = error
        finally:
            self._over.set()

    async def _observed(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        async with self._service(stop):
            await self._train()
            await self._scraped(f"plaudit_step == {self.num_steps}")
            for reported_last in ("plaudit_judge_requests_total", "plaudit_score_cache_reads_total"):
                await self._scraped(f"{reported_last} > 0")
            self._over.set()
            await stop.wait()

    @contextlib.asynccontextmanager
    async def _service(self, stop: asyncio.Event) -> AsyncIterator[None]:
        serving = asyncio.create_task(serve(self._settings, stop))
        self._prometheus.scrape(self._settings.port, run=self._settings.run)
        try:
            await self._scraped("up == 1")
            yield
        finally:
            stop.set()
            await serving

    async def _train(self) -> None:
        simulation = Simulation(self._server, self._settings.run, self._folder)
        simulation.engine_class, simulation.policy_class = _ComputingEngine, _ProbingPolicy
        simulation.agent_class, simulation.machines = _SearchingAgent, MachineCounts()
        simulation.broken = {2, 9}
        async with simulation.workers(reward_workers=0), self._judging():
            done, _ = await simulation.train(make_plan(steps=self.num_steps, staleness=1))
        assert done

    @contextlib.asynccontextmanager
    async def _judging(self) -> AsyncIterator[None]:
        """A reward worker that runs a function and asks a judge, until the context ends."""
        judge = FaultyServer()
        await judge.start()
        address = RedisAddress(self._server.url, self._server.password)
        transport = await Transport.open(address, self._settings.run)
        (self._folder / "judge.j2").write_text("How good is {{ response }}?")
        scorers = [
            {"name": "mine", "kind": "python", "python": {"path": str(self._folder / "rewards.py")}, "cache": {}},
            {
                "name": "big",
                "kind": "judge",
                "judge": {
                    "baseUrl": judge.url,
                    "model": "big",
                    "promptTemplate": {"path": str(self._folder / "judge.j2")},
                    "parse": {"regex": "score: ([0-9.]+)"},
                },
                "limits": {"concurrency": 2},
            },
        ]
        reward = RewardSpec.model_validate({"scorers": scorers}, by_alias=True, by_name=False)
        pipeline = await build_pipeline(
            reward, "reward-0", BuildContext(reward, "reward-0", run=self._settings.run, redis=address)
        )
        options = ScoringOptions(drain_grace_s=0.5, consumer=ConsumerOptions(block_s=0.1))
        stop = asyncio.Event()
        working = asyncio.create_task(ScoringWorker("reward-0", transport, pipeline, options).run(stop))
        try:
            yield
        finally:
            stop.set()
            await working
            await transport.close()
            await judge.stop()

    async def _scraped(self, expression: str) -> None:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(self._prometheus.query, f"{expression} and on(run) up{{run='observed'}}"):
                await asyncio.sleep(0.1)
