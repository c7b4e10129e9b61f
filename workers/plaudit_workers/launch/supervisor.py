"""Keep the processes of a run alive: start them by role, restart those that crash, stop them in order.

A process that dies more often than ``max_restarts`` without a step closing in between fails the job. Where they run
(``Processes``) is another matter: on a machine without GPUs they are forks of a child of this process
(``LocalProcesses``), on a Ray cluster and on a machine with GPUs actors (``ray_processes``). A laptop that trains on
its CPUs and a reward service need no cluster: Ray's own six processes took longer to start than the service, and more
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

import msgspec

from plaudit_sandbox.lifetime import start_module
from plaudit_wire.frames import Frames, frame, signal_name
from plaudit_wire.logs import get_logger
from plaudit_workers.launch.plan import ProcessPlan, Role
from plaudit_workers.launch.redis import free_port
from plaudit_workers.launch.role_process import RoleEnded, Signal, Start, ending_file, from_template, worker_name
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, RESTARTED, ProcessEnding

logger = get_logger(__name__)
_RESTART_PAUSE_S = 0.5
_GRACE_S = 30.0
_LAST_UPDATE_WITHIN_S = 600.0
"""A trainer that is asked to stop finishes its update and writes a checkpoint."""
_NO_LAST_CHECKPOINT = "the trainer did not stop in time; --resume goes on from its last checkpoint"
_MODULE = "plaudit_workers.launch.role_process"
_LOG_TAIL_BYTES = 256 << 10
_READ_BYTES = 1 << 16
_ERROR_LEVELS = ("error", "critical")
_PLACE = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A frame of a traceback."""


class RoleDiedError(Exception):
    """A process ended without saying how; the message does, as far as it is known."""


class Processes(Protocol):
    """Hold the processes of a run, each of which serves one role."""

    async def place(self, plans: Mapping[Role, list[ProcessPlan]]) -> None:
        """Find room for all. Raise ``RefusedError`` where there is none."""

    async def run(self, plan: ProcessPlan, environment: Mapping[str, str]) -> ProcessEnding:
        """Serve a role, with these variables too, until it ends. Raise ``RoleDiedError`` if its process dies."""

    async def is_back(self, plan: ProcessPlan) -> bool:
        """Return True once ``run`` can be called again for a process that died."""

    async def address(self, plan: ProcessPlan) -> tuple[str, int]:
        """Return the address of a process's machine and a free port on it, for the rendezvous of ranks."""

    async def stop(self, plan: ProcessPlan) -> None:
        """Ask a role to finish its work and to end."""

    async def kill(self, plan: ProcessPlan) -> None:
        """Kill a process, which will be run again."""

    def kill_all(self) -> None:
        """Kill every process."""

    async def close(self) -> None:
        """Kill what still runs, and give its room back."""


