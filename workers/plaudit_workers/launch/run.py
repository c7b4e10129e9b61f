"""``plaudit run job.yaml``: run the processes of a job on Ray, on this machine or on an existing cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rich.console import Console

from plaudit_wire.errors import RefusedError
from plaudit_workers.deadletters.address import write_redis_address
from plaudit_workers.job.checks.support import ignored
from plaudit_workers.job.secrets import reward_secrets, secret_value
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.launch import placement
from plaudit_workers.launch.gpu_shares import share_gpus
from plaudit_workers.launch.plan import LaunchSettings, ProcessPlan, Role, plan_processes
from plaudit_workers.launch.preflight.prepare import prepare
from plaudit_workers.launch.redis.access import RedisAccess
from plaudit_workers.launch.redis.server import free_port
from plaudit_workers.launch.redis.transport import run_redis
from plaudit_workers.launch.served_models.identity import own_address
from plaudit_workers.launch.service import (
    GatewayAddress,
    gateway_address,
    print_when_ready,
    stretches_of_uptime,
    write_address,
)
from plaudit_workers.launch.supervisor import Supervisor
from plaudit_workers.launch.terminal.console import StepLines, print_summary
from plaudit_workers.launch.terminal.interrupt import Interrupt
from plaudit_workers.launch.terminal.live import LiveMessages, print_live
from plaudit_workers.launch.terminal.waiting import reported_wait
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED, ProcessEnding
from plaudit_workers.rollout.engines.vllm_platform import is_cpu_build
from plaudit_workers.supervision import unless_stopped
from plaudit_workers.training.run.lineage import Lineage

EXIT_INTERRUPTED = 130
"""The exit code that shells use for a program that Ctrl-C ended."""

_PRINT_EVERY_S = 0.25
_RESUMABLE = "the same command with --resume continues from the last checkpoint"


def run(arguments: argparse.Namespace) -> int:
    """Run a job to its end; the exit codes are those of ``plaudit_workers.process``, and 130 after Ctrl-C."""
    console = Console(stderr=arguments.json)  # standard output then holds JSON only
    logging.getLogger("plaudit_workers").setLevel(logging.ERROR)
    try:
        prepared = prepare(arguments, console)
        if prepared is None:
            return EXIT_DONE
        job, folder = prepared
        for problem in ignored(job):
            console.out(str(problem), style="yellow", highlight=False)
        ending = asyncio.run(_Launch(job, folder, arguments, console).run())
    except RefusedError as error:
        ending = ProcessEnding(EXIT_REFUSED, str(error))
    except _RayNotUpError:
        # A thread still starts Ray and cannot be cancelled. Ray's processes end with this one.
        print("plaudit run: stopped before anything was started", file=sys.stderr)
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)
    except (asyncio.CancelledError, KeyboardInterrupt):
        ending = ProcessEnding(EXIT_INTERRUPTED, f"stopped at once; {_RESUMABLE}")
    if ending.message:
        print(f"plaudit run: {ending.message}", file=sys.stderr)
    return ending.code


_CPU_BUILD_NOTE = (
    "note: Ray has GPUs, but the installed vLLM is its CPU build, so rollouts generate on CPUs. "
    "`make install GPU=1` installs the GPU build"
)


class _RayNotUpError(Exception):
    """Report a Ctrl-C while Ray was starting."""


class _Launch:
    """Run a job once, from its Redis to its summary."""

    def __init__(self, job: RLJob, folder: Path, arguments: argparse.Namespace, console: Console) -> None:
        self._job = job
        self._folder = folder
        self._address: str | None = arguments.address
        self._console = console
        self._lines = StepLines(folder / "steps.jsonl", console, as_json=arguments.json)
        self._incarnation = Lineage.read(folder / "checkpoints").newest
        self._gateway = GatewayAddress() if job.spec.trains else gateway_address(folder, job.spec.reward.gateway)

    async def run(self) -> ProcessEnding:
        interrupt = Interrupt(self._console, saves=self._trainer_began)
        host = own_address() if self._address else "127.0.0.1"
        async with run_redis(self._job, self._folder, host=host) as redis:
            write_redis_address(self._folder, redis.admin)
            context = self._context(redis)
            async with self._ray(context, interrupt) as plans:
                supervisor = Supervisor(
                    plans,
                    max_restarts=self._job.spec.lifecycle.failure_policy.max_restarts,
                    steps_closed=(lambda: self._lines.closed) if self._job.spec.trains else stretches_of_uptime,
                )
                ending = await self._supervise(supervisor, context, plans, interrupt)
        print_summary(self._console, self._folder, restarts=supervisor.restarts)
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
    async def _ray(self, context: LaunchSettings, interrupt: Interrupt) -> AsyncIterator[dict[Role, list[ProcessPlan]]]:
        """Connect to Ray; yield the processes to start there."""
        plans = plan_processes(self._job, context, with_gpus=False)
        cpus = sum(plan.cpus for role_plans in plans.values() for plan in role_plans)
        with reported_wait(self._console, f"the Ray cluster at {self._address}" if self._address else "Ray to start"):
            connecting = _in_daemon_thread(lambda: placement.connect(self._address, num_cpus=cpus))
            if not await unless_stopped(interrupt.stop, connecting):
                raise _RayNotUpError
            interrupt.listen()
        try:
            if self._address:
                from plaudit_workers.launch.preflight.cluster_check import check_cluster

                with reported_wait(self._console, "the nodes of the Ray cluster"):
                    await asyncio.to_thread(check_cluster, self._folder)
            if gpus := placement.gpus_available():
                if self._job.spec.trains and self._job.spec.rollout.engine.kind == "vllm" and is_cpu_build():
                    self._console.out(_CPU_BUILD_NOTE, highlight=False)
                plans = plan_processes(self._job, context, with_gpus=True)
                if not self._address:
                    plans = share_gpus(plans, placement.devices(int(gpus)), in_turns=self._job.spec.takes_turns)
            yield plans
        finally:
            await asyncio.to_thread(placement.disconnect)

    async def _supervise(
        self,
        supervisor: Supervisor,
        context: LaunchSettings,
        plans: dict[Role, list[ProcessPlan]],
        interrupt: Interrupt,
    ) -> ProcessEnding:
        """Start everything, print what happens until the run ends, stop everything in any case."""
        url = f"http://127.0.0.1:{context.metrics_port}"
        self._console.out(f"run {self._folder.name} · live at {url}/", highlight=False)
        messages = LiveMessages([(role, plan.name) for role, each in plans.items() for plan in each])
        tasks = [asyncio.create_task(print_live(url, messages, self._console))]
        if self._job.spec.trains:
            tasks.append(asyncio.create_task(self._print_steps()))
        else:
            client = context.redis.of("client")
            write_address(self._folder, client, self._gateway)
            tasks.append(asyncio.create_task(print_when_ready(self._folder, client, self._gateway, self._console)))
        ending = ProcessEnding(EXIT_DONE)

        async def until_done() -> None:
            nonlocal ending
            with reported_wait(self._console, "room for the processes in Ray"):
                await supervisor.start()
            ending = await supervisor.until_done()

        try:
            if not await unless_stopped(interrupt.stop, until_done()) and not interrupt.at_once:
                ending = await supervisor.stop_trainer()
            return ending
        finally:
            await supervisor.stop(at_once=interrupt.at_once)
            for task in tasks:
                task.cancel()
            self._lines.print_new()

    async def _print_steps(self) -> None:
        while True:
            self._lines.print_new()
            await asyncio.sleep(_PRINT_EVERY_S)


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread that lasts as long as the program, whose end does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def target() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
            loop.call_soon_threadsafe(finish, error)
        threading.Event().wait()  # Linux ends Ray's processes with the thread that started them

    threading.Thread(target=target, daemon=True, name="starts Ray").start()
    await done
