"""One attempt of a rollout replica of several pods, as its Job records it."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit_operator import names
from plaudit_operator.observed import Object, annotations_of, attempt_of, labels


@dataclass(frozen=True)
class ReplicaAttempt:
    """Hold one attempt of a replica."""

    replica: int
    """Number of the replica in its group, from 0."""
    number: int = 0
    short_attempts: int = 0
    """Attempts before this one that ended early, one after another."""

    @classmethod
    def of(cls, job: Object) -> ReplicaAttempt:
        """Return the attempt of a Job."""
        short = int(annotations_of(job).get(names.SHORT_ATTEMPTS, "0"))
        return cls(replica_of(job), attempt_of(job), short)


def replica_of(item: Object) -> int:
    """Return the number of the replica that a Job or a pod belongs to; -1 for a rollout of one pod."""
    return int(labels(item).get(names.LABEL_REPLICA, "-1"))


def group_of(item: Object) -> str:
    """Return the rollout group of an object; empty in a job without groups."""
    return labels(item).get(names.LABEL_ROLLOUT_GROUP, "")
