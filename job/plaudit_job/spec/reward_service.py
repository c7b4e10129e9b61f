"""RewardService: a lasting reward service on Kubernetes, whose scorers, models and images may change.

Its sections are those of an RLJob that only scores. Processes read it as such a job (``as_job``); only the operator
treats it differently: an RLJob is fixed once it is admitted, a change of a RewardService is rolled out.
"""

from __future__ import annotations

from typing import Literal

from plaudit_job.spec.rewards import RewardSpec
from plaudit_job.spec.rljob import FilesSpec, Metadata, MetricsSpec, RLJob, Spec, StorageSpec
from plaudit_job.spec.section import Section
from plaudit_job.spec.transport import TransportSpec

KIND = "RewardService"
FIXED_SECTIONS = ("transport", "storage")
"""Sections that cannot change while a service exists: its Redis and its volume."""


class RewardServiceSpec(Section):
    """The specification of the service. Every field may change but ``transport`` and ``storage``."""

    suspend: bool = False
    """Release workers, gateways and reward models, keep Redis and volumes. Default false."""
    reward: RewardSpec
    """Scorers, their combination, workers and gateways."""
    transport: TransportSpec = TransportSpec()
    """The Redis between the processes. It cannot change."""
    storage: StorageSpec = StorageSpec()
    """The shared volume. It cannot change."""
    files: FilesSpec = FilesSpec()
    """Files that the scorers use. They are read when the spec changes: to change code, name another ConfigMap."""
    metrics: MetricsSpec = MetricsSpec()
    """Objectives, traces and stored samples."""


class RewardService(Section):
    """A reward service: name and specification."""

    api_version: Literal["plaudit.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["RewardService"]
    """Kind of the document."""
    metadata: Metadata
    """The service's name."""
    spec: RewardServiceSpec
    """The specification of the service."""

    def as_job(self) -> RLJob:
        """Return the job that its processes run."""
        sections = {name: getattr(self.spec, name) for name in self.spec.model_fields_set}
        return RLJob(api_version=self.api_version, kind="RLJob", metadata=self.metadata, spec=Spec(**sections))


def document_model(written: object) -> type[RLJob] | type[RewardService]:
    """Return the model of a written document, by its ``kind``; that of an RLJob unless it is a RewardService."""
    is_service = isinstance(written, dict) and written.get("kind") == KIND
    return RewardService if is_service else RLJob


def validated_job(written: object) -> RLJob:
    """Validate a document with the names of the YAML form, and return its job."""
    document = document_model(written).model_validate(written, by_alias=True, by_name=False)
    return document.as_job() if isinstance(document, RewardService) else document
