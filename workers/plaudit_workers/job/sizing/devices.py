"""GPUs by name: memory, dense bfloat16 FLOP/s and memory bandwidth, as their makers state them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU."""

    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second that it reads from its memory."""


DEVICES = {
    device.name: device
    for device in (
        Device("l4-24", 24e9, 121e12, 0.30e12),
        Device("a10g-24", 24e9, 70e12, 0.60e12),
        Device("a100-40", 40e9, 312e12, 1.56e12),
        Device("l40s-48", 48e9, 362e12, 0.86e12),
        Device("a100-80", 80e9, 312e12, 2.0e12),
        Device("h100-80", 80e9, 989e12, 3.35e12),
        Device("h200-141", 141e9, 989e12, 4.8e12),
        Device("b200-180", 180e9, 2250e12, 8.0e12),
        Device("mi300x-192", 192e9, 1307e12, 5.3e12),
    )
}
"""By name: model and gigabytes."""


def find_device(product: str) -> Device | None:
    """Return the GPU of a name or of a node label such as ``NVIDIA-H100-80GB-HBM3``; None if it is unknown."""
    parts = product.lower().replace("_", "-").replace(" ", "-").split("-")
    models = [device for device in DEVICES.values() if device.name.split("-")[0] in parts]
    sized = [device for device in models if {device.name.split("-")[1], f"{device.name.split('-')[1]}gb"} & set(parts)]
    return next(iter(sized or models), None)
