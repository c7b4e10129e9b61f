"""Keep the processes of a run alive: start them by role, restart those that crash, stop them in order.

Each process is a Ray actor, whose process *is* the role; each role has a placement group (the resource pools of verl
#3152). When the process dies Ray makes a fresh one, and the supervisor calls ``run`` on it again. A process that dies
more often than ``max_restarts`` without a step closing in between fails the job.

Required of a cluster that ``--address`` names: one shared file system for the run's folder, models, data and code;
processes under the user that runs ``plaudit run`` (its files with passwords are readable by that user only); the same
version of Plaudit on every node; and, since whoever reaches Ray can run code in it, Ray's token authentication or a
network of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions
from ray._private import worker as ray_worker
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import configure_logs, get_logger
from plaudit_workers.launch.plan import ProcessPlan, Role
from plaudit_workers.launch.redis import free_port, write_private
from plaudit_workers.launch.served_models import own_address
from plaudit_workers.process import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REFUSED,
    RESTARTED,
    ProcessEnding,
    ProcessSettings,
    serve_guarded,
)
from plaudit_workers.timeline import STARTED, stamp, started_s

logger = get_logger(__name__)
_RESTART_PAUSE_S = 0.5
_GRACE_S = 30.0
_STOP_ANSWERED_WITHIN_S = 5.0
_LAST_UPDATE_WITHIN_S = 600.0
"""A trainer that is asked to stop finishes its update and writes a checkpoint."""
_NO_LAST_CHECKPOINT = "the trainer did not stop in time; --resume goes on from its last checkpoint"
_ROOM_WITHIN_S = 60.0
_NODE_ANSWERS_WITHIN_S = 60.0
_LOOPBACK = "127.0.0.1"
_LOG_TAIL_BYTES = 256 << 10
_ERROR_LEVELS = ("error", "critical")
_PLACE = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A frame of a traceback."""

# Ray runs its workers at the lowest priority by default; a rollout must not yield to every other program. Whoever
# reaches a Ray without a token runs code as this user, and some of its ports listen on every address of the machine.
_OF_A_LOCAL_RAY = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}


class Supervisor:
    """Run the processes of one run; each may crash ``max_restarts`` times without a step closing in between."""

    def __init__(
        self, plans: Mapping[Role, list[ProcessPlan]], *, max_restarts: int, steps_closed: Callable[[], int]
    ) -> None:
        self._plans = plans
        self._max_restarts = max_restarts
        self._steps_closed = steps_closed
        self._groups: list[Any] = []
        self._actors: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[ProcessEnding]] = []
        self._trainer: asyncio.Task[ProcessEnding] | None = None
        self._stopping = False
        self.restarts: dict[str, int] = {}

    async def start(self) -> None:
        """Place and start every process. Raise ``RefusedError`` when the cluster has no room."""
        self._groups = [
            placement_group([_bundle(plan) for plan in plans], strategy="PACK") for plans in self._plans.values()
        ]
        for (role, plans), group in zip(self._plans.items(), self._groups, strict=True):
            await _await_room(role, plans, group)
            for index, plan in enumerate(plans):
                self._actors[plan.name] = _start_actor(plan, group, index)
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
            for actor in self._actors.values():
                ray.kill(actor, no_restart=True)
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
        for group in self._groups:
            await asyncio.to_thread(remove_placement_group, group)  # kills what still runs in it

    async def _stop_role(self, role: Role) -> None:
        self._stopping = True
        for plan in self._plans.get(role, []):
            actor = self._actors.get(plan.name)
            if actor is not None:
                # An actor that does not answer, on a machine that is too busy, is ended with its placement group.
                with contextlib.suppress(ray.exceptions.RayActorError, TimeoutError):
                    async with asyncio.timeout(_STOP_ANSWERED_WITHIN_S):
                        await actor.stop.remote()

    async def _keep(self, plan: ProcessPlan) -> ProcessEnding:
        """Keep one process running; return only to end the job or after a stop."""
        budget = _RestartBudget(self._max_restarts, self._steps_closed)
        while True:
            try:
                code, message = await self._actors[plan.name].run.remote(dict(plan.secrets))
            except ray.exceptions.RayActorError as error:
                ending = self._after_crash(plan.name, budget, error)
                if ending is not None:
                    return ending
                await self._back(plan)
                continue
            if self._stopping or code in {EXIT_REFUSED, EXIT_FAILED}:
                return ProcessEnding(code, f"{plan.name}: {message}" if message else "")
            logger.warning("process ended before the run did", process=plan.name, code=code)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _keep_ranks(self, plans: list[ProcessPlan]) -> ProcessEnding:
        """Run the trainer's ranks together: when one dies, all are restarted, since they share collectives."""
        budget = _RestartBudget(self._max_restarts, self._steps_closed)
        while True:
            try:
                return await self._run_ranks(plans)
            except ray.exceptions.RayActorError as error:
                ending = self._after_crash("trainer", budget, error)
                if ending is not None:
                    return ending
            for plan in plans if len(plans) > 1 else ():
                with contextlib.suppress(ray.exceptions.RayActorError):
                    ray.kill(self._actors[plan.name], no_restart=False)
            for plan in plans:
                await self._back(plan)

    async def _run_ranks(self, plans: list[ProcessPlan]) -> ProcessEnding:
        host, port = await self._actors[plans[0].name].address.remote()
        ranks = []
        for rank, plan in enumerate(plans):
            rendezvous = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(plans))}
            rendezvous |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
            ranks.append(asyncio.wrap_future(self._actors[plan.name].run.remote(rendezvous).future()))
        try:
            for ended in asyncio.as_completed(ranks):
                code, message = await ended
                if code:  # the others would wait for this rank
                    return ProcessEnding(code, f"trainer: {message}")
        finally:
            for rank_task in ranks:
                rank_task.cancel()
        return ProcessEnding(EXIT_DONE)

    async def _back(self, plan: ProcessPlan) -> None:
        """Wait until Ray has restarted the process of a dead actor."""
        while not self._stopping:
            await asyncio.sleep(_RESTART_PAUSE_S)
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):
                await self._actors[plan.name].pid.remote()
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
                + (self._last_error(name) or f"Its log names no error; Ray reports {type(error).__name__}"),
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


