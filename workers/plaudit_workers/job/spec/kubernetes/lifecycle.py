"""``spec.lifecycle``: deadlines, failure policy and cleanup."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plaudit_workers.job.spec.section import Section


class ExitCodesSpec(Section):
    """Exit codes of the trainer."""

    operator: Literal["In", "NotIn"] = "In"
    """``In``: one of ``values``; ``NotIn``: none of them. Default In."""
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(min_length=1, max_length=64)
    """The exit codes."""


class FailureRuleSpec(Section):
    """What follows a certain end of an attempt of the trainer: exactly one of ``onExitCodes`` and ``onReasons``."""

    action: Literal["Fail", "Count", "Ignore"]
    """``Fail``: the job fails. ``Count``: another attempt, which counts towards ``maxRestarts``. ``Ignore``: another
    attempt, which counts towards ``maxDisruptions``."""
    on_exit_codes: ExitCodesSpec | None = None
    """Applies if a rank of the attempt exited with such a code."""
    on_reasons: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(default=[], max_length=64)
    """Applies if a pod of the attempt has one of these reasons: of the pod (``Evicted``, ``TopologyAffinityError``), of
    its condition DisruptionTarget (``PreemptionByScheduler``), or of a container (``OOMKilled``)."""


class BackoffSpec(Section):
    """Pauses between attempts that end early: without a closed step, and sooner than ``resetAfterSeconds``."""

    initial_seconds: float = Field(default=10.0, ge=0, le=86_400)
    """Pause after the second early end in a row; it doubles with each further one. The first early end is followed by
    the next attempt at once. Default 10."""
    max_seconds: float = Field(default=300.0, ge=0, le=86_400)
    """Longest pause. Default 300."""
    reset_after_seconds: float = Field(default=600.0, ge=0, le=86_400)
    """An attempt that ran as long as this has not ended early. Default 600."""


class FailurePolicySpec(Section):
    """What follows the end of an attempt of the trainer. ``plaudit run`` uses only ``maxRestarts``.

    The first rule that applies decides. Without one, exit codes 42 and 3 fail the job, an end by the cluster counts as
    a disruption, and any other as a restart.
    """

    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Restarts of the trainer before the job fails; disruptions by the cluster do not count. Default 3."""
    max_disruptions: int = Field(default=100, ge=0, le=100_000)
    """Attempts of the trainer that the cluster may end (drain, preemption, eviction, a kubelet's refusal) before the
    job fails. Kubernetes only. Default 100."""
    rules: list[FailureRuleSpec] = Field(default=[], max_length=32)
    """Rules for certain ends, in order. Kubernetes only. Default none."""
    backoff: BackoffSpec = BackoffSpec()
    """Pauses between attempts that end early. Kubernetes only."""


class LifecycleSpec(Section):
    """Deadlines and cleanup. ``plaudit run`` uses only ``failurePolicy.maxRestarts``."""

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
    """Restarts after an attempt of the trainer has ended."""
