"""Schedule trainer, rollouts, reward models and Redis all or nothing, as a PodGroup of Kubernetes or of Kueue.

These are all pods of a job that may hold GPUs. Both groups have the name of the run, so that pods of an earlier job of
the same name never count. Reward workers and metrics belong to neither group: reward workers start once the group is
scheduled (``policies/gang_admission.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.runtime.kinds import POD_GROUP

_ROLES = ("trainer", "rollout", "model", "redis")


def _pods(context: JobContext) -> dict[str, int]:
    """Return the number of pods of each member of the group, by child."""
    spec = context.spec
    models = {f"model/{scorer.name}": scorer.served.replicas for scorer in spec.reward.scorers if scorer.served}
    redis = {} if spec.transport.url else {"redis": 1}
    groups = spec.rollout.by_group.items()
    rollouts = {
        f"rollout/{name}" if name else "rollout": each.replicas * each.pods_per_replica for name, each in groups
    }
    return {"trainer": spec.trainer.pods, **rollouts, **models, **redis}


def is_member(template: Manifest) -> bool:
    """Return True if the pods of a frozen template belong to the job's group."""
    return "schedulingGroup" in template["spec"] or names.KUEUE_GROUP in template["metadata"]["labels"]


def pod_groups(context: JobContext, templates: Mapping[str, Any]) -> list[Manifest]:
    """Return the PodGroup of a gang (KEP-4671). Its count is immutable, and so are replicas of rollouts.

    The trainer's next attempt and the replacement of a rollout join it again: running pods count.
    """
    if context.spec.scheduling.gang == "none":
        return []
    # Of the templates as frozen: the operator that froze them may have left other roles outside.
    count = sum(pods for child, pods in _pods(context).items() if is_member(templates[child]["template"]))
    spec = {"schedulingPolicy": {"gang": {"minCount": count}}}
    return [context.manifest(POD_GROUP, context.metadata(context.run, "gang"), spec)]


def joined(context: JobContext, role: str) -> Manifest:
    """Return the fields by which a pod template joins the job's group; empty for roles outside it."""
    scheduling = context.spec.scheduling
    if role not in _ROLES or not scheduling.whole:
        return {}
    if scheduling.gang == "native":
        return {"spec": {"schedulingGroup": {"podGroupName": context.run}}}
    # Kueue's webhook would set this gate too. Without Kueue in the cluster, it keeps the job from bypassing its queue.
    return {
        "metadata": {
            "labels": {
                names.KUEUE_QUEUE: scheduling.queue_name,
                names.KUEUE_MANAGED: "true",
                names.KUEUE_GROUP: context.run,
            },
            "annotations": {
                names.KUEUE_COUNT: str(sum(_pods(context).values())),
                names.KUEUE_PARENT: f"{names.GROUP}/rljob",
                names.KUEUE_SERVING: "true",
            },
        },
        "spec": {"schedulingGates": [{"name": names.KUEUE_GATE}]},
    }
