"""Plan the processes of a job, with their resources and environment, and share the GPUs of one machine. Pure.

Ray places processes that request one GPU by fractions of it. Engines of several GPUs cannot have fractions; if they
take turns with the trainer, devices are assigned here and hidden from Ray.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plaudit_job.processes import HOST_VARIABLE, SERVER_VARIABLE, metrics_environment
from plaudit_job.spec.pod import PodSpec, quantity
from plaudit_job.spec.rewards import ScorerSpec
from plaudit_job.spec.rljob import EnvironmentServerSpec, RLJob, url_variable
from plaudit_job.spec.rollout import RolloutSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.child_server import ENVIRONMENT_VARIABLE
from plaudit_workers.launch.served_models import FOLDER as SERVERS_FOLDER
from plaudit_workers.launch.served_models import ROLE as MODEL_ROLE
from plaudit_workers.launch.transport import RedisAccess
from plaudit_workers.process import GPU_SHARE
from plaudit_workers.rollout.vllm_arguments import ROLLOUT_GROUP
from plaudit_workers.timeline import FILE, TIMELINE

Role = str
"""``trainer``, ``rollout``, ``reward``, ``gateway``, ``metrics``, ``model-<scorer>`` for reward models and
``environment-<name>`` for environments."""
TOKENS_FOLDER = "tokens"
"""In the run's folder: a file with the token of each caller of the gateway."""
MODEL_SERVE = "plaudit_workers.launch.served_models:serve"
ENVIRONMENT_SERVE = "plaudit_workers.launch.child_server:serve_environment"
SERVE: dict[Role, str] = {
    "trainer": "plaudit_workers.training.worker:serve",
    "rollout": "plaudit_workers.rollout.worker:serve",
    "reward": "plaudit_workers.service.worker:serve",
    "gateway": "plaudit_workers.service.gateway:serve",
    "metrics": "plaudit_workers.launch.role_process:serve_metrics",
}
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Variables of a process without a GPU on a machine with GPUs: Ray does not hide them, and torch takes the first."""

# One thread a process: spinning OpenMP threads of several processes on few cores cost a factor of ten.
_QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}

_RANK_SHARE = 0.6
"""Share of a GPU that one of several ranks gets where GPUs are shared: more than half, so that no GPU gets two."""
_SHARE_IN_TURNS = 0.1
"""Share of a single trainer that takes turns with the others: so little that no GPU gets more of them than another,
whether or not the trainer is there."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_SMALLEST_FRACTION = 1e-4
"""Ray counts GPUs in this unit."""


@dataclass(frozen=True)
class ProcessPlan:
    """Describe one process, its resources and its environment. ``serve`` is ``module:function``."""

    name: str
    role: Role
    cpus: float
    gpus: float
    serve: str
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that are passed to the running process: Ray writes ``environment`` into logs that others can read."""


@dataclass(frozen=True)
class LaunchSettings:
    """Hold the settings that all processes of a run share."""

    run: str
    folder: Path
    redis: RedisAccess
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    model_server_host: str = "127.0.0.1"
    """Where reward model servers listen; empty: at the address of the node that each is placed on."""
    gateway_port: int = 0
    """Port of the HTTP front of a job that only scores."""
    environment_ports: Mapping[str, int] = field(default_factory=dict)
    """Ports of ``spec.environments`` by name."""
    reward_secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secrets of the job's scorers, by environment variable; only reward workers get them."""

    def environment(self, name: str, role: Role) -> dict[str, str]:
        """Return the variables that ``ProcessSettings.from_environment`` reads (an actor sets ``PLAUDIT_WORKER``)."""
        return {
            **_QUIET,
            "PLAUDIT_JOB": str(self.folder / "job.yaml"),
            "PLAUDIT_RUN": self.run,
            "PLAUDIT_RUN_FOLDER": str(self.folder),
            **self.redis.environment(role),
            TIMELINE: str(self.folder / FILE),
            "PLAUDIT_LOG_FILE": str(self.folder / "logs" / f"{name}.log"),
            "PLAUDIT_METRICS_HOST": self.metrics_host,
            "PLAUDIT_METRICS_PORT": str(self.metrics_port),
            **{url_variable(name): f"http://127.0.0.1:{port}" for name, port in self.environment_ports.items()},
        }


