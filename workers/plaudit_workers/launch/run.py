"""``plaudit run job.yaml``: run the processes of a job on this machine, or on an existing Ray cluster.

It prints a line for each step as ``steps.jsonl`` grows and a summary with the ledger at the end. For a job that only
scores it prints where the service is and how to submit to it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from plaudit_job.secrets import reward_secrets, secret_value
from plaudit_job.spec.rewards import GatewaySpec
from plaudit_metrics.sources.steps import RunEnding, read_steps, write_ending
from plaudit_reward.http import HttpClient, NoResponseError
from plaudit_wire.errors import EXIT_INTERRUPTED, CallTimeoutError, RefusedError
from plaudit_wire.printable import print_text
from plaudit_wire.redis import RedisAddress
from plaudit_workers.launch.code_checks import ignored
from plaudit_workers.launch.live import Interrupt, LiveMessages, RunConsole, print_live, reported_wait
from plaudit_workers.launch.plan import TOKENS_FOLDER, LaunchSettings, ProcessPlan, Role, plan_processes, share_gpus
from plaudit_workers.launch.preflight import Prepared, prepare
from plaudit_workers.launch.redis import free_port, is_free, write_private
from plaudit_workers.launch.served_models import own_address
from plaudit_workers.launch.supervisor import LocalProcesses, Processes, Supervisor, has_gpus
from plaudit_workers.launch.transport import SERVICE_FILE, RedisAccess, run_redis, write_redis_address
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED, ProcessEnding, in_daemon_thread, unless_stopped
from plaudit_workers.rollout.vllm_arguments import is_cpu_build
from plaudit_workers.service.client import ServiceError, connect
from plaudit_workers.timeline import FILE, FIRST_STEP, STARTED, read_timeline, stamp, started_s, timings
from plaudit_workers.training.state import Lineage

_SERVICE_READY_WITHIN_S = 600.0
_STRETCH_OF_UPTIME_S = 600.0
_COLUMNS = (
    ("step", "step", 6, "{:.0f}"),
    ("reward", "reward/mean", 8, "{:z.3f}"),
    ("no score", "reward_pipeline/masked_share", 10, "{:.1%}"),
    ("staleness", "reward_pipeline/staleness/mean", 10, "{:.2f}"),
    ("step s", "step_s", 8, "{:.2f}"),
    ("exposed reward s", "exposed_reward_s", 17, "{:.2f}"),
)
_PRINT_EVERY_S = 0.25
_PROCESS = "plaudit run"
_LOOK_AGAIN_S = 0.2
_RESPONSE_WITHIN_S = 5.0
_RESUMABLE = "the same command with --resume continues from the last checkpoint"
_NOT_STARTED = "stopped before anything was started"
_CPU_BUILD_NOTE = (
    "note: Ray has GPUs, but the installed vLLM is its CPU build, so rollouts generate on CPUs. "
    "`make install GPU=1` installs the GPU build"
)


def run(arguments: argparse.Namespace) -> int:
    """Run a job to its end; the exit codes are those of ``plaudit_workers.process``, and 130 after Ctrl-C."""
    console = RunConsole(stderr=arguments.json, highlight=False)  # standard output then holds JSON only
    logging.getLogger("plaudit_workers").setLevel(logging.ERROR)
    folder: Path | None = None
    try:
        with contextlib.ExitStack() as stack:
            local = None
            if not (arguments.address or has_gpus()):
                local = stack.enter_context(LocalProcesses())  # its template imports while the job is checked
            prepared = prepare(arguments, console, stack)
            if prepared is None:
                return EXIT_DONE
            folder = prepared.folder
            timeline = folder / FILE
            timeline.unlink(missing_ok=True)  # of the run that this one resumes
            stamp(STARTED, _PROCESS, file=timeline, time_s=started_s())
            stamp("checked the job", _PROCESS, file=timeline)
            write_ending(folder, None)
            for problem in ignored(prepared.job):
                console.out(str(problem), style="yellow")
            ending = asyncio.run(_Launch(prepared, arguments, console, local).run())
    except RefusedError as error:
        ending = ProcessEnding(EXIT_REFUSED, str(error))
    except _RayNotUpError:
        # A thread still starts Ray and cannot be cancelled. Ray's processes end with this one.
        print(f"plaudit run: {_NOT_STARTED}", file=sys.stderr)
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)
    except (asyncio.CancelledError, KeyboardInterrupt):
        ending = ProcessEnding(EXIT_INTERRUPTED, f"stopped at once; {_RESUMABLE}" if folder else _NOT_STARTED)
    if folder is not None:
        _record(folder, ending)
    if ending.message:
        print_text(f"plaudit run: {ending.message}", to_stderr=True)
    return ending.code


def _record(folder: Path, ending: ProcessEnding) -> None:
    with contextlib.suppress(OSError):  # a full disk was told already
        write_ending(folder, RunEnding(ending.code, ending.message, time.time()))


_Placed = tuple[dict[Role, list[ProcessPlan]], Processes]


class _RayNotUpError(Exception):
    """Report a Ctrl-C while Ray was starting."""


class _Launch:
    """Run a job once, from its Redis to its summary."""

    def __init__(
        self, prepared: Prepared, arguments: argparse.Namespace, console: Console, local: LocalProcesses | None
    ) -> None:
        self._local = local
        self._job, self._folder, self._lock = job, folder, _ = prepared
        self._address: str | None = arguments.address
        self._console = console
        self._lines = StepLines(folder / "steps.jsonl", console, as_json=arguments.json)
        self._incarnation = Lineage.read(folder / "checkpoints").newest
        self._timeline = folder / FILE
        self._timings: bool = arguments.timings
        self._gateway = GatewayAddress() if job.spec.trains else gateway_address(folder, job.spec.reward.gateway)

    async def run(self) -> ProcessEnding:
        interrupt = Interrupt(self._console, saves=self._trainer_began)
        host = own_address() if self._address else "127.0.0.1"
        async with run_redis(self._job, self._folder, host=host) as redis:
            write_redis_address(self._folder, redis.admin)
            self._stamp("started Redis")
            context = self._context(redis)
            async with self._placed(context, interrupt) as (plans, processes):
                supervisor = Supervisor(
                    plans,
                    processes,
                    max_restarts=self._job.spec.lifecycle.failure_policy.max_restarts,
                    steps_closed=(lambda: self._lines.closed) if self._job.spec.trains else stretches_of_uptime,
                )
                ending = await self._supervise(supervisor, context, plans, interrupt)
        print_summary(self._console, self._folder, restarts=supervisor.restarts)
        for line in timings(read_timeline(self._timeline)) if self._timings else ():
            self._console.out(line)
        if interrupt.stop.is_set() and not ending.code and self._job.spec.trains:
            return ProcessEnding(EXIT_INTERRUPTED, f"stopped; {_RESUMABLE}")
        return ending

    def _trainer_began(self) -> bool:
        """Return True once the trainer of this run has taken over: before that there is nothing to save."""
        return Lineage.read(self._folder / "checkpoints").newest > self._incarnation

    def _context(self, redis: RedisAccess) -> LaunchSettings:
        secrets = {
            secret.variable: secret_value(secret, field) for field, secret in reward_secrets(self._job.spec.reward)
        }
        if self._address and self._job.spec.environments:
            raise RefusedError(
                "spec.environments: plaudit run --address starts no environments. Start the servers yourself and give "
                "their URLs, or run the job without --address or on Kubernetes"
            )
        return LaunchSettings(
            self._folder.name,
            self._folder,
            redis,
            metrics_port=free_port(),
            reward_secrets=secrets,
            model_server_host="" if self._address else "127.0.0.1",
            gateway_port=self._gateway.port,
            environment_ports={server.name: free_port() for server in self._job.spec.environments},
        )

    @contextlib.asynccontextmanager
    async def _placed(self, context: LaunchSettings, interrupt: Interrupt) -> AsyncIterator[_Placed]:
        """Plan the processes for where they will run: on this machine, or on Ray where it has GPUs or is a cluster."""
        plans = plan_processes(self._job, context, with_gpus=False)
        if self._local is not None:
            yield plans, self._local
            return
        from plaudit_workers.launch import ray_processes as on_ray  # Ray takes half a second to import

        cpus = sum(plan.cpus for role_plans in plans.values() for plan in role_plans)
        with reported_wait(self._console, f"the Ray cluster at {self._address}" if self._address else "Ray to start"):
            # A thread that lasts: Linux ends Ray's processes with the thread that started them.
            connecting = in_daemon_thread(lambda: on_ray.connect_to_ray(self._address, num_cpus=cpus), lasts=True)
            if not await unless_stopped(interrupt.stop, connecting):
                raise _RayNotUpError
            interrupt.listen()
            self._stamp("started Ray")
        try:
            if self._address:
                with reported_wait(self._console, "the nodes of the Ray cluster"):
                    await asyncio.to_thread(on_ray.check_cluster, self._folder)
            if gpus := on_ray.gpus_available():
                if self._job.spec.trains and self._job.spec.rollout.engine.kind == "vllm" and is_cpu_build():
                    self._console.out(_CPU_BUILD_NOTE)
                plans = plan_processes(self._job, context, with_gpus=True)
                if not self._address:
                    plans = share_gpus(plans, on_ray.devices(int(gpus)), in_turns=self._job.spec.takes_turns)
            yield plans, on_ray.RayProcesses()
        finally:
            await asyncio.to_thread(on_ray.disconnect)

    async def _supervise(
        self,
        supervisor: Supervisor,
        context: LaunchSettings,
        plans: dict[Role, list[ProcessPlan]],
        interrupt: Interrupt,
    ) -> ProcessEnding:
        """Start everything, print what happens until the run ends, stop everything in any case."""
        url = f"http://127.0.0.1:{context.metrics_port}"
        self._lock.show(f"{url}/")
        self._console.out(f"run {self._folder.name} · live at {url}/")
        messages = LiveMessages([(role, plan.name) for role, each in plans.items() for plan in each])
        tasks = [asyncio.create_task(print_live(url, messages, self._console))]
        if self._job.spec.trains:
            tasks.append(asyncio.create_task(self._print_steps()))
        else:
            client = context.redis.of("client")
            tasks.append(asyncio.create_task(print_when_ready(self._folder, client, self._gateway, self._console)))
        ending = ProcessEnding(EXIT_DONE)

        async def until_done() -> None:
            nonlocal ending
            with reported_wait(self._console, "room for the processes"):
                await supervisor.start()
            self._stamp("asked for all processes")
            ending = await supervisor.until_done()

        try:
            if not await unless_stopped(interrupt.stop, until_done()) and not interrupt.at_once:
                ending = await supervisor.stop_trainer()
            return ending
        finally:
            if ending.code:
                _record(self._folder, ending)  # while the page is still served
            await supervisor.stop(at_once=interrupt.at_once)
            for task in tasks:
                task.cancel()
            self._lines.print_new()

    async def _print_steps(self) -> None:
        while True:
            closed = self._lines.closed
            self._lines.print_new()
            if self._lines.closed > closed == 0:
                self._stamp(FIRST_STEP)
            await asyncio.sleep(_PRINT_EVERY_S)

    def _stamp(self, stage: str) -> None:
        stamp(stage, _PROCESS, file=self._timeline)


class StepLines:
    """Print each newly closed step once: as a row of a table, or its line of ``steps.jsonl`` as it is (``as_json``)."""

    def __init__(self, steps_file: Path, console: Console, *, as_json: bool = False) -> None:
        self._file = steps_file
        self._console = console
        self._as_json = as_json
        self._offset = steps_file.stat().st_size if steps_file.exists() else 0
        self._header_printed = False
        self.closed = 0
        """Steps closed since this object was made."""

    def print_new(self) -> None:
        """Print what was added to the file since the last call; a torn last line waits for its rest."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self.closed += 1
                self._print(line)

    def _print(self, line: bytes) -> None:
        step = json.loads(line)
        if self._as_json:
            print(line.decode().strip(), flush=True)
            return
        if step["num_samples"]:  # step 0 is the validation before any training
            self._print_row(step)
        if rewards := validation_rewards(step):
            means = ", ".join(f"{source} {reward:z.3f}" for source, reward in sorted(rewards.items()))
            self._console.out(f"{step['step']:6.0f}  validation reward: {means}")

    def _print_row(self, step: dict[str, Any]) -> None:
        if not self._header_printed:
            self._header_printed = True
            header = "".join(title.rjust(width) for title, _, width, _ in _COLUMNS)
            self._console.out(header + "  waited for", style="bold")
        cells = (_cell(step.get(key), width, form) for _, key, width, form in _COLUMNS)
        self._console.out("".join(cells) + f"  {step.get('verdict', '')}{_failed_scores(step)}")


