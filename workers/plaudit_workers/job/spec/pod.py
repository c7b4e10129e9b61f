"""``pod``: the curated part of a Kubernetes pod that a user may set for a role; the same model for every role."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.section import Opaque, Quantity, SecretKey, Section

GPU = "nvidia.com/gpu"


class ResourcesSpec(Section):
    """What a container asks for and may use."""

    requests: dict[str, Quantity] = Field(default={})
    """What the scheduler sets aside, such as ``{cpu: 4, memory: 16Gi}``. Default empty: the limits, else the cluster's
    default."""
    limits: dict[str, Quantity] = Field(default={})
    """What the container may use at most, such as ``{memory: 32Gi, nvidia.com/gpu: 2}``. Default empty: GPUs follow
    from the engine (``tensorParallelSize``, ``ranksPerPod``), the rest is unbounded."""


class EnvironmentVariable(Section):
    """One environment variable: a value, or a key of a Secret."""

    name: str = Field(min_length=1)
    """Its name."""
    value: str = ""
    """Its value. Default empty."""
    secret: SecretKey | None = None
    """Where its value comes from instead. Default: ``value``."""


class VolumeMount(Section):
    """Where a volume appears in the container."""

    name: str = Field(min_length=1)
    """Name of a volume in ``volumes``."""
    mount_path: str = Field(min_length=1)
    """Absolute path in the container."""
    sub_path: str = ""
    """Folder of the volume to mount. Default empty: its root."""
    read_only: bool = False
    """Mount without the right to write. Default false."""


class PodSpec(Section):
    """How a role's pods differ from Plaudit's own choice. Under ``plaudit run`` only ``resources`` count."""

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
    """Taints that the pods stand, in Kubernetes' own form."""
    priority_class_name: str = ""
    """Priority class of this role. Default empty: ``scheduling.priorityClassName``."""
    service_account_name: str = ""
    """Service account of the pods. Default empty: one of the job's own, without a token."""
    volumes: list[Opaque] = Field(default=[])
    """Further volumes, in Kubernetes' own form; the shared one (``spec.storage``) is there already."""
    volume_mounts: list[VolumeMount] = Field(default=[])
    """Where they appear in the main container."""
    shm_size: Quantity = ""
    """Most that ``/dev/shm`` may hold, such as ``8Gi``; it counts as the pod's memory, and tensor parallelism needs
    some. Default empty: what the pod's memory limit leaves."""
    affinity: Opaque = Field(default={})
    """Affinity, in Kubernetes' own form."""
    template: Opaque = Field(default={})
    """Merged over the finished pod template the way a strategic merge does it; for all that has no field here."""
