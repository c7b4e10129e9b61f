"""``spec.reward``: how finished samples become rewards. Scorers themselves: ``scorers.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plaudit_workers.job.spec.pod import PodSpec
from plaudit_workers.job.spec.scorers import ScorerSpec
from plaudit_workers.job.spec.section import MUTABLE, FilePath, Opaque, Section


class CombineSpec(Section):
    """How a sample's scores become one reward."""

    kind: Literal["weightedSum", "python"] = "weightedSum"
    """``weightedSum``: the sum of weight times value over the scorers that have a value. ``python``: a function of
    yours, from the scores by name to a number. Default weightedSum."""
    normalize: Literal["none", "group"] = "none"
    """``group``: each scorer's values are normalised within their group before they are weighted and summed (GDPO),
    so that a scorer counts by its weight and not by the spread of its values. With ``advantage`` reinforcePlusPlus
    (GDPO's own: then over the batch) or drGrpo, which do not divide by the group's spread once more. Default none."""
    path: FilePath = ""
    """Python file, for ``python``: relative to the job file; on Kubernetes a file of ``spec.files``, or an absolute
    path on the volume or in the image."""
    function: str = ""
    """The function in it, for ``python``: ``(values) -> float``, or ``(values, sample)``; ``values`` are the scorers'
    values by name."""


class AutoscalingSpec(Section):
    """How the number of reward workers follows the queue. Under ``plaudit run`` it means ``workers.replicas``."""

    provider: Literal["keda", "hpa"] = "keda"
    """``keda``: by samples waiting and in work; ``hpa``: by CPU. Default keda: most scorers wait, they do not compute.
    """
    min_replicas: int = Field(default=1, ge=0, le=10_000)
    """Never fewer. Default 1: scaling to zero is a choice, its first samples wait for a pod."""
    max_replicas: int = Field(default=32, ge=1, le=10_000)
    """Never more. Default 32."""
    samples_per_replica: int = Field(default=128, ge=1, le=1_000_000)
    """Samples, waiting or in work, that one worker is to have. Default 128: half of ``maxConcurrentSamples``."""
    scale_down_after_seconds: int = Field(default=300, ge=0, le=3600)
    """Seconds for which fewer workers must have been enough before some end. Default 300: Kubernetes' own; the pause
    between two steps' samples costs no worker."""


class WorkersSpec(Section):
    """The processes that run the scorers."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=1, le=10_000)
    """Reward workers. Default 1: one holds hundreds of slow calls."""
    max_concurrent_samples: int = Field(default=256, ge=1, le=100_000)
    """Samples that one worker has in work. Default 256: waiting for a judge costs no thread."""
    processes: int = Field(default=2, ge=1, le=1024)
    """Child processes of one worker, for scorers with ``isolation: process`` or ``thread``. Default 2."""
    autoscaling: Annotated[AutoscalingSpec | None, MUTABLE] = None
    """Follow the queue. Default: a fixed number."""
    pod: PodSpec = PodSpec()
    """Pods of the reward workers."""


class EgressRule(Section):
    """One destination that reward workers may reach: a range of addresses, or pods by their labels."""

    cidr: str = ""
    """Addresses, such as ``10.0.0.0/8``. Default empty: by selectors."""
    namespace_selector: Opaque = Field(default={})
    """Labels of the namespace, in Kubernetes' own form."""
    pod_selector: Opaque = Field(default={})
    """Labels of the pods, in Kubernetes' own form."""
    ports: list[int] = Field(default=[])
    """TCP ports. Default empty: all."""


class NetworkPolicySpec(Section):
    """What reward workers may reach besides Redis, DNS, metrics and the job's own reward models."""

    egress: list[EgressRule] = Field(default=[])
    """Judges and sandboxes. Default empty: nothing else."""


class RewardSpec(Section):
    """Scorers, how they are combined, and what a failure means."""

    scorers: list[ScorerSpec] = Field(min_length=1, max_length=32)
    """What is computed of each sample. They run at the same time unless ``when`` makes one wait for another."""
    combine: CombineSpec = CombineSpec()
    """How scores become a reward."""
    on_failure: Literal["mask", "zero", "dropGroup"] = "mask"
    """What a sample without a score means: ``mask`` leaves it out of its group's mean, deviation and loss, ``zero``
    gives it reward 0, ``dropGroup`` drops its group. Default mask: a broken judge must never look like a bad answer."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """A step with a larger share of samples without a score is not trained; its groups are admitted again, and after
    three such tries the job fails. Default 0.5."""
    retries: int = Field(default=2, ge=0, le=100)
    """Further attempts after an infrastructure failure, within ``timeoutSeconds``. Default 2. Data errors are never
    retried."""
    timeout_seconds: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds for one sample, all its scorers and retries, waiting for limiters excluded. Default 120."""
    group_deadline_seconds: float = Field(default=900.0, gt=0, le=864_000)
    """Seconds from a group's first published sample; then it is released if ``minSamplesPerGroup`` are scored, else
    dropped with its reason. Default 900."""
    min_samples_per_group: int = Field(default=2, ge=1, le=4096)
    """Scored samples that make a group worth training. Default 2, or 1 with ``samplesPerPrompt: 1``: a group of one
    has no spread to learn from."""
    workers: WorkersSpec = WorkersSpec()
    """The processes that run the scorers."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """What they may reach."""
