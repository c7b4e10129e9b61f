"""``spec.scheduling``: queue, gang, priority."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.section import Section


class SchedulingSpec(Section):
    """Queue, gang, priority. ``plaudit run`` ignores it."""

    queue_name: str = Field(default="", max_length=63, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")
    """Kueue's local queue: trainer, rollouts, reward models and Redis wait there until they are admitted together.
    Default empty: none."""
    gang: Literal["none", "native"] = "none"
    """``native``: trainer, rollouts, reward models and Redis start together or not at all, through Kubernetes' own
    PodGroup. Default none: not every cluster has it."""
    priority_class_name: str = Field(default="", max_length=253)
    """Priority class of all pods. Default empty: the cluster's default."""

    @property
    def whole(self) -> bool:
        """Return True for a job whose pods start together or not at all."""
        return self.gang != "none" or bool(self.queue_name)
