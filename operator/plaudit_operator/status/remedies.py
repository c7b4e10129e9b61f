"""The remedy for a role whose pods are not ready, by reason: the end of the condition's message."""

from __future__ import annotations

from plaudit_operator.names import Reason

_PODS = {
    "rollout": "spec.rollout.pod",
    "reward": "spec.reward.workers.pod",
    "gateway": "spec.reward.gateway.pod",
    "trainer": "spec.trainer.pod",
    "transport": "spec.transport.managed.pod",
    "metrics": "spec.metrics.pod",
}


def remedy(reason: str, role: str, job: str) -> str:
    """Return a sentence; empty if there is nothing to do but wait.

    Args:
        reason: of ``names.Reason``.
        role: as it is named in the status; a reward model is ``model/<scorer>``, an environment
            ``environment/<name>``.
    """
    other = "the environment's pod" if role.startswith("environment/") else "the scorer's model.pod"
    pod = _PODS.get(role, other)
    limit = "spec.transport.managed.memory" if role == "transport" else f"{pod}.resources.limits.memory"
    logs = {"transport": "redis"}.get(role, role.partition("/")[0])
    sentences = {
        Reason.UNSCHEDULABLE: f"Add nodes, or lower {pod}.resources, or change its nodeSelector or tolerations",
        Reason.IMAGE_PULL: f"Correct the chart's images and images.pullSecret, or set {pod}.image in a new job",
        Reason.CONFIG_MISSING: "Create it; the pods then start without further action",
        Reason.OUT_OF_MEMORY: f"Raise {limit} in a new job",
        Reason.CRASHING: f"See kubectl plaudit logs {job} {logs}",
        Reason.REFUSED_BY_CLUSTER: "Raise the namespace's quota or lower the pod's resources; the operator retries",
    }
    return sentences.get(reason, "")
