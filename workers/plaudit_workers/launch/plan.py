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
from plaudit_workers.launch.served_models import FOLDER
from plaudit_workers.launch.served_models import ROLE as MODEL_ROLE
from plaudit_workers.launch.transport import RedisAccess
from plaudit_workers.rollout.vllm_arguments import ROLLOUT_GROUP

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
    "metrics": "plaudit_workers.launch.supervisor:serve_metrics",
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
            "PLAUDIT_LOG_FILE": str(self.folder / "logs" / f"{name}.log"),
            "PLAUDIT_METRICS_HOST": self.metrics_host,
            "PLAUDIT_METRICS_PORT": str(self.metrics_port),
            **{url_variable(name): f"http://127.0.0.1:{port}" for name, port in self.environment_ports.items()},
        }


def plan_processes(job: RLJob, context: LaunchSettings, *, with_gpus: bool) -> dict[Role, list[ProcessPlan]]:
    """Return the processes of each role, in the order in which they are started."""
    spec = job.spec
    ranks_per_pod = min(spec.trainer.ranks, spec.trainer.ranks_per_pod)
    counts: dict[Role, tuple[int, float, float]] = {  # processes, CPUs and GPUs of each
        "metrics": (1, _cpus(spec.metrics.pod, 0.1), 0),
        "gateway": (min(spec.reward.gateway.replicas, 1), _cpus(spec.reward.gateway.pod), 0),
        "reward": (spec.reward.workers.replicas, _cpus(spec.reward.workers.pod), 0),
        "trainer": (
            spec.trainer.ranks,
            _cpus(spec.trainer.pod, ranks_per_pod) / ranks_per_pod,
            _gpus(spec.trainer.pod, 1),
        ),
    }
    if not with_gpus:
        counts = {role: (count, cpus, 0) for role, (count, cpus, _) in counts.items()}
    own = metrics_environment(job)
    own["PLAUDIT_MODEL_SERVERS"] = json.dumps(
        {each.name: [(context.folder / FOLDER / each.name).as_uri()] for each in job.spec.reward.model_scorers}
    )
    plans = {
        role: [
            ProcessPlan(f"{role}-{i}", role, cpus, gpus, SERVE[role], context.environment(f"{role}-{i}", role) | own)
            for i in range(count)
        ]
        for role, (count, cpus, gpus) in counts.items()
    }
    trainers = plans.pop("trainer")
    plans |= {"rollout": list(_rollouts(spec.rollout, context, own, with_gpus=with_gpus)), "trainer": trainers}
    plans["reward"] = [replace(plan, secrets=context.reward_secrets) for plan in plans["reward"]]
    if spec.trains:
        del plans["gateway"]
    else:
        del plans["rollout"], plans["trainer"]
        plans["gateway"] = [
            replace(plan, environment={**plan.environment, **_gateway(context)}) for plan in plans["gateway"]
        ]
        if not plans["gateway"]:
            del plans["gateway"]
    models = spec.reward.model_scorers
    servers = {f"model-{each.name}": _servers(each, context, with_gpus=with_gpus) for each in models}
    environments = {f"environment-{each.name}": [_environment(each, context)] for each in spec.environments}
    ordered = {"metrics": plans.pop("metrics"), **environments, **servers, **plans}
    if not with_gpus:
        return ordered
    return {
        role: [plan if plan.gpus else replace(plan, environment={**plan.environment, **_NO_GPUS}) for plan in each]
        for role, each in ordered.items()
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


def _gateway(context: LaunchSettings) -> dict[str, str]:
    return {
        "PLAUDIT_GATEWAY_PORT": str(context.gateway_port),
        "PLAUDIT_GATEWAY_TOKENS": str(context.folder / TOKENS_FOLDER),
    }


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