class ProcessActor:
    """Run one role until it ends or is stopped.

    A crash ends the whole process, so that no broken state is reused: Ray starts a new one, and the supervisor calls
    ``run`` again.
    """

    def __init__(self, name: str, serve: str) -> None:
        # A new name at each start: others claim the work of a dead process, and nobody mistakes it for this one's.
        os.environ["PLAUDIT_WORKER"] = f"{name}-{uuid.uuid4().hex[:8]}"
        if ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed:
            os.environ[RESTARTED] = "1"
        stamp(STARTED, time_s=started_s())
        stamp("got its role from Ray")
        self._serve = serve
        self._settings = ProcessSettings.from_environment()
        self._stop = asyncio.Event()
        self._running: asyncio.Task[ProcessEnding] | None = None
        if self._settings.log_file is not None:
            _use_log(self._settings.log_file)
        configure_logs(self._settings.log_file, worker=self._settings.worker)

    async def run(self, extra_environment: dict[str, str]) -> tuple[int, str]:
        """Serve the role; return its exit code and the reason if it was refused or failed.

        A second call waits for the same role: the reply to the first may be lost while the process lives.
        """
        if self._running is None:
            os.environ.update(extra_environment)
            self._running = asyncio.create_task(self._run())
        ending = await asyncio.shield(self._running)
        return ending.code, ending.message

    async def _run(self) -> ProcessEnding:
        module, _, function = self._serve.partition(":")
        serve = getattr(importlib.import_module(module), function)
        stamp("imported")
        ending = await serve_guarded(serve, self._settings, self._stop)
        if ending.code == EXIT_CRASHED:
            os._exit(EXIT_CRASHED)
        return ending

    async def stop(self) -> None:
        """Ask the role to finish its work and to end, as SIGTERM asks a pod."""
        self._stop.set()

    async def address(self) -> tuple[str, int]:
        """Return this node's address and a free port on it, for the rendezvous of ranks."""
        host = own_address()
        return host, free_port(host)

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


