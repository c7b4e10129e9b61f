"""What a job may ask for and this operator has no machinery for: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rljob import RLJob

_NOT_YET = "is not done by the operator yet"


def unsupported(job: RLJob) -> Iterator[Problem]:
    """Fields whose meaning on Kubernetes is decided and not built."""
    scheduling, transport = job.spec.scheduling, job.spec.transport
    if scheduling.gang != "none":
        remedy = "Leave it out; preRunningDeadlineSeconds gives up a job that does not get all its pods"
        yield Problem("spec.scheduling.gang", f"{scheduling.gang} {_NOT_YET}", remedy)
    if scheduling.queue_name:
        remedy = "Leave it out, and use a ResourceQuota or scheduling.suspend"
        yield Problem("spec.scheduling.queueName", f"{scheduling.queue_name!r}: queues are not used yet", remedy)
    if transport.tls is not None:
        remedy = "Leave it out: rediss:// is checked against the system's authorities"
        yield Problem("spec.transport.tls", _NOT_YET, remedy)
