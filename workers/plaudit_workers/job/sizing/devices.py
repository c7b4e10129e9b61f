"""GPUs by name: memory, dense FLOP/s and memory bandwidth, as their makers state them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Describe one GPU."""

    name: str
    """Model, variant if it has several, gigabytes; joined by hyphens."""
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations a second."""
    float32_flops: float
    """Float32 operations a second. The trainer does not enable TF32."""
    bandwidth: float
    """Bytes a second that it reads from its memory."""


DEVICES = {
    device.name: device
    for device in (
        Device("l4-24", 24e9, 121e12, 30.3e12, 0.30e12),
        Device("a10-24", 24e9, 125e12, 31.2e12, 0.60e12),
        Device("a10g-24", 24e9, 70e12, 31.5e12, 0.60e12),
        Device("a100-40", 40e9, 312e12, 19.5e12, 1.56e12),
        Device("l40-48", 48e9, 181e12, 90.5e12, 0.86e12),
        Device("l40s-48", 48e9, 362e12, 91.6e12, 0.86e12),
        Device("a100-80", 80e9, 312e12, 19.5e12, 2.0e12),
        Device("h100-80", 80e9, 989e12, 67e12, 3.35e12),
        Device("h100-pcie-80", 80e9, 756e12, 51e12, 2.0e12),
        Device("h100-nvl-94", 94e9, 835e12, 60e12, 3.9e12),
        Device("h800-80", 80e9, 989e12, 67e12, 3.35e12),
        Device("h800-pcie-80", 80e9, 756e12, 51e12, 2.0e12),
        Device("h20-96", 96e9, 148e12, 44e12, 4.0e12),
        Device("gh200-96", 96e9, 989e12, 67e12, 4.0e12),
        Device("gh200-144", 144e9, 989e12, 67e12, 4.9e12),
        Device("h200-141", 141e9, 989e12, 67e12, 4.8e12),
        Device("h200-nvl-141", 141e9, 835e12, 60e12, 4.8e12),
        Device("b200-180", 180e9, 2250e12, 75e12, 8.0e12),
        Device("mi300x-192", 192e9, 1307e12, 163e12, 5.3e12),
    )
}
"""By name. Without a variant: the SXM module of GPUs that have one."""


def find_device(product: str) -> Device | None:
    """Return the GPU of a name or of a node label such as ``NVIDIA-H100-80GB-HBM3``; None if it is unknown.

    Several may have the model's name: first counts the variant, then the memory. A slice of a GPU (MIG) is unknown.
    """
    parts = set(product.lower().replace("_", "-").replace(" ", "-").split("-"))
    if "mig" in parts:
        return None
    known = [device for device in DEVICES.values() if parts.issuperset(device.name.split("-")[:-1])]
    return max(known, key=lambda device: _likeness(device, parts), default=None)


def _likeness(device: Device, parts: set[str]) -> tuple[int, bool]:
    *variant, gigabytes = device.name.split("-")
    return len(variant), not parts.isdisjoint({gigabytes, f"{gigabytes}gb", f"{gigabytes}g"})
