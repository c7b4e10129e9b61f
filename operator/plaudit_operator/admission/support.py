"""Combinations of fields that do not work on Kubernetes: rejected, never ignored."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob


def unsupported(job: RLJob) -> Iterator[Problem]:
    """Yield a problem for each field that cannot work."""
    scaling, tls = job.spec.reward.workers.autoscaling, job.spec.transport.tls
    if tls is None or scaling is None or scaling.provider != "keda":
        return
    for name, file in (("caFile", tls.ca_file), ("certificateFile", tls.certificate_file)):
        if file:
            yield Problem(
                f"spec.transport.tls.{name}",
                "is a file in the pods, which KEDA cannot read, and KEDA connects to Redis too",
                f"Give a key of a Secret in {name.removesuffix('File')}Secret",
                also=("spec.reward.workers.autoscaling",),
            )
    if not tls.check_server_name:
        yield Problem(
            "spec.transport.tls.checkServerName",
            "is false, but KEDA connects to Redis too and always checks the name",
            "Use a name in url that the certificate was issued for, or autoscaling by hpa",
            also=("spec.reward.workers.autoscaling",),
        )
