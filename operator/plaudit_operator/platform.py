"""Apply a platform's defaults to the pods of all jobs, and refuse pods that no node can hold.

The defaults are the chart's ``jobDefaults``, for all namespaces and for single ones. A job's own ``pod`` section comes
before them. They are frozen with a job when it is admitted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec

from plaudit_job.problem import Problem
from plaudit_job.spec.pod import GPU
from plaudit_job.spec.rljob import Spec

Manifest = dict[str, Any]
_OF_ROLLOUT = "a pod of a rollout is on one node"


class Platform(msgspec.Struct, frozen=True, rename="camel"):
    """Hold the defaults for the pods of a job."""

    run_as_user: int = 1000
    """uid and gid of all processes of a job, so that they share a volume; 0: the cluster chooses (OpenShift)."""
    gpu_resource: str = GPU
    """Resource that counts GPUs."""
    gpus_per_node: int = 8
    """GPUs of the largest nodes: a pod with more is refused, because it would wait for ever."""
    runtime_class_name: str = ""
    """Runtime class. Empty: the cluster's default."""
    node_selector: dict[str, str] = {}
    """Labels that a node must have."""
    tolerations: list[Manifest] = []
    """Tolerated taints."""
    env: list[Manifest] = []
    """Environment variables of the processes, such as NCCL's."""
    labels: dict[str, str] = {}
    """Labels of pods."""
    annotations: dict[str, str] = {}
    """Annotations of pods."""
    image_pull_secrets: list[str] = []
    """Names of Secrets in the job's namespace."""
    service_account_annotations: dict[str, str] = {}
    """Annotations of the service account of a job's pods, for the identities of a cloud."""


class _Own(Platform, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Hold the defaults of one namespace, as an administrator writes them."""


class _Defaults(Platform, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Hold the defaults of all namespaces, as an administrator writes them."""

    namespaces: dict[str, msgspec.Raw] = {}


def check_platform(text: str) -> None:
    """Check the JSON of ``jobDefaults``; raise ``ValueError``, which names the field, if it has another form."""
    for namespace in ["", *_decoded(text).namespaces]:
        platform_of(text, namespace)


@functools.lru_cache(maxsize=256)
def platform_of(text: str, namespace: str) -> Platform:
    """Return a namespace's defaults in ``jobDefaults``: its lists are added to the common ones, its maps merged in."""
    common = _decoded(text)
    merged = {field: getattr(common, field) for field in Platform.__struct_fields__}
    own = common.namespaces.get(namespace)
    if own is None:
        return Platform(**merged)
    try:
        theirs = msgspec.json.decode(own, type=_Own)
    except msgspec.ValidationError as error:
        raise ValueError(f"namespaces.{namespace}: {error}") from None
    written = msgspec.json.decode(own)
    for field, alias in zip(Platform.__struct_fields__, Platform.__struct_encode_fields__, strict=True):
        if alias in written:
            merged[field] = _merge(merged[field], getattr(theirs, field))
    return Platform(**merged)


def _decoded(text: str) -> _Defaults:
    return msgspec.json.decode(text or "{}", type=_Defaults)


def _merge(common: Any, own: Any) -> Any:
    if isinstance(common, dict):
        return common | own
    return common + own if isinstance(common, list) else own


def beyond_a_node(spec: Spec, platform: Platform) -> Iterator[Problem]:
    """Yield a problem for each pod that asks for more GPUs than the largest nodes have."""
    trainer = spec.trainer
    roles = [
        ("spec.rollout.engine.tensorParallelSize", rollout.gpus_per_pod, _OF_ROLLOUT)
        for rollout in (spec.rollout.by_group.values() if spec.trains else ())
        if rollout.pod.uses_gpus(platform.gpu_resource)
    ]
    if spec.trains and trainer.pod.uses_gpus(platform.gpu_resource):
        ranks = min(trainer.ranks, trainer.ranks_per_pod)
        roles.append(("spec.trainer.ranksPerPod", ranks, "the ranks of a pod share a node"))
    for field, gpus, why in roles:
        if gpus > platform.gpus_per_node:
            several = ", spread a replica over several pods with rollout.podsPerReplica" if why == _OF_ROLLOUT else ""
            yield Problem(
                field,
                f"asks for {gpus} GPUs in one pod; {why}, and nodes have at most {platform.gpus_per_node} GPUs",
                f"Give at most {platform.gpus_per_node}{several}, or correct the chart's jobDefaults.gpusPerNode",
            )
