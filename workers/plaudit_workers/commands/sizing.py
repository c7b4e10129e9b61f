"""Decide if a job fits its GPUs, and find the nearest job that does. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from pydantic.alias_generators import to_camel

from plaudit_job.model_shape import Device, ModelShape, divides_heads
from plaudit_job.problem import Problem
from plaudit_job.rules.job import rule_problems
from plaudit_job.spec.rljob import Spec, TrainerSpec
from plaudit_workers.commands.memory import cache_tokens, longest_sample, resident_bytes, rollout_parts, trainer_parts

_MOST_GPUS = 1024
Changes = dict[str, Any]
"""Field of a section → new value."""


def fit_problems(spec: Spec, shape: ModelShape, device: Device) -> list[Problem]:
    """Return why a job cannot fit, each with the nearest job that can."""
    rules = (_trainer, _rollout, _turns)
    return [*_heads(spec, shape), *(problem for rule in rules for problem in rule(spec, shape, device))]


def fits_trainer(spec: Spec, shape: ModelShape, device: Device) -> bool:
    """Return True if one rank's memory fits its GPU."""
    return sum(part.num_bytes for part in trainer_parts(spec, shape)) <= device.memory_bytes


def fits_rollout(spec: Spec, shape: ModelShape, device: Device) -> bool:
    """Return True if a rollout's cache holds the longest sample."""
    return cache_tokens(spec, shape, device.memory_bytes) >= longest_sample(spec)


def nearest_trainer(spec: Spec, shape: ModelShape, device: Device) -> Changes | None:
    """Return the changes of ``trainer`` after which it fits, and which the rules of fields allow.

    The cheapest first: recomputation, a shorter micro-batch, sequence parallelism, no replicas, more ranks.
    """
    for changes in _trainer_changes(spec, shape):
        changed = _with_trainer(spec, changes)
        if fits_trainer(changed, shape, device) and not new_problems(spec, changed):
            return {name: value for name, value in changes.items() if value != getattr(spec.trainer, name)}
    return None


def nearest_rollout(spec: Spec, shape: ModelShape, device: Device) -> Changes | None:
    """Return the tensor parallelism with which a rollout fits, and which the rules of fields allow."""
    size = spec.rollout.engine.tensor_parallel_size
    while size <= min(_MOST_GPUS, shape.heads):
        changes = {"tensor_parallel_size": size}
        changed = _with_engine(spec, changes)
        fits = shape.heads % size == 0 and fits_rollout(changed, shape, device)
        if fits and not new_problems(spec, changed):
            return changes
        size *= 2
    return None


def new_problems(spec: Spec, changed: Spec) -> list[Problem]:
    """Return what the rules of fields refuse in a changed job but not in the job.

    The GPUs that a pod states are not among it: the remedy says that they change.
    """
    known = {problem.field for problem in rule_problems(spec)}
    return [each for each in rule_problems(changed) if each.field not in known and not _states_gpus(each)]


def _states_gpus(problem: Problem) -> bool:
    return ".pod.resources." in problem.field


def _with_trainer(spec: Spec, changes: Changes) -> Spec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})


def _with_engine(spec: Spec, changes: Changes) -> Spec:
    engine = spec.rollout.engine.model_copy(update=changes)
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engine": engine})})


