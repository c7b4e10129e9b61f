"""``status.cost``: the GPU time of a job by role, and what waiting for rewards cost.

Time counts while a pod is bound to a node. It is added up whenever the status changes for another reason, and from the
number of GPUs that was last reported: a job at rest is not written, and nothing is counted twice or lost over restarts
of the operator. Readers add ``gpus`` × the time since ``countedTime``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_operator import names
from plaudit_operator.children.context import JobContext
from plaudit_operator.children.roles import rollout
from plaudit_operator.gpu_time import gpu_seconds
from plaudit_operator.observed import Object, Observed, labels, timestamp
from plaudit_operator.pod_state import is_over, is_scheduled
from plaudit_workers.job.spec.kubernetes.pod import GPU, PodSpec


def held_gpus(context: JobContext, observed: Observed) -> dict[str, int]:
    """Return the GPUs that each role holds now; roles whose pods ask for none are left out."""
    spec, templates = context.spec, context.admitted.templates
    pods: dict[str, PodSpec] = {"reward": spec.reward.workers.pod}
    if spec.trains:
        pods |= {"trainer": spec.trainer.pod}
        pods |= {group.child: group.spec.pod for group in rollout.groups(context)}
    for scorer in context.spec.reward.model_scorers:
        assert scorer.served is not None
        pods[f"model/{scorer.name}"] = scorer.served.pod
    held = {}
    for role, pod in pods.items():
        each = _gpus(templates.get(role) or {}, pod.gpu_resource or context.platform.gpu_resource)
        if each:
            held[role] = each * sum(is_scheduled(held_by) and not is_over(held_by) for held_by in _pods(observed, role))
    return held


def _gpus(frozen: Mapping[str, Any], resource: str) -> int:
    containers = (frozen.get("template") or {}).get("spec", {}).get("containers") or []
    limits = (container.get("resources", {}).get("limits") or {} for container in containers)
    return sum(int(each.get(resource) or each.get(GPU) or 0) for each in limits)


def _pods(observed: Observed, role: str) -> list[Object]:
    kind, _, name = role.partition("/")
    label = names.LABEL_SCORER if kind == "model" else names.LABEL_ROLLOUT_GROUP
    return [pod for pod in observed.pods_of(kind) if not name or labels(pod).get(label) == name]


def with_cost(before: Mapping[str, Any], report: dict[str, Any], held: Mapping[str, int], now: float) -> dict[str, Any]:
    """Return a status with its cost.

    Args:
        before: the status as last reported.
        report: the status as it is now, with the cost of ``before`` or without one.
        held: GPUs by role.
        now: seconds since the epoch.
    """
    cost = before.get("cost") or {}
    gpus = {role["name"]: int(role["gpus"]) for role in cost.get("roles") or []}
    wanted = {**dict.fromkeys(gpus, 0), **held}
    unchanged = all(before.get(name) == value for name, value in report.items() if name != "cost")
    if not wanted or (unchanged and gpus == wanted):
        return report
    spent = gpu_seconds(cost, now)
    roles = [{"name": name, "gpus": wanted[name], "gpuSeconds": spent.get(name, 0)} for name in sorted(wanted)]
    waited = int(cost.get("exposedRewardGpuSeconds", 0)) + _exposed_gpu_s(before, report, gpus.get("trainer", 0))
    return {**report, "cost": {"roles": roles, "exposedRewardGpuSeconds": waited, "countedTime": timestamp(now)}}


def _exposed_gpu_s(before: Mapping[str, Any], report: Mapping[str, Any], trainer_gpus: int) -> int:
    """Return the GPU seconds that the trainer waited for rewards in the steps closed since the last report.

    The metrics service reports the wait of the last step; steps that closed since the last report count alike.
    """
    progress = report.get("progress") or {}
    steps = int(progress.get("step") or 0) - int((before.get("progress") or {}).get("step") or 0)
    return max(0, round(steps * float(progress.get("exposedRewardSeconds") or 0.0) * trainer_gpus))