async def serve_metrics(_: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve metrics under ``plaudit run``. The service is below workers in the import order, with its own settings."""
    from plaudit_metrics.service.serve import CannotServeError, serve
    from plaudit_metrics.service.settings import ServiceSettings

    try:
        await serve(ServiceSettings.from_environment(), stop)
    except CannotServeError as error:
        raise RefusedError(str(error)) from error
    return EXIT_DONE


def _use_log(log_file: Path) -> None:
    """Send the output of libraries to the log; write this process's id and name beside it, for whoever inspects it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    log_file.with_suffix(".pid").write_text(f"{os.getpid()}\n")
    log_file.with_suffix(".worker").write_text(os.environ["PLAUDIT_WORKER"] + "\n")


def connect_to_ray(address: str | None, *, num_cpus: float) -> None:
    """Join the cluster at ``address``, or start a Ray with a token on this machine, which ``disconnect`` ends.

    ``num_cpus`` is what all processes of the job request; a laptop with fewer cores shares them.
    """
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    # Of every process that dies, Ray says on standard output that its memory may be the cause. The supervisor says what
    # the process's log says.
    ray_worker.print_to_stdstream = lambda *_, **__: None
    if address is None:
        for name, value in _OF_A_LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        _keep_token_private(os.environ)
        Config.initialize("")  # Ray read its environment when it was imported
        _start(num_cpus=max(os.cpu_count() or 1, int(num_cpus) + 1), _node_ip_address=_LOOPBACK, **options)
        return
    options.pop("include_dashboard")
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise RefusedError(
            f"--address {address}: no Ray cluster responds there ({error}). Is 'ray start' running, and does "
            "~/.ray/auth_token or RAY_AUTH_TOKEN hold its token?"
        ) from error


def _keep_token_private(environment: Mapping[str, str]) -> None:
    """Write Ray's token before Ray does, which would let every user of the machine read it; close an older one."""
    if environment["RAY_AUTH_MODE"] != "token" or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys():
        return
    token = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # Ray says what is wrong with the folder
        if not token.exists():
            write_private(token, secrets.token_hex(32))
        token.parent.chmod(0o700)
        token.chmod(0o600)


def _start(**options: Any) -> None:
    """Start Ray; try a second time when a busy machine needed longer than the 30 s that Ray allows itself."""
    for again in (True, False):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if not again:
                raise RefusedError(
                    "Ray did not start on this machine, which had twice 30 s for it. Run again when its cores are less "
                    "busy, or start Ray yourself (ray start --head) and give --address auto"
                ) from error


def disconnect() -> None:
    """Leave the cluster; end it when ``connect`` started it."""
    ray.shutdown()


def gpus_available() -> float:
    """Return the number of GPUs in the cluster."""
    return float(ray.cluster_resources().get("GPU", 0))


def devices(count: int) -> list[str]:
    """Return the first GPUs of this machine, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (visible or [str(number) for number in range(count)])[:count]


async def _await_room(role: str, plans: Sequence[ProcessPlan], group: PlacementGroup) -> None:
    """Wait until a role has its room, for at most a minute."""
    deadline = time.monotonic() + _ROOM_WITHIN_S
    while time.monotonic() < deadline:
        if await asyncio.to_thread(group.wait, 1):
            return
    free = {kind: amount for kind, amount in ray.available_resources().items() if kind in {"CPU", "GPU"}}
    raise RefusedError(
        f"the Ray cluster has no room for role {role}: it needs {[_bundle(plan) for plan in plans]}, free is {free}. "
        "Lower the role's replicas or ranks, or add nodes"
    )


def _start_actor(plan: ProcessPlan, group: PlacementGroup, index: int) -> Any:
    """Start the actor of one process in its role's bundle ``index``; Ray restarts it when its process dies."""
    options = ray.remote(ProcessActor).options(
        num_cpus=plan.cpus,
        num_gpus=plan.gpus,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=8,
        runtime_env={"env_vars": dict(plan.environment)},
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index),
    )
    return options.remote(plan.name, plan.serve)


def _bundle(plan: ProcessPlan) -> dict[str, float]:
    return {"CPU": plan.cpus} | ({"GPU": plan.gpus} if plan.gpus else {})


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


def check_cluster(folder: Path) -> None:
    """Refuse a cluster if a node lacks the run's folder, cannot read its private files, or has another version."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = ray.remote(_node_problem).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
        asked[node["NodeManagerAddress"]] = options.remote(str(folder), version("plaudit-workers"))
    for address, reply in asked.items():
        try:
            problem = ray.get(reply, timeout=_NODE_ANSWERS_WITHIN_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            problem = f"did not respond: {error}"
        if problem:
            raise RefusedError(
                f"--address: node {address} {problem}. Every node needs plaudit-workers {version('plaudit-workers')}, "
                f"{folder} on a shared file system, and processes under the user of plaudit run"
            )


def _node_problem(folder: str, expected: str) -> str:
    """Return why this node cannot run processes of a run; empty when it can."""
    found = version("plaudit-workers")
    if found != expected:
        return f"has plaudit-workers {found}"
    if not Path(folder, "job.yaml").exists():
        return f"does not see {folder}"
    for file in Path(folder, "secrets").glob("*"):
        try:
            file.open("rb").close()
        except OSError as error:
            return f"cannot read {file}: {error.strerror}"
    return ""
