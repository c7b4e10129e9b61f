"""Check the ``pod`` sections of a job."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.kubernetes.environment import EnvironmentVariable
from plaudit_workers.job.spec.kubernetes.pod import GPU, PodSpec
from plaudit_workers.job.spec.rljob import Spec


def pods_of(spec: Spec) -> Iterator[tuple[str, PodSpec]]:
    """Yield every ``pod`` section, with the path under ``spec`` of the section that it belongs to."""
    yield "rollout", spec.rollout.pod
    for index, group in enumerate(spec.rollout.groups):
        yield f"rollout.groups[{index}]", group.pod
    yield "reward.workers", spec.reward.workers.pod
    yield "trainer", spec.trainer.pod
    yield "transport.managed", spec.transport.managed.pod
    yield "metrics", spec.metrics.pod
    for index, server in enumerate(spec.environments):
        yield f"environments[{index}]", server.pod
    for index, scorer in enumerate(spec.reward.scorers):
        if scorer.served:
            yield f"reward.scorers[{index}].{scorer.served_field}", scorer.served.pod


def environment_problems(spec: Spec) -> Iterator[Problem]:
    """Yield variables with no single source of their value."""
    for section, pod in pods_of(spec):
        for index, variable in enumerate(pod.env):
            yield from _variable(f"spec.{section}.pod.env[{index}]", variable)


def _variable(field: str, variable: EnvironmentVariable) -> Iterator[Problem]:
    source = variable.value_from
    if source is None:
        return
    if variable.value:
        yield Problem(
            f"{field}.value", f"{variable.value!r} is given beside valueFrom", "Give one of value and valueFrom"
        )
    given = sorted(type(source).model_fields[name].alias or name for name in source.model_fields_set)
    if len(given) != 1:
        yield Problem(
            f"{field}.valueFrom",
            f"has {' and '.join(given) or 'no source'}",
            "Give exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef",
        )


def gpu_problems(spec: Spec) -> Iterator[Problem]:
    """Yield numbers of GPUs that contradict the engine or the ranks."""
    trainer = spec.trainer
    ranks = min(trainer.ranks, trainer.ranks_per_pod)
    yield from _gpu_mismatch("spec.trainer", trainer.pod, ranks, "ranks of a pod", "spec.trainer.ranksPerPod")
    for index, rollout in enumerate(spec.rollout.by_group.values()):
        section = f"spec.rollout.groups[{index}]" if spec.rollout.groups else "spec.rollout"
        source = "tensorParallelSize" if rollout.gpus_per_pod == rollout.engine.tensor_parallel_size else _PER_POD
        yield from _gpu_mismatch(
            section, rollout.pod, rollout.gpus_per_pod, source, "spec.rollout.engine.tensorParallelSize"
        )


_PER_POD = "tensorParallelSize × pipelineParallelSize ÷ podsPerReplica"


def group_problems(spec: Spec) -> Iterator[Problem]:
    """Yield contradictions between rollout groups, and GPUs that the pods of a replica cannot share evenly."""
    rollout, names = spec.rollout, [group.name for group in spec.rollout.groups]
    for index, (name, each) in enumerate(rollout.by_group.items()):
        section = f"spec.rollout.groups[{index}]" if name else "spec.rollout"
        if each.engine.gpus % each.pods_per_replica:
            yield Problem(
                f"{section}.podsPerReplica",
                f"{each.pods_per_replica} pods cannot share {each.engine.gpus} GPUs (tensorParallelSize × "
                "pipelineParallelSize) evenly",
                "Give a number of pods that divides the GPUs",
                also=("spec.rollout.engine.tensorParallelSize",),
            )
    if not names:
        return
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"spec.rollout.groups[{index}].name", f"{name!r} is used twice", "Give each its own name")
    if rollout.replicas != 1:
        yield Problem(
            "spec.rollout.replicas", "counts workers without groups, but groups are given", "Give each group replicas"
        )
    if not rollout.pods:
        yield Problem(
            "spec.rollout.groups", "have no replicas at all", "Give one of them at least 1, or set spec.suspend"
        )


def _gpu_mismatch(section: str, pod: PodSpec, derived: int, source: str, source_field: str) -> Iterator[Problem]:
    for kind, amounts in (("limits", pod.resources.limits), ("requests", pod.resources.requests)):
        for name in dict.fromkeys((pod.gpu_resource or GPU, GPU)):
            stated = amounts.get(name)
            if stated is not None and str(stated) not in {"0", str(derived)}:
                yield Problem(
                    f"{section}.pod.resources.{kind}",
                    f"{name}: {stated} contradicts {source} {derived}",
                    f"Give {derived} (0 for a CPU), or remove it: the number of GPUs follows from the engine",
                    also=(source_field,),
                )
