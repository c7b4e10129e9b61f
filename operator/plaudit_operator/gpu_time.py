"""Read ``status.cost``: the GPU time of a job until now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_operator.observed import seconds


def gpu_seconds(cost: Mapping[str, Any], now: float) -> dict[str, int]:
    """Return the seconds of GPU time of each role until ``now``, from ``status.cost``."""
    since_s = max(0, int(now) - int(seconds(cost.get("countedTime")) or now))
    return {role["name"]: int(role["gpuSeconds"]) + int(role["gpus"]) * since_s for role in cost.get("roles") or []}
