"""``pod``: the curated part of a Kubernetes pod that a user may set for a role; the same model for every role."""

from __future__ import annotations

from pydantic import Field

from plaudit_workers.job.spec.kubernetes.environment import EnvironmentVariable
from plaudit_workers.job.spec.section import Opaque, Quantity, Section

GPU = "nvidia.com/gpu"
"""Resource that counts GPUs unless another one is named."""
RESOURCE_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"


class ResourceClaim(Section):
    """A claim of dynamic resource allocation that the container uses."""

    name: str = Field(min_length=1, max_length=63)
    """Name of a claim in the pod's ``resourceClaims``."""
    request: str = Field(default="", max_length=63)
    """One request of the claim. Default empty: all."""


class ResourcesSpec(Section):
    """Resource requests and limits of a container."""

    requests: dict[str, Quantity] = Field(default={})
    """Amounts that the scheduler reserves, such as ``{cpu: 4, memory: 16Gi}``. Default empty: the limits, else the
    cluster's default."""
    limits: dict[str, Quantity] = Field(default={})
    """The most that the container may use, such as ``{memory: 32Gi, nvidia.com/gpu: 2}``. Default empty: GPUs follow
    from the engine (``tensorParallelSize``, ``ranksPerPod``), the rest has no limit."""
    claims: list[ResourceClaim] = Field(default=[])
    """Claims of ``resourceClaims`` that the container uses; with one, no GPUs follow from the engine. Default none."""


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


class TopologySpec(Section):
    """Placement of a role's pods in one domain of the network: a rack, a block, an NVLink domain."""

    required: str = Field(default="", max_length=253)
    """Node label whose value is the domain, such as ``topology.kubernetes.io/zone`` or ``nvidia.com/gpu.clique``: all
    pods of the role run on nodes with the same value. Default empty: no such demand."""
    preferred: str = Field(default="", max_length=253)
    """The same as a wish. Default empty: none."""


class PodSpec(Section):
    """Overrides for the pods of a role. ``plaudit run`` uses only ``resources``."""

    image: str = ""
    """Container image. Default empty: the operator's image for the role."""
    resources: ResourcesSpec = ResourcesSpec()
    """CPU, memory and GPUs of one pod; under ``plaudit run`` they size Ray's placement group."""
    gpu_resource: str = Field(default="", max_length=317, pattern=RESOURCE_NAME)
    """Resource that counts the role's GPUs, such as ``amd.com/gpu`` or ``nvidia.com/mig-3g.40gb``. Default empty: the
    operator's (``nvidia.com/gpu``, unless its chart's value ``gpuResource`` names another)."""
    resource_claims: list[Opaque] = Field(default=[])
    """Claims of dynamic resource allocation, in Kubernetes' own form, for ``resources.claims``. Default none."""
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
    topology: TopologySpec = TopologySpec()
    """Placement in one domain of the network: by Kueue's topology with a queue, else by affinity among the pods."""
    affinity: Opaque = Field(default={})
    """Affinity, in Kubernetes' own form."""
    template: Opaque = Field(default={})
    """A strategic merge patch on the finished pod template, for everything that has no field here."""

    def stated_gpus(self, default_resource: str = GPU) -> Quantity | None:
        """Return the number of GPUs in ``resources``; None if it is left to the engine.

        Args:
            default_resource: counts GPUs if ``gpuResource`` is empty.
        """
        names = (self.gpu_resource or default_resource, GPU)  # 0 of NVIDIA's means a CPU in any cluster
        amounts = (self.resources.limits, self.resources.requests)
        return next((each[name] for name in names for each in amounts if name in each), None)

    def uses_gpus(self, default_resource: str = GPU) -> bool:
        """Return True unless ``resources`` say 0 GPUs."""
        return str(self.stated_gpus(default_resource)) != "0"
