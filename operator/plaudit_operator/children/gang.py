"""Schedule trainer, rollouts and Redis all or nothing, as a PodGroup of Kubernetes or of Kueue.

Both groups have the name of the run, so that pods of an earlier job of the same name never count. Reward workers,
reward models and metrics belong to neither: they start once the group is scheduled (``policies/gang_admission.py``).
"""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.runtime.kinds import POD_GROUP

_ROLES = ("trainer", "rollout", "redis")


def size(context: JobContext) -> int:
    """Return the number of pods in the group."""
    spec = context.spec
    return spec.trainer.pods + spec.rollout.replicas + (0 if spec.transport.url else 1)


def pod_groups(context: JobContext) -> list[Manifest]:
    """Return the PodGroup of a gang (KEP-4671). Its count is immutable, and so is ``rollout.replicas``.

    The trainer's next attempt and the replacement of a rollout join it again: running pods count.
    """
    if context.spec.scheduling.gang == "none":
        return []
    spec = {"schedulingPolicy": {"gang": {"minCount": size(context)}}}
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
            "annotations": {names.KUEUE_COUNT: str(size(context)), names.KUEUE_PARENT: f"{names.GROUP}/rljob"},
        },
        "spec": {"schedulingGates": [{"name": names.KUEUE_GATE}]},
    }
