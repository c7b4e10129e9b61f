"""Read the part of one process in its replica of the model, which may span several pods.

It comes from the environment that the operator sets: ``PLAUDIT_ROLLOUT_GROUP`` names the entry of ``rollout.groups``,
``PLAUDIT_REPLICA_RANK`` counts the pods of the replica from 0, the leader, and ``PLAUDIT_REPLICA_LEADER`` is the
leader's host name. The leader takes prompts; the others compute their part of the model. No heavy imports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.spec.rljob import RLJob

ROLLOUT_GROUP = "PLAUDIT_ROLLOUT_GROUP"
REPLICA_RANK = "PLAUDIT_REPLICA_RANK"
REPLICA_LEADER = "PLAUDIT_REPLICA_LEADER"


@dataclass(frozen=True)
class ReplicaMember:
    """Describe one pod of a replica."""

    rank: int = 0
    pods: int = 1
    leader: str = "127.0.0.1"
    """Host name or address of the pod of rank 0."""

    @classmethod
    def from_environment(cls, job: RLJob, environment: Mapping[str, str] = os.environ) -> ReplicaMember:
        """Return this process's part; a process without ``PLAUDIT_REPLICA_RANK`` holds the whole replica.

        Raises:
            RefusedError: the rank is not one of the replica.
        """
        if REPLICA_RANK not in environment:
            return WHOLE
        rank, pods = environment[REPLICA_RANK], job.spec.rollout.pods_per_replica
        if not rank.isdigit() or int(rank) >= pods:
            raise RefusedError(f"{REPLICA_RANK} is {rank!r}; a replica of {pods} pods has the ranks 0 to {pods - 1}")
        if REPLICA_LEADER not in environment:
            raise RefusedError(f"{REPLICA_LEADER} is missing; give the host name of the pod of rank 0")
        return cls(int(rank), pods, environment[REPLICA_LEADER])

    @property
    def leads(self) -> bool:
        """Return True for the pod that takes prompts."""
        return self.rank == 0


WHOLE = ReplicaMember()
"""The only process of its replica."""


def job_of_group(job: RLJob) -> RLJob:
    """Return the job with ``rollout`` as it applies to this process's group.

    Raises:
        RefusedError: the job has no group of this name.
    """
    name, groups = os.environ.get(ROLLOUT_GROUP, ""), job.spec.rollout.by_group
    if name not in groups:
        raise RefusedError(f"{ROLLOUT_GROUP} is {name!r}; the job has {', '.join(map(repr, groups))}")
    return job.model_copy(update={"spec": job.spec.model_copy(update={"rollout": groups[name]})})