def plan_processes(job: RLJob, context: LaunchSettings, *, with_gpus: bool) -> dict[Role, list[ProcessPlan]]:
    """Return the processes of each role, in the order in which they are started."""
    spec = job.spec
    trainer, reward, own = spec.trainer, spec.reward, metrics_environment(job)
    own["PLAUDIT_MODEL_SERVERS"] = json.dumps(
        {each.name: [(context.folder / SERVERS_FOLDER / each.name).as_uri()] for each in reward.model_scorers}
    )

    def alike(role: Role, count: int, cpus: float, gpus: float = 0) -> list[ProcessPlan]:
        names = [f"{role}-{number}" for number in range(count)]
        return [
            ProcessPlan(each, role, cpus, gpus, SERVE[role], context.environment(each, role) | own) for each in names
        ]

    plans = {"metrics": alike("metrics", 1, _cpus(spec.metrics.pod, 0.1))}
    plans |= {f"environment-{each.name}": [_environment(each, context)] for each in spec.environments}
    plans |= {f"model-{each.name}": _servers(each, context, with_gpus=with_gpus) for each in reward.model_scorers}
    if reward.gateway.replicas and not spec.trains:
        gateway = alike("gateway", 1, _cpus(reward.gateway.pod))
        port, tokens = str(context.gateway_port), str(context.folder / TOKENS_FOLDER)
        settings = {"PLAUDIT_GATEWAY_PORT": port, "PLAUDIT_GATEWAY_TOKENS": tokens}
        plans["gateway"] = [replace(plan, environment={**plan.environment, **settings}) for plan in gateway]
    workers = alike("reward", reward.workers.replicas, _cpus(reward.workers.pod))
    plans["reward"] = [replace(plan, secrets=context.reward_secrets) for plan in workers]
    if spec.trains:
        plans["rollout"] = list(_rollouts(spec.rollout, context, own, with_gpus=with_gpus))
        ranks_per_pod = min(trainer.ranks, trainer.ranks_per_pod)
        cpus, gpus = _cpus(trainer.pod, ranks_per_pod) / ranks_per_pod, with_gpus and trainer.pod.uses_gpus()
        plans["trainer"] = alike("trainer", trainer.ranks, cpus, int(gpus))
    if not with_gpus:
        return plans
    return {
        role: [plan if plan.gpus else replace(plan, environment={**plan.environment, **_NO_GPUS}) for plan in each]
        for role, each in plans.items()
    }


def _rollouts(
    rollout: RolloutSpec, context: LaunchSettings, own: Mapping[str, str], *, with_gpus: bool
) -> Iterator[ProcessPlan]:
    """Plan the rollout workers of each group; a replica is one process, however many pods it has on Kubernetes."""
    groups = [(group, each) for group, each in rollout.by_group.items() for _ in range(each.replicas)]
    for number, (group, each) in enumerate(groups):
        name, cpus = f"rollout-{number}", _cpus(each.pod)
        gpus = each.engine.gpus if with_gpus and each.pod.uses_gpus() else 0
        environment = {**context.environment(name, "rollout"), **own} | ({ROLLOUT_GROUP: group} if group else {})
        yield ProcessPlan(name, "rollout", cpus, gpus, SERVE["rollout"], environment)


def _servers(scorer: ScorerSpec, context: LaunchSettings, *, with_gpus: bool) -> list[ProcessPlan]:
    """Plan the servers of a model: their role has a placement group of its own, as a resource pool in verl."""
    assert scorer.served is not None
    role, pod = f"model-{scorer.name}", scorer.served.pod
    cpus = _cpus(pod)
    gpus = float(pod.stated_gpus() or 1) if with_gpus and pod.uses_gpus() else 0
    plans = []
    for number in range(scorer.served.replicas):
        own = {
            SERVER_VARIABLE: f"{scorer.name}/{number}",
            HOST_VARIABLE: context.model_server_host,
            "OMP_NUM_THREADS": str(max(1, int(cpus))),
        }
        name = f"{role}-{number}"
        redis_user = MODEL_ROLE if scorer.served.sleep_during_updates else role
        plans.append(ProcessPlan(name, role, cpus, gpus, MODEL_SERVE, context.environment(name, redis_user) | own))
    return plans


def _environment(server: EnvironmentServerSpec, context: LaunchSettings) -> ProcessPlan:
    name = f"environment-{server.name}"
    environment = context.environment(name, "environment") | {ENVIRONMENT_VARIABLE: server.name}
    return ProcessPlan(name, name, _cpus(server.pod, 0.1), 0, ENVIRONMENT_SERVE, environment)


