"""Choose the rollouts that leave when a job gets fewer of them: those with the fewest samples in flight.

A ReplicaSet deletes pods that are not ready first, and then those with the lowest ``pod-deletion-cost``. The costs are
written only right before a Deployment of rollouts is scaled down, so that a job at rest causes no writes. Replicas of
several pods are Jobs with numbers; the highest numbers leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plaudit_operator import names
from plaudit_operator.actions import Action, Scale
from plaudit_operator.observed import Observed, labels
from plaudit_operator.pod_state import is_leaving, is_over

_ROLE = "rollout"


def chooses_rollouts(observed: Observed, actions: Sequence[Action]) -> bool:
    """Return True if some, but not all, pods of a Deployment of rollouts are to leave."""
    return any(_candidates(observed, action) for action in actions)


def with_deletion_costs(observed: Observed, actions: Sequence[Action], busy: Mapping[str, int]) -> list[Action]:
    """Return the actions of a job's plan with the costs of the pods among which a ReplicaSet chooses.

    Args:
        busy: samples in flight by name of the rollout worker. Without any, the ReplicaSet chooses by itself.
    """
    # A worker's name is its pod's, a process id and random digits.
    by_pod = {worker.rsplit("-", 2)[0]: count for worker, count in busy.items()}
    with_costs: list[Action] = []
    for action in actions:
        candidates = _candidates(observed, action)
        if isinstance(action, Scale) and by_pod.keys() & set(candidates):
            # A worker that sent no heartbeat yet has nothing in flight.
            action = replace(action, deletion_costs={pod: by_pod.get(pod, 0) for pod in candidates})
        with_costs.append(action)
    return with_costs


def _candidates(observed: Observed, action: Action) -> list[str]:
    """Return the pods of rollouts among which a ReplicaSet chooses; none if all of them leave, or none does."""
    if not isinstance(action, Scale) or action.replicas == 0:
        return []
    deployment = observed.child(action.kind, action.name)
    if deployment is None or labels(deployment).get(names.LABEL_ROLE) != _ROLE:
        return []
    selected = deployment["spec"]["selector"]["matchLabels"].items()
    pods = [pod for pod in observed.pods_of(_ROLE) if selected <= labels(pod).items()]
    present = [str(pod["metadata"]["name"]) for pod in pods if not (is_leaving(pod) or is_over(pod))]
    return sorted(present) if len(present) > action.replicas else []
