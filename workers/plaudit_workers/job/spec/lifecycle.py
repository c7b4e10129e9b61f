"""``spec.lifecycle``: deadlines, restarts and cleanup."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.section import Section


class FailurePolicySpec(Section):
    """Restarts of a failing trainer."""

    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Restarts of the trainer before the job fails; disruptions by the cluster do not count. Default 3."""
    max_disruptions: int = Field(default=100, ge=0, le=100_000)
    """Attempts of the trainer that the cluster may end (drain, preemption, eviction, a kubelet's refusal) before the
    job fails. Kubernetes only. Default 100."""


class LifecycleSpec(Section):
    """Deadlines and cleanup. ``plaudit run`` uses only ``failurePolicy``."""

    pre_running_deadline_seconds: int = Field(default=1800, ge=1)
    """Seconds from creation or resumption within which the job must run; else it fails and releases its resources.
    Default 1,800."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """Seconds from start or resumption after which a running job fails. Default: no limit."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """Seconds from the end of the job until the object is deleted. Default: never."""
    cleanup: Literal["All", "KeepTransport", "None"] = "All"
    """What is deleted at the end: ``All`` keeps the object and the shared volume, ``KeepTransport`` also keeps Redis,
    ``None`` deletes nothing. Default All."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """Restarts of a failing trainer."""