class LocalProcesses:
    """Hold the processes of a run: forks of one template, each in a session of its own; the kernel ends all with us.

    As a context, entered before the event loop runs, the template begins at once, beside other work.
    """

    def __init__(self) -> None:
        self._template: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._running: dict[str, asyncio.Future[RoleEnded]] = {}
        self._runs: set[asyncio.Task[ProcessEnding]] = set()
        self._reports: asyncio.Task[None] | None = None
        self._started: set[str] = set()
        self._wanted = True

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):  # the first process tries again, and reports it
            self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> socket.socket:
        """Start the template, unless it runs; return the connection to it. Raise ``OSError``."""
        if self._template is None:
            self._template = start_module(_MODULE, {**os.environ, "OMP_NUM_THREADS": "1"}, 1)
            self._template[1].setblocking(False)
        return self._template[1]

    def _end(self) -> None:
        """End the template; the kernel ends with it what still runs."""
        if self._template is not None:
            process, connection = self._template
            self._template = None
            connection.close()
            process.kill()
            process.wait()

    async def place(self, plans: Mapping[Role, list[ProcessPlan]]) -> None:
        """Do nothing: a machine's CPUs are shared, whatever is requested."""

    async def run(self, plan: ProcessPlan, environment: Mapping[str, str]) -> ProcessEnding:
        """Serve a role in a new process until it ends; a call that is cancelled leaves it running."""
        if not self._wanted:
            raise RoleDiedError("the run was stopped")
        running = asyncio.create_task(self._run(plan, environment))
        self._runs.add(running)
        running.add_done_callback(self._runs.discard)
        return await asyncio.shield(running)

    async def is_back(self, plan: ProcessPlan) -> bool:
        """Return True: ``run`` starts a new process."""
        return True

    async def address(self, plan: ProcessPlan) -> tuple[str, int]:
        """Return the loopback address and a free port."""
        return "127.0.0.1", free_port()

    async def stop(self, plan: ProcessPlan) -> None:
        """Ask a role to end, by SIGTERM."""
        self._signal(plan.name, signal.SIGTERM)

    async def kill(self, plan: ProcessPlan) -> None:
        """Kill a process with its process group, and wait for its end."""
        if (running := self._running.get(plan.name)) is not None:
            self._signal(plan.name, signal.SIGKILL)
            await asyncio.wait([running])

    def kill_all(self) -> None:
        """Kill every process; none is started any more."""
        self._wanted = False
        for name in self._running:
            self._signal(name, signal.SIGKILL)

    async def close(self) -> None:
        """Kill what still runs, and wait for its end."""
        self.kill_all()
        await asyncio.gather(*self._runs, return_exceptions=True)
        if self._reports is not None:
            self._reports.cancel()
        self._end()

    async def _run(self, plan: ProcessPlan, environment: Mapping[str, str]) -> ProcessEnding:
        said = ending_file(Path(plan.environment["PLAUDIT_LOG_FILE"]))
        said.unlink(missing_ok=True)
        variables = {**plan.environment, **environment, "PLAUDIT_WORKER": worker_name(plan.name)}
        if plan.name in self._started:
            variables[RESTARTED] = "1"
        self._started.add(plan.name)
        running = self._running[plan.name] = asyncio.get_running_loop().create_future()
        try:
            await self._start(plan, variables)
            ended = await running
        except OSError as error:
            raise RoleDiedError(f"it cannot be started: {error}") from error
        finally:
            del self._running[plan.name]
        if ended.problem:
            raise RoleDiedError(f"it cannot be started: {ended.problem}")
        with contextlib.suppress(OSError, msgspec.DecodeError):
            ending = msgspec.json.decode(said.read_bytes(), type=ProcessEnding)
            if ending.code != EXIT_CRASHED:
                return ending
        code = ended.code
        raise RoleDiedError(f"it ended by {signal_name(-code)}" if code < 0 else f"its exit code is {code}")

    async def _start(self, plan: ProcessPlan, variables: Mapping[str, str]) -> None:
        """Ask the template for a process, and write what it reads from standard input. Raise ``OSError``."""
        template = self._begin()
        if self._reports is None or self._reports.done():
            self._reports = asyncio.create_task(self._read_reports(template))
        reads, writes = os.pipe()
        pipe = open(writes, "wb")  # noqa: ASYNC230, SIM115 - the transport closes it
        try:
            socket.send_fds(template, [frame([Start(plan.name, plan.serve)])], [reads])
        except OSError:
            pipe.close()
            raise
        finally:
            os.close(reads)
        transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
        transport.write(msgspec.json.encode(variables))
        transport.close()

    async def _read_reports(self, connection: socket.socket) -> None:
        """Read how processes end, until the template does, and they with it."""
        loop, frames = asyncio.get_running_loop(), Frames()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(connection, _READ_BYTES):
                for ended in (each for body in frames.feed(data) for each in from_template.decode(body)):
                    if (running := self._running.get(ended.name)) is not None and not running.done():
                        running.set_result(ended)
        self._end()
        for running in self._running.values():
            if not running.done():
                running.set_exception(RoleDiedError("the process that it was forked from ended"))

    def _signal(self, name: str, number: int) -> None:
        if name in self._running and self._template is not None:
            with contextlib.suppress(OSError):  # the template has ended, and they with it
                self._template[1].send(frame([Signal(name, number)]))


