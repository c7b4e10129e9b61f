"""RLJob: the description of a job, on a laptop, on a Ray cluster and on Kubernetes.

One file per section. ``job.rules`` checks fields against each other, ``job.loading`` reads and validates the YAML.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from plaudit_workers.job.spec.algorithm import AlgorithmSpec
from plaudit_workers.job.spec.data import DataSpec, TrainDataSpec
from plaudit_workers.job.spec.environments import EnvironmentServerSpec
from plaudit_workers.job.spec.kubernetes.lifecycle import LifecycleSpec
from plaudit_workers.job.spec.kubernetes.metadata import Metadata
from plaudit_workers.job.spec.kubernetes.scheduling import SchedulingSpec
from plaudit_workers.job.spec.metrics import MetricsSpec
from plaudit_workers.job.spec.model import ModelSpec
from plaudit_workers.job.spec.rewards.reward import RewardSpec
from plaudit_workers.job.spec.rollout import RolloutSpec
from plaudit_workers.job.spec.section import MUTABLE, Section
from plaudit_workers.job.spec.storage import FilesSpec, StorageSpec
from plaudit_workers.job.spec.trainer import TrainerSpec
from plaudit_workers.job.spec.transport import TransportSpec

API_VERSION = "plaudit.dev/v1alpha1"
_MOST_ADAPTERS = 8
_CONTROLLER = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9._~]*[A-Za-z0-9])?)?$"

TRAINING_SECTIONS = ("model", "data", "algorithm", "rollout", "trainer")
"""Sections of which a job has all or none: a job without them only scores samples that others submit."""


def _no_model() -> ModelSpec:
    return ModelSpec.model_construct(source="")


def _no_data() -> DataSpec:
    return DataSpec.model_construct(train=TrainDataSpec.model_construct(path=""))


def _no_algorithm() -> AlgorithmSpec:
    return AlgorithmSpec.model_construct(steps=0)


class Spec(Section):
    """The specification of the job."""

    suspend: Annotated[bool, MUTABLE] = False
    """Release all GPUs and workers, keep Redis and volumes; false resumes from the checkpoint. Kubernetes only. Default
    false."""
    managed_by: str = Field(default="", max_length=63, pattern=_CONTROLLER)
    """Controller of the job, as a domain and a path, such as ``kueue.x-k8s.io/multikueue``. The operator ignores a job
    of another controller than ``plaudit.dev/rljob-operator``, and writes nothing into its status. Kubernetes only.
    Default empty: the operator."""
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    """Seed of every random choice: data order, sampling, weights of new layers. Default 1."""
    model: ModelSpec = Field(default_factory=_no_model)
    """The policy. Required unless the job only scores."""
    data: DataSpec = Field(default_factory=_no_data)
    """Prompts. Required unless the job only scores."""
    algorithm: AlgorithmSpec = Field(default_factory=_no_algorithm)
    """Steps, schedule, loss. Required unless the job only scores."""
    rollout: RolloutSpec = RolloutSpec()
    """The generating workers. Required (``rollout: {}`` will do) unless the job only scores."""
    reward: RewardSpec
    """Scorers and their combination."""
    trainer: TrainerSpec = TrainerSpec()
    """The training processes. Required (``trainer: {}`` will do) unless the job only scores."""
    environments: list[EnvironmentServerSpec] = Field(default=[], max_length=16)
    """Servers that agents and scorers use, such as sandboxes. Default none."""
    transport: TransportSpec = TransportSpec()
    """The Redis between the processes."""
    storage: StorageSpec = StorageSpec()
    """The shared volume."""
    files: FilesSpec = FilesSpec()
    """Files that travel with the job."""
    metrics: MetricsSpec = MetricsSpec()
    """Objectives, traces and stored samples."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """Queue, gang, priority."""
    lifecycle: Annotated[LifecycleSpec, MUTABLE] = LifecycleSpec()
    """Deadlines and cleanup."""

    @property
    def trains(self) -> bool:
        """Return True for a job that generates and trains, False for a reward service."""
        return not self.model_fields_set.isdisjoint({"rollout", "trainer"})

    @property
    def takes_turns(self) -> bool:
        """Return True if rollouts or served models free their GPUs while the trainer updates."""
        return self.trains and (self.rollout.sleep_during_updates or self.reward.sleeping_models)

    @property
    def adapters_at_once(self) -> int:
        """Return the number of adapters that an engine holds: of all versions that samples may have, at most 8."""
        return min(self.algorithm.max_staleness + 2, _MOST_ADAPTERS)

    @model_validator(mode="before")
    @classmethod
    def _one_sample_is_enough_for_one(cls, written: object) -> object:
        """Default ``minSamplesPerGroup`` to 1 where a group has one sample."""
        if not isinstance(written, dict):
            return written
        algorithm, reward = written.get("algorithm"), written.get("reward")
        if not isinstance(algorithm, dict) or not isinstance(reward, dict):
            return written
        given = {"minSamplesPerGroup", "min_samples_per_group"} & reward.keys()
        if given or algorithm.get("samplesPerPrompt", algorithm.get("samples_per_prompt")) != 1:
            return written
        return {**written, "reward": {**reward, "minSamplesPerGroup": 1}}


class RLJob(Section):
    """A job: name and specification."""

    api_version: Literal["plaudit.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["RLJob"]
    """Kind of the document."""
    metadata: Metadata
    """The job's name."""
    spec: Spec
    """The specification of the job."""
