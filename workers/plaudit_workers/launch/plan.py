"""Which processes a job needs, with what resources and environment: pure, from the job alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from plaudit_workers.job.rljob import RLJob
from plaudit_workers.stream.connection import RedisAddress

Role = Literal["trainer", "rollout", "reward", "metrics"]

SERVE: dict[Role, str] = {
    "trainer": "plaudit_workers.training.worker:serve",
    "rollout": "plaudit_workers.rollout.worker:serve",
    "reward": "plaudit_workers.scoring.worker:serve",
    "metrics": "plaudit_workers.launch.actor:serve_metrics",
}

# One thread a process: spinning OpenMP threads of several processes on few cores cost a factor of ten.
_QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class ProcessPlan:
    """One process: what it runs and what it needs. ``serve`` is ``module:function``."""

    name: str
    role: Role
    cpus: float
    gpus: float
    serve: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What all processes of a run share."""

    run: str
    folder: Path
    redis: RedisAddress
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0

    def environment(self, name: str) -> dict[str, str]:
        """The variables that ``ProcessSettings.from_environment`` reads (``PLAUDIT_WORKER`` is set at each start)."""
        return {
            **_QUIET,
            "PLAUDIT_JOB": str(self.folder / "job.yaml"),
            "PLAUDIT_RUN": self.run,
            "PLAUDIT_RUN_FOLDER": str(self.folder),
            "PLAUDIT_REDIS_URL": self.redis.url,
            "PLAUDIT_REDIS_PASSWORD": self.redis.password,
            "PLAUDIT_LOG_FILE": str(self.folder / "logs" / f"{name}.log"),
            "PLAUDIT_METRICS_HOST": self.metrics_host,
            "PLAUDIT_METRICS_PORT": str(self.metrics_port),
        }


def plan_processes(job: RLJob, context: RunContext, *, with_gpus: bool) -> dict[Role, list[ProcessPlan]]:
    """Lists the processes of each role, in the order in which they are started.

    Args:
        job: the resolved job; it has a rollout and a trainer.
        context: what all processes share.
        with_gpus: whether the cluster has GPUs; without, everything runs on CPUs.
    """
    rollout, trainer = job.spec.rollout, job.spec.trainer
    if rollout is None or trainer is None:
        raise ValueError("a job without rollout and trainer has no processes to plan here")
    gpus_per_rollout = rollout.engine.tensor_parallel_size if with_gpus and rollout.engine.kind == "vllm" else 0
    gpus_per_rank = 1 if with_gpus else 0
    counts: dict[Role, tuple[int, float, float]] = {  # processes, CPUs and GPUs of each
        "metrics": (1, 0.1, 0),
        "reward": (job.spec.reward.workers.replicas, 1, 0),
        "rollout": (rollout.replicas, 1, gpus_per_rollout),
        "trainer": (trainer.ranks, 1, gpus_per_rank),
    }
    latency = job.spec.metrics.reward_latency
    own = {
        "PLAUDIT_REWARD_LATENCY_THRESHOLD_S": str(latency.threshold_seconds),
        "PLAUDIT_REWARD_LATENCY_TARGET": str(latency.target),
    }
    return {
        role: [
            ProcessPlan(f"{role}-{i}", role, cpus, gpus, SERVE[role], context.environment(f"{role}-{i}") | own)
            for i in range(count)
        ]
        for role, (count, cpus, gpus) in counts.items()
    }


def share_gpus(plans: dict[Role, list[ProcessPlan]], available: float) -> dict[Role, list[ProcessPlan]]:
    """Lets processes share the GPUs of one machine that has fewer than they ask for.

    Only processes that ask for a single GPU can share; on a cluster nothing is shared (Ray then waits for room).
    """
    wanted = sum(plan.gpus for role_plans in plans.values() for plan in role_plans)
    if wanted <= available or any(plan.gpus > 1 for role_plans in plans.values() for plan in role_plans):
        return plans
    fraction = int(available / wanted * 100) / 100
    return {role: [replace(plan, gpus=plan.gpus * fraction) for plan in each] for role, each in plans.items()}
