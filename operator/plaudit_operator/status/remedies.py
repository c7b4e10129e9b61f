"""What to do about a role whose pods are missing, by reason: the end of the condition's message."""

from __future__ import annotations

from plaudit_operator.names import Reason

_PODS = {
    "rollout": "spec.rollout.pod",
    "reward": "spec.reward.workers.pod",
    "trainer": "spec.trainer.pod",
    "transport": "spec.transport.managed.pod",
    "metrics": "spec.metrics.pod",
}


def remedy(reason: str, role: str, job: str) -> str:
    """A sentence; empty when waiting is all there is to do.

    Args:
        reason: of ``names.Reason``.
        role: as it is named in the status; a reward model is ``model/<scorer>``.
        job: the job's name.
    """
    pod = _PODS.get(role, "the scorer's model.pod")
    limit = "spec.transport.managed.memory" if role == "transport" else f"{pod}.resources.limits.memory"
    logs = {"transport": "redis"}.get(role, role.partition("/")[0])
    sentences = {
        Reason.UNSCHEDULABLE: f"Make room, add nodes, or ask for less ({pod}.resources, nodeSelector, tolerations)",
        Reason.IMAGE_PULL: f"Mend the chart's images and images.pullSecret, or set {pod}.image in a new job",
        Reason.CONFIG_MISSING: "Create what is missing; the pods then start by themselves",
        Reason.OUT_OF_MEMORY: f"Raise {limit} in a new job",
        Reason.CRASHING: f"kubectl plaudit logs {job} {logs} shows more",
        Reason.REFUSED_BY_CLUSTER: "Raise the namespace's quota, or ask for less; it is tried again by itself",
    }
    return sentences.get(reason, "")
