"""``pod``: the curated part of a Kubernetes pod that a user may set for a role; the same model for every role."""

from __future__ import annotations

import re
from decimal import Decimal

from pydantic import Field

from plaudit_job.spec.section import Opaque, Quantity, Section


class KeyReference(Section):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the object."""
    key: str = Field(min_length=1, max_length=253)
    """Key with the value."""
    optional: bool = False
    """Start the container even if object or key is missing. Default false."""


class FieldReference(Section):
    """A field of the pod."""

    field_path: str = Field(min_length=1, max_length=512)
    """The field, such as ``status.podIP`` or ``metadata.labels['team']``."""


class ResourceReference(Section):
    """An amount of a container's resources."""

    resource: str = Field(min_length=1, max_length=253)
    """The resource, such as ``limits.memory``."""
    container_name: str = Field(default="", max_length=63)
    """Container of the pod. Default empty: the one of the variable."""
    divisor: Quantity = ""
    """Unit of the value, such as ``1Mi``. Default empty: 1."""


class EnvironmentSource(Section):
    """Source of a variable's value: exactly one of the fields."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""
    field_ref: FieldReference | None = None
    """A field of the pod."""
    resource_field_ref: ResourceReference | None = None
    """An amount of a container's resources."""


class EnvironmentVariable(Section):
    """One environment variable, in the form of Kubernetes' ``EnvVar``."""

    name: str = Field(min_length=1)
    """Its name."""
    value: str = ""
    """Its value. Default empty."""
    value_from: EnvironmentSource | None = None
    """Source of its value instead of ``value``. Default: ``value``."""


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
    """CPU, memory and GPUs of one pod; under ``plaudit run`` they size Ray's placement group, where there is one."""
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

        ``default_resource`` counts GPUs if ``gpuResource`` is empty.
        """
        names = (self.gpu_resource or default_resource, GPU)  # 0 of NVIDIA's means a CPU in any cluster
        amounts = (self.resources.limits, self.resources.requests)
        return next((each[name] for name in names for each in amounts if name in each), None)

    def uses_gpus(self, default_resource: str = GPU) -> bool:
        """Return True unless ``resources`` say 0 GPUs."""
        return str(self.stated_gpus(default_resource)) != "0"


_QUANTITY = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e([+-]?[0-9]{1,3})|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?)", re.ASCII
)
_FACTORS = {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_FACTORS |= {unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)}
_FACTORS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}


def quantity(value: object) -> Decimal:
    """Return a quantity as a number: ``0.5`` and ``500m`` are equal."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is no quantity; write for example 2, 500m or 1.5Gi")
    number, exponent, unit = found.groups()
    return Decimal(number).scaleb(int(exponent)) if exponent else Decimal(number) * _FACTORS[unit or ""]
