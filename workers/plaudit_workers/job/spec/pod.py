"""``pod``: the curated part of a Kubernetes pod that a user may set for a role; the same model for every role."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.section import Opaque, Quantity, SecretKey, Section

GPU = "nvidia.com/gpu"


class ResourcesSpec(Section):
    """Resource requests and limits of a container."""

    requests: dict[str, Quantity] = Field(default={})
    """Amounts that the scheduler reserves, such as ``{cpu: 4, memory: 16Gi}``. Default empty: the limits, else the
    cluster's default."""
    limits: dict[str, Quantity] = Field(default={})
    """The most that the container may use, such as ``{memory: 32Gi, nvidia.com/gpu: 2}``. Default empty: GPUs follow
    from the engine (``tensorParallelSize``, ``ranksPerPod``), the rest has no limit."""


class EnvironmentVariable(Section):
    """One environment variable: a value, or a key of a Secret."""

    name: str = Field(min_length=1)
    """Its name."""
    value: str = ""
    """Its value. Default empty."""
    secret: SecretKey | None = None
    """Source of its value instead of ``value``. Default: ``value``."""


class VolumeMount(Section):
    """Mount point of a volume in the container."""

    name: str = Field(min_length=1)
    """Name of a volume in ``volumes``."""
    mount_path: str = Field(min_length=1)
    """Absolute path in the container."""
    sub_path: str = ""
    """Folder of the volume to mount. Default empty: its root."""
    read_only: bool = False
    """Mount it read-only. Default false."""


class PodSpec(Section):
    """Overrides for the pods of a role. ``plaudit run`` uses only ``resources``."""

    image: str = ""
    """Container image. Default empty: the operator's image for the role."""
    resources: ResourcesSpec = ResourcesSpec()
    """CPU, memory and GPUs of one pod; under ``plaudit run`` they size Ray's placement group."""
    env: list[EnvironmentVariable] = Field(default=[])
    """Further environment variables."""
    env_from: list[Opaque] = Field(default=[])
    """ConfigMaps and Secrets whose keys become environment variables, in Kubernetes' own form."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that a node must have."""
    tolerations: list[Opaque] = Field(default=[])
    """Tolerated taints, in Kubernetes' own form."""
    priority_class_name: str = ""
    """Priority class of this role. Default empty: ``scheduling.priorityClassName``."""
    service_account_name: str = ""
    """Service account of the pods. Default empty: one of the job's own, without a token."""
    volumes: list[Opaque] = Field(default=[])
    """Further volumes, in Kubernetes' own form; the shared one (``spec.storage``) exists already."""
    volume_mounts: list[VolumeMount] = Field(default=[])
    """Their mount points in the main container."""
    shm_size: Quantity = ""
    """Size limit of ``/dev/shm``, such as ``8Gi``; it counts as the pod's memory, and tensor parallelism needs some.
    Default empty: the pod's memory limit."""
    affinity: Opaque = Field(default={})
    """Affinity, in Kubernetes' own form."""
    template: Opaque = Field(default={})
    """A strategic merge patch on the finished pod template, for everything that has no field here."""
