"""What the ``scale`` subresource of an RLJob reports: its rollout workers, and the labels of their pods.

``kubectl scale rlj``, an HPA and KEDA read and change ``spec.rollout.replicas`` through it.
"""

from __future__ import annotations

from plaudit_operator import names
from plaudit_operator.children.context import JobContext
from plaudit_operator.children.roles import rollout
from plaudit_operator.observed import Observed
from plaudit_operator.pod_state import is_leaving, is_over
from plaudit_operator.replica import group_of, replica_of


def count_rollouts(observed: Observed) -> int:
    """Return the number of rollout workers whose pods exist; the pods of a replica count as one."""
    pods = [pod for pod in observed.pods_of(rollout.ROLE) if not (is_over(pod) or is_leaving(pod))]
    single = [pod for pod in pods if replica_of(pod) < 0]
    return len(single) + len({(group_of(pod), replica_of(pod)) for pod in pods if replica_of(pod) >= 0})


def rollout_selector(context: JobContext) -> str:
    """Return the labels of one pod of each rollout worker of a job without groups."""
    labels = context.labels(rollout.ROLE)
    if context.spec.rollout.pods_per_replica > 1:
        labels |= {names.COMPLETION_INDEX: "0"}
    return ",".join(f"{key}={value}" for key, value in labels.items())
