"""The runbook's first command for each alert of the cells, run while the alert fires, and what it has to show."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Final

from real_cluster import Cluster
from scoring_job import NAMESPACE, PortForward

from runbook import answer, first_command

SHOWS: Final = MappingProxyType(
    {
        "RedisDown": r"transport +0/1",
        "RLJobDegraded": r"Degraded",
        "NoTrainer": r"TrainerRunning[\s\S]*(Unschedulable|cordon|unschedulable)",
        "NoReadyRollout": r'plaudit_workers\{role="rollout"\S* 0',
        "StepStalled": r'"undelivered": [1-9]',
        "RedisMemoryHigh": r"plaudit_redis_memory_limit_bytes\S* [1-9]",
        "RLJobFailed": r"Failed[\s\S]*DeadlineExceeded",
        "RunWithoutMetrics": r"metrics\S* +0/\d +Pending",
        "NoRewardWorkers": r"reward +0/",
        "SampleQueueOld": r'"undelivered": [1-9]',
        "ScoresFailing": r"have no score[\s\S]*(KeyError|endpoint)",
        "ScorerFailing": r"KeyError|infra_error",
        "ScorerHanging": r'plaudit_scorer_oldest_in_flight_seconds\{scorer="judged"\} (1[2-9]\d|[2-9]\d\d)',
        "RewardLatencyBurn": r"plaudit_score_seconds_sum\S* [1-9]|plaudit_stage_seconds_sum\S* [1-9]",
        "JudgeErrors": r'plaudit_judge_requests_total\{\S*status="[^2]\S* [1-9]',
        "JudgeCircuitOpen": r"plaudit_judge_circuit_open\S* 1",
        "JudgeBudgetExhausted": r"plaudit_limiter_recent_wait_seconds\S* [1-9]\d",
        "OperatorDown": r"lease\S*/plaudit",
        "OperatorStuck": r"watch interrupted[^\n]*rljobs[^\n]*forbidden",
        "OperatorErrors": r"reconcile failed[^\n]*failed calling webhook",
    }
)
"""By alert, a pattern in the output that gives the cause."""

_COMMAND_OF_SERVICES = {"RewardLatencyBurn": "curl -s $RUN/metrics | grep -E"}
"""The cells' jobs have no steps; for these alerts the runbook has another command then."""


def shown(cluster: Cluster, job: str, alert: str, folder: Path) -> str:
    """Return what the runbook's first command prints for an alert of a job.

    Args:
        cluster: on which it runs.
        job: its name.
        alert: name of the alert.
        folder: for a kubeconfig whose namespace is the job's, as a reader has it.
    """
    kubeconfig = folder / "kubeconfig"
    if not kubeconfig.exists():
        shutil.copy(cluster.environment["KUBECONFIG"], kubeconfig)
        set_namespace = ("config", "set-context", "--current", f"--namespace={NAMESPACE}")
        cluster.kubectl(*set_namespace, f"--kubeconfig={kubeconfig}")
    path = os.pathsep.join([cluster.environment["PATH"], str(Path(sys.executable).parent)])
    environment = cluster.environment | {"PATH": path, "KUBECONFIG": str(kubeconfig)}
    program, address, forward = _COMMAND_OF_SERVICES.get(alert, ""), "", None
    if "$RUN" in first_command(alert, program):
        forward = PortForward(cluster, NAMESPACE, f"service/{job}-metrics", 9090)
        address = f"http://127.0.0.1:{forward.port}"
    try:
        return answer(alert, program, environment=environment, RUN=address, job=job)
    finally:
        if forward:
            forward.close()


def shown_of_operator(cluster: Cluster, alert: str) -> str:
    """Return what the runbook's first command prints for an alert of the operator."""
    return answer(alert, environment=cluster.environment, **{"operator's namespace": "plaudit"})


def gives_the_cause(alert: str, text: str) -> bool:
    """Return True if the output shows what the alert's entry says."""
    return re.search(SHOWS[alert], text) is not None
