"""``spec.sandboxes``: the machines in which the samples' tools and the tests of tasks run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_job.spec.pod import quantity
from plaudit_job.spec.section import BYTE_QUANTITY, Section


class SandboxesSpec(Section):
    """The machines of samples: each sample has one, from its first command to the end of its group."""

    provider: Literal["process"] = "process"
    """``process``: a folder of the run and Linux namespaces around each command, without root or a container runtime;
    for tasks without an image. Default process."""
    network: Literal["none"] = "none"
    """What a machine reaches. Default none: nothing, whatever the task asks for."""
    max_concurrent: int = Field(default=16, ge=1, le=10_000)
    """Commands that one rollout, and tests that one reward worker, runs at the same time; others wait, and their time
    limits begin later. Default 16."""
    memory: str = Field(default="2Gi", pattern=BYTE_QUANTITY)
    """Most memory of a machine; a task that asks for less gets less. Default 2Gi, as Harbor's tasks."""
    disk: str = Field(default="10Gi", pattern=BYTE_QUANTITY)
    """Most disk of a machine; a task that asks for less gets less. Default 10Gi, as Harbor's tasks."""
    keep: Literal["none", "failed", "all"] = "none"
    """Machines that stay in the run's folder (``kept-sandboxes``) when their group ends. ``failed``: those of samples
    whose tests gave no reward. Default none."""

    @property
    def memory_bytes(self) -> int:
        """Return ``memory`` as a number."""
        return int(quantity(self.memory))

    @property
    def disk_bytes(self) -> int:
        """Return ``disk`` as a number."""
        return int(quantity(self.disk))
