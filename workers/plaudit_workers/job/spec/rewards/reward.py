"""``spec.reward``: the rewards of finished samples; the scorers are in ``scorers.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plaudit_workers.job.spec.kubernetes.pod import PodSpec
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec, ServiceSpec
from plaudit_workers.job.spec.section import MUTABLE, FilePath, Opaque, Section


class CombineSpec(Section):
    """The combination of a sample's scores into one reward."""

    kind: Literal["weightedSum", "python"] = "weightedSum"
    """``weightedSum``: the sum of weight times value over the scorers that have a value. ``python``: your function,
    from the scores by name to a number. Default weightedSum."""
    normalize: Literal["none", "group"] = "none"
    """``group``: each scorer's values are normalised within their group before they are weighted and summed (GDPO), so
    that a scorer counts by its weight, not by the spread of its values. Requires ``advantage`` reinforcePlusPlus (as in
    GDPO, which normalises over the batch) or drGrpo: neither divides by the group's spread again. Default none."""
    path: FilePath = ""
    """Python file, for ``python``: relative to the job file; on Kubernetes a file of ``spec.files``, or an absolute
    path on the volume or in the image."""
    function: str = ""
    """The function in it, for ``python``: ``(values) -> float``, or ``(values, sample)``; ``values`` are the scorers'
    values by name."""


class AutoscalingSpec(Section):
    """Autoscaling of the reward workers by the queue. ``plaudit run`` ignores it and starts ``workers.replicas``."""

    provider: Literal["keda", "hpa"] = "keda"
    """``keda``: by samples waiting and in work; ``hpa``: by CPU. Default keda: most scorers wait rather than compute.
    """
    min_replicas: int = Field(default=1, ge=0, le=10_000)
    """The fewest. Default 1: with 0, the first samples of a step wait for a pod."""
    max_replicas: int = Field(default=32, ge=1, le=10_000)
    """The most. Default 32."""
    samples_per_replica: int = Field(default=128, ge=1, le=1_000_000)
    """Target of samples, waiting or in work, for each worker. Default 128: half of ``maxConcurrentSamples``."""
    scale_down_after_seconds: int = Field(default=300, ge=0, le=3600)
    """Seconds that fewer workers must have sufficed before some are removed. Default 300: Kubernetes' default, long
    enough for the pause between two steps."""


class WorkersSpec(Section):
    """The processes that run the scorers."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=1, le=10_000)
    """Number of reward workers. Default 1: one worker handles hundreds of slow calls."""
    max_concurrent_samples: int = Field(default=256, ge=1, le=100_000)
    """Samples that one worker scores at a time. Default 256: waiting for a judge needs no thread."""
    processes: int = Field(default=2, ge=1, le=1024)
    """Child processes of one worker, for scorers with ``isolation: process`` or ``thread``. Default 2."""
    autoscaling: Annotated[AutoscalingSpec | None, MUTABLE] = None
    """Scale with the queue. Default: a fixed number."""
    pod: PodSpec = PodSpec()
    """Pods of the reward workers."""


class CanarySpec(Section):
    """Another reward service, such as one with the next version of the scorers, that is compared with this one."""

    service: ServiceSpec
    """The service. It gets copies of samples; its results are compared and counted, never answered."""
    share: float = Field(default=0.1, gt=0, le=1)
    """Share of the samples that are copied; groups are not. Default 0.1."""


class GatewaySpec(Section):
    """The HTTP front of a job that only scores; a job with a trainer has none."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=0, le=100)
    """Number of gateways; any of them answers for any sample. 0: clients reach Redis only. ``plaudit run`` starts at
    most one. Default 1."""
    token_secret: str = Field(default="", max_length=253)
    """Name of a Secret with a token for each caller, its keys the callers' names; jobs that refer to the service by
    name use the key ``client``. Kubernetes only. Default empty: the operator makes one with the caller ``client``."""
    samples_per_minute: int | None = Field(default=None, ge=1)
    """Samples that each token may submit in a minute, over all gateways; beyond it requests get 429. Default: no limit.
    """
    canary: CanarySpec | None = None
    """Compare this service with another one. Default: none."""
    port: int = Field(default=0, ge=0, le=65_535)
    """TCP port under ``plaudit run``; on Kubernetes it is 8710. Default 0: a free one, kept by ``--resume``."""
    pod: PodSpec = PodSpec()
    """Pods of the gateways."""


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
    """Destinations of reward workers besides Redis, DNS, metrics and the job's own reward models."""

    egress: list[EgressRule] = Field(default=[])
    """Judges and sandboxes. Default empty: none."""


class RewardSpec(Section):
    """Scorers, how they are combined, and what a failure means."""

    scorers: list[ScorerSpec] = Field(min_length=1, max_length=32)
    """The scorers of each sample. They run concurrently, unless ``when`` makes one wait for another."""
    combine: CombineSpec = CombineSpec()
    """The combination of scores into a reward."""
    on_failure: Literal["mask", "zero", "dropGroup"] = "mask"
    """How a sample without a score is treated: ``mask`` leaves it out of its group's mean, deviation and loss, ``zero``
    counts the scorer that failed as value 0, ``dropGroup`` drops its group. Default mask: a broken judge must never
    look like a bad answer."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """A step with a larger share of samples without a score is not trained; its groups are admitted again, and after
    three attempts the job fails. Default 0.5."""
    retries: int = Field(default=2, ge=0, le=100)
    """Further attempts after an infrastructure failure, within ``timeoutSeconds``. Default 2. Data errors are never
    retried."""
    timeout_seconds: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds for one sample, all its scorers and retries, waiting for limiters excluded. Default 120."""
    group_deadline_seconds: float = Field(default=900.0, gt=0, le=864_000)
    """Seconds from a group's first published sample to its release: with ``minSamplesPerGroup`` scored samples it is
    trained, else dropped with its reason. Default 900."""
    min_samples_per_group: int = Field(default=2, ge=1, le=4096)
    """Fewest scored samples with which a group is trained. Default 2, or 1 with ``samplesPerPrompt: 1``: a group of one
    has no spread to learn from."""
    workers: WorkersSpec = WorkersSpec()
    """The processes that run the scorers."""
    gateway: GatewaySpec = GatewaySpec()
    """The HTTP front, for a job that only scores."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Their network access."""

    @property
    def model_scorers(self) -> list[ScorerSpec]:
        """Return the scorers whose models the job serves."""
        return [scorer for scorer in self.scorers if scorer.served is not None]

    @property
    def sleeping_models(self) -> bool:
        """Return True if a served model frees its GPUs while the trainer updates."""
        return any(each.served is not None and each.served.sleep_during_updates for each in self.scorers)

    @property
    def environment_weights(self) -> dict[str, float]:
        """Return the weights of the scorers that read the reward of tools or environment, by name."""
        return {scorer.name: scorer.weight for scorer in self.scorers if scorer.kind == "environment"}