_PREFIX, _SUFFIX = "val/", "/reward"


def validation_rewards(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean validation reward by data source (which may hold slashes), from ``val/<data source>/reward``."""
    return {
        key.removeprefix(_PREFIX).removesuffix(_SUFFIX): value
        for key, value in figures.items()
        if key.startswith(_PREFIX) and key.endswith(_SUFFIX)
    }


_FAILED_SCORES = re.compile(r"reward_pipeline/scorer/(.+)/outcome/(?!scored|skipped)\w+")


def _failed_scores(step: Mapping[str, Any]) -> str:
    """Return how often each scorer failed in a step, also where the sample has a reward all the same."""
    counts: dict[str, int] = {}
    for key, count in step.items():
        if found := _FAILED_SCORES.fullmatch(key):
            counts[found[1]] = counts.get(found[1], 0) + int(count)
    return f" · failed: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}" if counts else ""


def _cell(value: float | None, width: int, form: str) -> str:
    return ("-" if value is None else form.format(value)).rjust(width)


def print_summary(console: Console, folder: Path, *, restarts: dict[str, int]) -> None:
    """Print the first and last rewards of the run, its ledger and the restarts of its processes."""
    steps = read_steps(folder / "steps.jsonl")
    rewards = [step.statistics["reward/mean"] for step in steps if "reward/mean" in step.statistics]
    if rewards:
        last = rewards[-10:]
        console.out(
            f"mean reward: {rewards[0]:z.3f} at the first step, {sum(last) / len(last):z.3f} over the last {len(last)}"
        )
    ledger_file = folder / "ledger.json"
    if ledger_file.exists():
        ledger = json.loads(ledger_file.read_text())
        counts = ", ".join(f"{name} {count}" for name, count in sorted(ledger.items()) if isinstance(count, int))
        console.out(f"ledger (groups): {counts}")
    if restarts:
        console.out("restarted: " + ", ".join(f"{name} {n}x" for name, n in restarts.items()))
    console.out(f"run folder: {folder}")


@dataclass(frozen=True)
class GatewayAddress:
    """Hold the HTTP address of a service and the token of its one caller; empty without a gateway."""

    url: str = ""
    token: str = field(default="", repr=False)

    @property
    def port(self) -> int:
        """Return the port of the address; 0 without one."""
        return urlsplit(self.url).port or 0


def gateway_address(folder: Path, spec: GatewaySpec) -> GatewayAddress:
    """Return the address of a run's gateway, and write its token into the run's folder.

    A run that is resumed keeps token and, if it is free, port, so that callers that wait find the service again.
    """
    if not spec.replicas:
        return GatewayAddress()
    earlier = _earlier_address(folder)
    port = spec.port or (earlier.port if earlier.port and is_free(earlier.port) else free_port())
    token = earlier.token or secrets.token_urlsafe(32)
    write_private(folder / TOKENS_FOLDER / "client", token)
    return GatewayAddress(f"http://127.0.0.1:{port}", token)


def write_address(folder: Path, redis: RedisAddress, gateway: GatewayAddress) -> None:
    """Write the addresses, token and password for clients into the run's folder."""
    content = {"run": folder.name, **asdict(gateway), "redis": asdict(redis)}
    write_private(folder / SERVICE_FILE, json.dumps(content))


async def write_when_answered(folder: Path, redis: RedisAddress, gateway: GatewayAddress) -> None:
    """Write the addresses once the gateway answers under them: who finds the file can use it."""
    async with HttpClient(max_connections=1, bearer_token=gateway.token) as client:
        while gateway.url:
            with contextlib.suppress(NoResponseError, CallTimeoutError):
                if (await client.get(f"{gateway.url}/v1/service", _RESPONSE_WITHIN_S)).status == HTTPStatus.OK:
                    break
            await asyncio.sleep(_LOOK_AGAIN_S)
    write_address(folder, redis, gateway)


async def print_when_ready(folder: Path, redis: RedisAddress, gateway: GatewayAddress, console: Console) -> None:
    """Write the addresses; print them and an example once a reward worker has opened all scorers."""
    await write_when_answered(folder, redis, gateway)
    try:
        transport, service = await connect(redis, run=folder.name, job="", wait_s=_SERVICE_READY_WITHIN_S)
    except ServiceError:
        return
    await transport.close()
    console.out(
        f"scoring service {service.job} is ready: {gateway.url or redis.url}, run {folder.name} (Ctrl-C ends it)\n"
        f"  {'URL and token' if gateway.url else 'address and password'}: {folder / SERVICE_FILE}\n"
        f"  plaudit submit --runs-folder {folder.parent} --run {folder.name} samples.jsonl -o scores.jsonl"
    )


def _earlier_address(folder: Path) -> GatewayAddress:
    try:
        written = msgspec.json.decode((folder / SERVICE_FILE).read_bytes(), type=GatewayAddress)
        return written if written.port >= 0 else GatewayAddress()  # raises for an address that has none
    except (OSError, ValueError, RecursionError):
        return GatewayAddress()


def stretches_of_uptime() -> int:
    """Count periods of 10 minutes. A service closes no steps, so its processes regain their restarts with each."""
    return int(time.monotonic() / _STRETCH_OF_UPTIME_S)
