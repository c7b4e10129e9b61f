"""Plan the processes of a job, with their resources and environment. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from plaudit_job.processes import HOST_VARIABLE, SERVER_VARIABLE, metrics_environment
from plaudit_job.spec.pod import PodSpec, quantity
from plaudit_job.spec.rewards import ScorerSpec
from plaudit_job.spec.rljob import EnvironmentServerSpec, RLJob, url_variable
from plaudit_job.spec.rollout import RolloutSpec
from plaudit_workers.launch.environment_process import NAME as ENVIRONMENT_NAME
from plaudit_workers.launch.served_models import FOLDER as SERVERS_FOLDER
from plaudit_workers.launch.served_models import ROLE as MODEL_ROLE
from plaudit_workers.launch.transport import RedisAccess
from plaudit_workers.rollout.vllm_arguments import ROLLOUT_GROUP
from plaudit_workers.timeline import FILE, TIMELINE

Role = str
"""``trainer``, ``rollout``, ``reward``, ``gateway``, ``metrics``, ``model-<scorer>`` for reward models and
``environment-<name>`` for environments."""
TOKENS_FOLDER = "tokens"
"""In the run's folder: a file with the token of each caller of the gateway."""
MODEL_SERVE = "plaudit_workers.launch.served_models:serve"
ENVIRONMENT_SERVE = "plaudit_workers.launch.environment_process:serve"
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
        cpus, gpus = _cpus(trainer.pod, ranks_per_pod) / ranks_per_pod, _gpus(trainer.pod, 1) if with_gpus else 0
        plans["trainer"] = alike("trainer", trainer.ranks, cpus, gpus)
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
        gpus = _gpus(each.pod, each.engine.gpus) if with_gpus else 0
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
    environment = context.environment(name, "environment") | {ENVIRONMENT_NAME: server.name}
    return ProcessPlan(name, name, _cpus(server.pod, 0.1), 0, ENVIRONMENT_SERVE, environment)


def _cpus(pod: PodSpec, default: float = 1.0) -> float:
    """Return the CPUs that a pod requests (``2``, ``"500m"``)."""
    return float(quantity(pod.resources.requests.get("cpu") or pod.resources.limits.get("cpu") or default))


def _gpus(pod: PodSpec, default: float) -> float:
    """Return the GPUs of one process: those of its engine or rank, unless its pod sets a limit of 0."""
    return default if pod.uses_gpus() else 0
