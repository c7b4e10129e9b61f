"""``spec.lifecycle``: deadlines, restarts, and what is left at the end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.section import Section


class FailurePolicySpec(Section):
    """What a failing trainer costs."""

    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Attempts of the trainer after its first; disruptions by the cluster do not count. Default 3."""
    max_disruptions: int = Field(default=100, ge=0, le=100_000)
    """Attempts of the trainer that the cluster may end (drain, preemption, eviction, a kubelet's refusal) before the
    job fails. Kubernetes only. Default 100."""


class LifecycleSpec(Section):
    """Deadlines and cleaning up. ``plaudit run`` ignores all but ``failurePolicy``."""

    pre_running_deadline_seconds: int = Field(default=1800, ge=1)
    """Seconds from its creation or resumption: a job that does not run by then fails and gives back what it holds.
    Default 1,800."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """Seconds from its start or resumption: a job that runs longer fails. Default: no limit."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """Seconds after its end until the object is deleted. Default: never."""
    cleanup: Literal["All", "KeepTransport", "None"] = "All"
    """What is deleted at the end: everything but the object and the shared volume, all but Redis, or nothing. Default
    All."""
    failure_policy: FailurePolicySpec = FailurePolicySpec()
    """What a failing trainer costs."""
