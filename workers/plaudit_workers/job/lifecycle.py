"""``spec.lifecycle``: deadlines, restarts, and what is left at the end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.section import Section


class FailurePolicy(Section):
    """What a failing trainer costs."""

    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Attempts of the trainer after its first; disruptions by the cluster do not count. Default 3."""


class Lifecycle(Section):
    """Deadlines and cleaning up. ``plaudit run`` ignores all but ``failurePolicy``."""

    pre_running_deadline_seconds: int = Field(default=1800, ge=1)
    """The job fails, and gives back what it holds, when it does not run by then. Default 1,800."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """The job fails when it runs longer. Default: no limit."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """The object is deleted this long after its end. Default: never."""
    cleanup: Literal["All", "KeepTransport", "None"] = "All"
    """What is deleted at the end: everything but the object and the shared volume, all but Redis, or nothing. Default
    All."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What a failing trainer costs."""
