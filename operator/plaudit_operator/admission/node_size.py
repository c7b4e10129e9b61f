"""Refuse pods that no node can hold: a replica of the model, or the ranks of a pod, with more GPUs than a node has."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_operator.platform import Platform
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import Spec


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
            several = ", spread a replica over several pods with rollout.podsPerReplica" if why is _OF_ROLLOUT else ""
            yield Problem(
                field,
                f"asks for {gpus} GPUs in one pod; {why}, and nodes have at most {platform.gpus_per_node} GPUs",
                f"Give at most {platform.gpus_per_node}{several}, or correct the chart's jobDefaults.gpusPerNode",
            )


_OF_ROLLOUT = "a pod of a rollout is on one node"