def has_gpus() -> bool:
    """Return True if this machine has GPUs, and the environment does not hide them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


class Supervisor:
    """Run the processes of one run; each may crash ``max_restarts`` times without a step closing in between."""

    def __init__(
        self,
        plans: Mapping[Role, list[ProcessPlan]],
        processes: Processes,
        *,
        max_restarts: int,
        steps_closed: Callable[[], int],
    ) -> None:
        self._plans = plans
        self._processes = processes
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._tasks: list[asyncio.Task[ProcessEnding]] = []
        self._trainer: asyncio.Task[ProcessEnding] | None = None
        self._stopping = False
        self.restarts: dict[str, int] = {}

    async def start(self) -> None:
        """Place and start every process. Raise ``RefusedError`` where there is no room for them."""
        await self._processes.place(self._plans)
        if "trainer" in self._plans:
            self._trainer = asyncio.create_task(self._keep_ranks(self._plans["trainer"]))
        self._tasks = [
            asyncio.create_task(self._keep(plan), name=role)
            for role, plans in self._plans.items()
            for plan in plans
            if role != "trainer"
        ]

    async def until_done(self) -> ProcessEnding:
        """Wait until the trainer is done or any process ends the job. A scoring service, without one, never ends."""
        running = {*self._tasks} | ({self._trainer} if self._trainer else set())
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def stop_trainer(self) -> ProcessEnding:
        """Let the trainer finish its update and write a checkpoint."""
        if self._trainer is None:
            return ProcessEnding(EXIT_DONE)
        await self._stop_role("trainer")
        await asyncio.wait([self._trainer], timeout=_LAST_UPDATE_WITHIN_S)
        return self._trainer.result() if self._trainer.done() else ProcessEnding(EXIT_CRASHED, _NO_LAST_CHECKPOINT)

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop everything that still runs; ``at_once`` kills it, without a grace period to finish its work.

        The metrics service ends last: its page shows why the run has ended.
        """
        self._stopping = True
        waiting = [task for task in [self._trainer, *self._tasks] if task is not None and not task.done()]
        if at_once:
            self._processes.kill_all()
        else:
            for role in reversed([role for role in self._plans if role != "metrics"]):
                await self._stop_role(role)
            if others := [task for task in waiting if task.get_name() != "metrics"]:
                await asyncio.wait(others, timeout=_GRACE_S)
            await self._stop_role("metrics")
            if waiting:
                await asyncio.wait(waiting, timeout=_GRACE_S)
        for task in waiting:
            task.cancel()
        await self._processes.close()

    async def _stop_role(self, role: Role) -> None:
        self._stopping = True
        for plan in self._plans.get(role, []):
            await self._processes.stop(plan)

    async def _keep(self, plan: ProcessPlan) -> ProcessEnding:
        """Keep one process running; return only to end the job or after a stop."""
        budget = _RestartBudget(self._max_restarts, self._steps_closed)
        while True:
            try:
                ended = await self._processes.run(plan, plan.secrets)
            except RoleDiedError as error:
                ending = self._after_crash(plan.name, budget, error)
                if ending is not None:
                    return ending
                await self._back(plan)
                continue
            if self._stopping or ended.code in {EXIT_REFUSED, EXIT_FAILED}:
                return ProcessEnding(ended.code, f"{plan.name}: {ended.message}" if ended.message else "")
            logger.warning("process ended before the run did", process=plan.name, code=ended.code)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _keep_ranks(self, plans: list[ProcessPlan]) -> ProcessEnding:
        """Run the trainer's ranks together: when one dies, all are restarted, since they share collectives."""
        budget = _RestartBudget(self._max_restarts, self._steps_closed)
        while True:
            try:
                return await self._run_ranks(plans)
            except RoleDiedError as error:
                ending = self._after_crash("trainer", budget, error)
                if ending is not None:
                    return ending
            for plan in plans if len(plans) > 1 else ():
                await self._processes.kill(plan)
            for plan in plans:
                await self._back(plan)

    async def _run_ranks(self, plans: list[ProcessPlan]) -> ProcessEnding:
        host, port = await self._processes.address(plans[0])
        ranks = []
        for rank, plan in enumerate(plans):
            rendezvous = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(plans))}
            rendezvous |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
            ranks.append(asyncio.create_task(self._processes.run(plan, rendezvous)))
        try:
            for each in asyncio.as_completed(ranks):
                ended = await each
                if ended.code:  # the others would wait for this rank
                    return ProcessEnding(ended.code, f"trainer: {ended.message}")
        finally:
            for rank_task in ranks:
                rank_task.cancel()
        return ProcessEnding(EXIT_DONE)

    async def _back(self, plan: ProcessPlan) -> None:
        """Wait until a process that died can be run again."""
        while not self._stopping:
            await asyncio.sleep(_RESTART_PAUSE_S)
            if await self._processes.is_back(plan):
                return

    def _after_crash(self, name: str, budget: _RestartBudget, error: Exception) -> ProcessEnding | None:
        """Count a crash. Return the ending of the job when there were too many."""
        if self._stopping:
            return ProcessEnding(EXIT_DONE)
        self.restarts[name] = self.restarts.get(name, 0) + 1
        logger.warning("process died", process=name, restarts=self.restarts[name])
        if budget.spent():
            return ProcessEnding(
                EXIT_FAILED,
                f"{name} died {self._max_restarts + 1} times without a step closing in between "
                f"(lifecycle.failurePolicy.maxRestarts is {self._max_restarts}). "
                + (self._last_error(name) or f"Its log in logs/ names no error; {error}"),
            )
        return None

    def _last_error(self, name: str) -> str:
        """Return the newest error in the logs of a process, or of the trainer's ranks, as a sentence."""
        for plan in (plan for each in self._plans.values() for plan in each if name in {plan.name, plan.role}):
            log = Path(plan.environment["PLAUDIT_LOG_FILE"])
            if error := last_error(log):
                return f"Last error in {log}: {error}"
        return ""


