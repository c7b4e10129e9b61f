"""Run the processes of a run on Ray: on a cluster, and on a machine with GPUs, which Ray divides.

Each process is a Ray actor, whose process *is* the role; each role has a placement group (the resource pools of verl
#3152). When the process dies Ray makes a fresh one, and the supervisor calls ``run`` on it again.

Required of a cluster that ``--address`` names: one shared file system for the run's folder, models, data and code;
processes under the user that runs ``plaudit run`` (its files with passwords are readable by that user only); the same
version of Plaudit on every node; and, since whoever reaches Ray can run code in it, Ray's token authentication or a
network of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray._private import worker as ray_worker
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.plan import ProcessPlan, Role
from plaudit_workers.launch.redis import free_port, write_private
from plaudit_workers.launch.role_process import begin, imported, worker_name
from plaudit_workers.launch.served_models import own_address
from plaudit_workers.launch.supervisor import RoleDiedError
from plaudit_workers.process import EXIT_CRASHED, RESTARTED, ProcessEnding, serve_guarded
from plaudit_workers.timeline import stamp

_STOP_ANSWERED_WITHIN_S = 5.0
_ROOM_WITHIN_S = 60.0
_NODE_ANSWERS_WITHIN_S = 60.0
_LOOPBACK = "127.0.0.1"

# Ray runs its workers at the lowest priority by default; a rollout must not yield to every other program. Whoever
# reaches a Ray without a token runs code as this user, and some of its ports listen on every address of the machine.
_OF_A_LOCAL_RAY = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}


class RayProcesses:
    """Hold the processes of a run as actors; ``connect_to_ray`` comes first."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._actors: dict[str, Any] = {}

    async def place(self, plans: Mapping[Role, list[ProcessPlan]]) -> None:
        """Start the actor of every process. Raise ``RefusedError`` if the cluster has no room within a minute."""
        self._groups = [placement_group([_bundle(plan) for plan in each], strategy="PACK") for each in plans.values()]
        for (role, of_role), group in zip(plans.items(), self._groups, strict=True):
            await _await_room(role, of_role, group)
            for index, plan in enumerate(of_role):
                self._actors[plan.name] = _start_actor(plan, group, index)

    async def run(self, plan: ProcessPlan, environment: Mapping[str, str]) -> ProcessEnding:
        """Serve a role until it ends; a call that is cancelled leaves it running."""
        try:
            code, message = await asyncio.wrap_future(self._actors[plan.name].run.remote(dict(environment)).future())
        except ray.exceptions.RayActorError as error:
            raise RoleDiedError(f"Ray reports {type(error).__name__}") from error
        return ProcessEnding(code, message)

    async def is_back(self, plan: ProcessPlan) -> bool:
        """Return True once Ray has restarted the process of a dead actor."""
        try:
            await self._actors[plan.name].pid.remote()
        except ray.exceptions.ActorUnavailableError:
            return False
        return True

    async def address(self, plan: ProcessPlan) -> tuple[str, int]:
        """Return the address of an actor's node and a free port on it."""
        try:
            host, port = await self._actors[plan.name].address.remote()
        except ray.exceptions.RayActorError as error:
            raise RoleDiedError(f"Ray reports {type(error).__name__}") from error
        return host, port

    async def stop(self, plan: ProcessPlan) -> None:
        """Ask a role to end. One that does not answer, on a machine that is too busy, is ended by ``close``."""
        if plan.name in self._actors:
            with contextlib.suppress(ray.exceptions.RayActorError, TimeoutError):
                async with asyncio.timeout(_STOP_ANSWERED_WITHIN_S):
                    await self._actors[plan.name].stop.remote()

    async def kill(self, plan: ProcessPlan) -> None:
        """Kill an actor's process; Ray restarts it."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.kill(self._actors[plan.name], no_restart=False)

    def kill_all(self) -> None:
        """Kill every actor for good."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)

    async def close(self) -> None:
        """Remove the placement groups, which kills what still runs in them."""
        for group in self._groups:
            await asyncio.to_thread(remove_placement_group, group)


class ProcessActor:
    """Run one role until it ends or is stopped.

    A crash ends the whole process, so that no broken state is reused: Ray starts a new one, and the supervisor calls
    ``run`` again.
    """

    def __init__(self, name: str, serve: str) -> None:
        os.environ["PLAUDIT_WORKER"] = worker_name(name)
        if ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed:
            os.environ[RESTARTED] = "1"
        self._settings = begin()
        stamp("got its role from Ray")
        self._serve = serve
        self._stop = asyncio.Event()
        self._running: asyncio.Task[ProcessEnding] | None = None

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
        ending = await serve_guarded(imported(self._serve), self._settings, self._stop)
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