def _cpus(pod: PodSpec, default: float = 1.0) -> float:
    """Return the CPUs that a pod requests (``2``, ``"500m"``)."""
    return float(quantity(pod.resources.requests.get("cpu") or pod.resources.limits.get("cpu") or default))


def share_gpus(
    plans: dict[Role, list[ProcessPlan]], devices: Sequence[str], *, in_turns: bool = False
) -> dict[Role, list[ProcessPlan]]:
    """Let processes share the GPUs of one machine that has fewer than they request.

    On a cluster nothing is shared (Ray then waits for room). Each process that requests one GPU gets 1 ÷ n of it, n =
    processes ÷ GPUs rounded up: any other fraction leaves pieces that no process fits in. Of several ranks no two share
    a GPU, which NCCL refuses. Engines of several GPUs share them in turns only.
    With ``in_turns`` others free their memory while the trainer updates (``sleepDuringUpdates``), so they divide the
    whole of it; the trainer's share then only finds it a place.
    """
    available = len(devices)
    sharing = [plan for role_plans in plans.values() for plan in role_plans if plan.gpus]
    several = any(plan.gpus > 1 for plan in sharing)
    if sum(plan.gpus for plan in sharing) <= available or (several and not in_turns):
        return plans
    ranks = sum(plan.role == "trainer" for plan in sharing)
    if ranks > available:
        raise RefusedError(
            f"spec.trainer.ranks is {ranks}, but this machine has {available} GPUs and ranks cannot share one. "
            f"Set ranks to {max(1, available)}, or set nvidia.com/gpu: 0 in trainer.pod.resources.limits"
        )
    if several:
        return _assigned(plans, devices)
    in_turns = in_turns and 0 < ranks < len(sharing)
    if ranks > 1 or in_turns:
        of_rank = _RANK_SHARE if ranks > 1 else _SHARE_IN_TURNS
        others = _fraction(1 - of_rank, len(sharing) - ranks, available)
    else:
        of_rank = others = _fraction(1.0, len(sharing), available)
    memory = _fraction(1.0, len(sharing) - ranks, available) if in_turns else others
    return {
        role: [_shared(plan, of_rank, of_rank) if role == "trainer" else _shared(plan, others, memory) for plan in each]
        for role, each in plans.items()
    }


def _assigned(plans: dict[Role, list[ProcessPlan]], devices: Sequence[str]) -> dict[Role, list[ProcessPlan]]:
    """Give rank i the device i, and every other process as many as it requests, one behind the other."""
    chosen: dict[str, Sequence[str]] = {}
    place = 0
    for role, each in plans.items():
        for number, plan in enumerate(each):
            size = math.ceil(plan.gpus)
            if size > len(devices):
                raise RefusedError(
                    f"{plan.name} needs {size} GPUs, but this machine has {len(devices)}. Lower tensorParallelSize"
                )
            if role == "trainer":
                chosen[plan.name] = devices[number : number + 1] if size else ()
            elif size:
                place = 0 if place + size > len(devices) else place
                chosen[plan.name] = devices[place : place + size]
                place += size
    others = Counter(device for name, own in chosen.items() if not name.startswith("trainer") for device in own)
    return {role: [_on(plan, chosen.get(plan.name, ()), others) for plan in each] for role, each in plans.items()}


def _on(plan: ProcessPlan, own: Sequence[str], others: Mapping[str, int]) -> ProcessPlan:
    """Return the plan on these devices; processes other than the trainer divide the memory of each."""
    if not own:
        return plan
    share = 1 / max(1, *(others[device] for device in own))
    variables = {name: ",".join(own) for name in _VISIBLE}
    return replace(plan, gpus=0, environment={**plan.environment, **variables, GPU_SHARE: f"{share:.4f}"})


def _fraction(whole: float, processes: int, available: float) -> float:
    """Return a share of each GPU, divided among its processes and rounded down to Ray's unit."""
    on_each = math.ceil(processes / available)
    return math.floor(whole / on_each / _SMALLEST_FRACTION + _SMALLEST_FRACTION) * _SMALLEST_FRACTION


def _shared(plan: ProcessPlan, share: float, memory: float) -> ProcessPlan:
    if not plan.gpus:
        return plan
    return replace(plan, gpus=round(share, 4), environment={**plan.environment, GPU_SHARE: f"{memory:.4f}"})