class _RestartBudget:
    """Allow ``max_restarts`` crashes between two closed steps."""

    def __init__(self, max_restarts: int, steps_closed: Callable[[], int]) -> None:
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._crashes = 0
        self._steps_at_last_crash = -1

    def spent(self) -> bool:
        """Count one crash. Return True when it was one too many."""
        steps = self._steps_closed()
        if steps > self._steps_at_last_crash >= 0:
            self._crashes = 0
        self._steps_at_last_crash = steps
        self._crashes += 1
        return self._crashes > self._max_restarts


def last_error(log: Path) -> str:
    """Return the newest error in a log of JSON lines: the end of its traceback, or its message and error field.

    Empty when the last 256 KiB hold no error, or when there is no log. Lines of libraries, which are no JSON, do not
    count.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return ""
    return next((error for line in reversed(lines) if (error := _error(line))), "")


def _error(line: bytes) -> str:
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return ""
    if fields.get("level") not in _ERROR_LEVELS:
        return ""
    traceback = str(fields.get("traceback") or "").strip()
    if traceback:
        places = _PLACE.findall(traceback)
        where = f" ({Path(places[-1][0]).name}:{places[-1][1]} in {places[-1][2]})" if places else ""
        return traceback.splitlines()[-1] + where
    message, error = fields.get("message", ""), fields.get("error")
    return f"{message}: {error}" if error else str(message)
