"""What a job may ask for and this operator has no machinery for: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rljob import RLJob

_NOT_YET = "is not done by the operator yet"


def unsupported(job: RLJob) -> Iterator[Problem]:
    """Fields whose meaning on Kubernetes is decided and not built."""
    transport = job.spec.transport
    if transport.tls is not None:
        remedy = "Leave it out: rediss:// is checked against the system's authorities"
        yield Problem("spec.transport.tls", _NOT_YET, remedy)