def _trainer_changes(spec: Spec, shape: ModelShape) -> Iterator[Changes]:
    trainer, longest = spec.trainer, longest_sample(spec)
    for ranks in _numbers_of_ranks(trainer):
        most = 1 if spec.data.images else ranks  # ranks that share a row cannot share its images
        sizes = [size for size in range(1, most + 1) if _parallel(size, ranks, trainer, shape)]
        shards = dict.fromkeys([trainer.fsdp_size, trainer.fsdp_size and ranks])
        for fsdp_size, size, recompute in product(shards, sizes, (trainer.activation_checkpointing, "layers")):
            for tokens in (trainer.micro_batch_tokens, min(-(-longest // size), trainer.micro_batch_tokens)):
                yield {
                    "ranks": ranks,
                    "strategy": "fsdp2" if ranks > 1 else trainer.strategy,
                    "fsdp_size": fsdp_size,
                    "sequence_parallel_size": size,
                    "activation_checkpointing": recompute,
                    "micro_batch_tokens": tokens,
                }


def _numbers_of_ranks(trainer: TrainerSpec) -> Iterator[int]:
    """Yield the job's number of ranks, then about twice the one before: up to a full pod, then of full pods."""
    ranks, pod = trainer.ranks, trainer.ranks_per_pod
    while ranks <= _MOST_GPUS:
        yield ranks
        ranks = min(2 * ranks, pod) if ranks < pod else -(-2 * ranks // pod) * pod


def _parallel(size: int, ranks: int, trainer: TrainerSpec, shape: ModelShape) -> bool:
    return (
        size >= trainer.sequence_parallel_size
        and ranks % size == 0
        and divides_heads(size, shape.heads, shape.key_value_heads)
    )


def _heads(spec: Spec, shape: ModelShape) -> Iterator[Problem]:
    size = spec.trainer.sequence_parallel_size
    if not divides_heads(size, shape.heads, shape.key_value_heads):
        smaller = (fewer for fewer in range(size - 1, 0, -1) if size % fewer == 0)
        fitting = next(fewer for fewer in smaller if divides_heads(fewer, shape.heads, shape.key_value_heads))
        yield Problem(
            "spec.trainer.sequenceParallelSize",
            f"{size} does not divide the model's {shape.heads} attention heads, or its {shape.key_value_heads} "
            "key/value heads neither divide it nor are divided by it",
            f"Set it to {fitting}",
        )


def _trainer(spec: Spec, shape: ModelShape, device: Device) -> Iterator[Problem]:
    if not fits_trainer(spec, shape, device):
        parts = trainer_parts(spec, shape)
        needed = sum(part.num_bytes for part in parts)
        otherwise = "Train shorter samples" if spec.data.images else "Train adapters (trainer.lora), or shorter samples"
        listed = ", ".join(f"{part.name} {_gb(part.num_bytes)}" for part in parts if part.num_bytes >= 1e8)
        yield Problem(
            "spec.trainer.ranks",
            f"each of {spec.trainer.ranks} ranks needs {_gb(needed)} of {device.name}'s {_gb(device.memory_bytes)} GB "
            f"({listed})",
            _remedy(spec, "trainer", nearest_trainer(spec, shape, device), otherwise),
            also=("spec.trainer.microBatchTokens", "spec.trainer.activationCheckpointing"),
        )


def _rollout(spec: Spec, shape: ModelShape, device: Device) -> Iterator[Problem]:
    if spec.rollout.engine.gpus and not fits_rollout(spec, shape, device):
        tokens = cache_tokens(spec, shape, device.memory_bytes)
        longest = longest_sample(spec)
        used = sum(part.num_bytes for part in rollout_parts(spec, shape))
        yield Problem(
            "spec.rollout.engine.tensorParallelSize",
            f"with {spec.rollout.engine.tensor_parallel_size}, each GPU needs {_gb(used)} GB before the KV cache, "
            f"which holds {max(0, int(tokens)):,} tokens of {device.name}; the longest sample has {longest:,}",
            _remedy(
                spec, "rollout.engine", nearest_rollout(spec, shape, device), "Shorten samples, or use a larger GPU"
            ),
            also=("spec.rollout.engine.maxModelLength",),
        )


def _turns(spec: Spec, shape: ModelShape, device: Device) -> Iterator[Problem]:
    share = spec.rollout.engine.gpu_memory_utilization
    resident = resident_bytes(spec, shape)
    free_share = 1 - resident / device.memory_bytes
    if spec.rollout.sleep_during_updates and share > free_share:
        largest = math.floor(100 * free_share) / 100
        lower = [f"Set it to at most {largest}"] if largest > 0 else []
        several = ["set trainer.cpuOffload"] if spec.trainer.ranks > 1 else []
        ranks = "use more ranks" if several else "use more ranks with strategy fsdp2"
        more = [] if spec.trainer.cpu_offload else [ranks if lower else ranks.capitalize(), *several]
        yield Problem(
            "spec.rollout.engine.gpuMemoryUtilization",
            f"{share} leaves {_gb((1 - share) * device.memory_bytes)} GB of {device.name} to the trainer, of which "
            f"{_gb(resident)} stay there while rollouts sample (sleepDuringUpdates)",
            ", or ".join([*lower, *more]),
            also=("spec.rollout.sleepDuringUpdates", "spec.trainer.cpuOffload"),
        )


def _remedy(spec: Spec, section: str, changes: Changes | None, otherwise: str) -> str:
    if changes is None:
        return otherwise
    listed = ", ".join(f"{to_camel(name)}: {value}" for name, value in changes.items())
    changed = _with_trainer(spec, changes) if section == "trainer" else _with_engine(spec, changes)
    stated = dict.fromkeys(problem.field for problem in rule_problems(changed) if _states_gpus(problem))
    removed = f", and no GPUs in {' and '.join(stated)}, because their number follows" if stated else ""
    return f"The nearest job that fits has {section}: {{{listed}}}{removed}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"
