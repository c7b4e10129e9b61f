"""``plaudit run job.yaml``: the job's processes on Ray, on this machine or on an existing cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console

from plaudit_wire.logs import get_logger
from plaudit_workers.deadletters.address import write_redis_address
from plaudit_workers.job.checks.support import ignored
from plaudit_workers.job.secrets import reward_secrets, secret_value
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.launch import placement
from plaudit_workers.launch.console import StepLines, print_summary
from plaudit_workers.launch.external_redis import external_redis
from plaudit_workers.launch.plan import RunContext, plan_processes, share_gpus
from plaudit_workers.launch.prepare import prepare
from plaudit_workers.launch.redis_server import RedisServer, free_port
from plaudit_workers.launch.service import stretches_of_uptime, tell_when_ready, write_address
from plaudit_workers.launch.supervisor import Supervisor
from plaudit_workers.process import EXIT_REFUSED, Ending, RefusedError
from plaudit_workers.stream.connection import RedisAddress, Transport

logger = get_logger(__name__)

EXIT_INTERRUPTED = 130
"""What shells report of a program that Ctrl-C ended."""

_POLL_S = 0.25


def run(arguments: argparse.Namespace) -> int:
    """Runs a job to its end; the exit codes are those of ``plaudit_workers.process``, and 130 after Ctrl-C."""
    console = Console(stderr=arguments.json)  # standard output then holds JSON only
    logging.getLogger("plaudit_workers").setLevel(logging.ERROR)
    try:
        job, folder = prepare(arguments)
        for problem in ignored(job):
            console.out(str(problem), style="yellow", highlight=False)
        ending = asyncio.run(_run(job, folder, arguments, console))
    except RefusedError as error:
        ending = Ending(EXIT_REFUSED, str(error))
    except asyncio.CancelledError:
        ending = Ending(EXIT_INTERRUPTED, "ended at once; the same command with --resume goes on")
    if ending.message:
        print(f"plaudit run: {ending.message}", file=sys.stderr)
    return ending.code


async def _run(job: RLJob, folder: Path, arguments: argparse.Namespace, console: Console) -> Ending:
    address: str | None = arguments.address
    stop = _stop_on_signals()
    secrets = {secret.variable: secret_value(secret, field) for field, secret in reward_secrets(job.spec.reward)}
    async with _redis(job, folder, on_cluster=address is not None) as redis_address:
        context = RunContext(
            folder.name,
            folder,
            redis_address,
            metrics_port=free_port(),
            reward_secrets=secrets,
            model_server_host="" if address else "127.0.0.1",
        )
        write_redis_address(folder, redis_address)
        plans = plan_processes(job, context, with_gpus=False)
        cpus = sum(plan.cpus for role_plans in plans.values() for plan in role_plans)
        await asyncio.to_thread(placement.connect, address, num_cpus=cpus)
        try:
            gpus = placement.gpus_available()
            if gpus:
                plans = plan_processes(job, context, with_gpus=True)
                plans = plans if address else share_gpus(plans, gpus)
            lines = StepLines(folder / "steps.jsonl", console, as_json=arguments.json)
            supervisor = Supervisor(
                plans,
                max_restarts=job.spec.lifecycle.failure_policy.max_restarts,
                steps_closed=(lambda: lines.closed) if job.spec.trains else stretches_of_uptime,
            )
            console.out(f"run {folder.name} · live at http://127.0.0.1:{context.metrics_port}/", highlight=False)
            if job.spec.trains:
                ending = await _supervise(supervisor, lines, stop)
            else:
                ending = await _serve(supervisor, context, console, stop)
        finally:
            await asyncio.to_thread(placement.disconnect)
    print_summary(console, folder, restarts=supervisor.restarts)
    if stop.is_set() and not ending.code and job.spec.trains:
        return Ending(EXIT_INTERRUPTED, "stopped; the same command with --resume goes on from the last checkpoint")
    return ending


async def _supervise(supervisor: Supervisor, lines: StepLines, stop: asyncio.Event) -> Ending:
    """Starts everything, prints steps until the run ends, stops everything whatever happens."""
    printing = asyncio.create_task(_print_steps(lines))
    try:
        await supervisor.start()
        return await supervisor.until_done(stop)
    finally:
        await supervisor.stop()
        printing.cancel()
        lines.print_new()


async def _serve(supervisor: Supervisor, context: RunContext, console: Console, stop: asyncio.Event) -> Ending:
    """Keeps a scoring service up until it is stopped: its natural end."""
    write_address(context.folder, context.redis)
    telling = asyncio.create_task(tell_when_ready(context.folder, context.redis, console))
    try:
        await supervisor.start()
        return await supervisor.until_done(stop)
    finally:
        telling.cancel()
        await supervisor.stop()


async def _print_steps(lines: StepLines) -> None:
    while True:
        lines.print_new()
        await asyncio.sleep(_POLL_S)


def _stop_on_signals() -> asyncio.Event:
    """An event that the first Ctrl-C or SIGTERM sets; a second one ends the run without a last checkpoint."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    run = asyncio.current_task()
    assert run is not None

    def on_signal() -> None:
        if stop.is_set():
            run.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


@contextlib.asynccontextmanager
async def _redis(job: RLJob, folder: Path, *, on_cluster: bool) -> AsyncIterator[RedisAddress]:
    """The run's Redis: the one that ``spec.transport.url`` names, or a private one that lives as long as the run."""
    transport = job.spec.transport
    if transport.url:
        address = external_redis(job, folder)
        await (await Transport.open(address, folder.name)).close()
        yield address
        return
    server = RedisServer(
        folder / "redis",
        host=_own_address() if on_cluster else "127.0.0.1",
        max_memory_bytes=transport.managed.max_memory_bytes,
        persistence=transport.managed.persistence,
    )
    await asyncio.to_thread(server.start)
    keeping = asyncio.create_task(_keep_running(server))
    try:
        yield RedisAddress(server.url, server.password)
    finally:
        keeping.cancel()
        await asyncio.to_thread(server.stop)


async def _keep_running(server: RedisServer) -> None:
    """Starts Redis again when it died; it loads its append-only file, and the ledger finds what that lacks."""
    while True:
        if not server.running():
            logger.warning("redis died; starting it again")
            await asyncio.to_thread(server.start)
        await asyncio.sleep(_POLL_S)


def _own_address() -> str:
    """The address under which other nodes of a cluster reach this machine."""
    import ray

    return str(ray.util.get_node_ip_address())
