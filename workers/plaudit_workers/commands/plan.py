"""``plaudit plan``: print what a job needs of its GPUs and hosts, and how long a step takes, before it is started.

A job that does not fit its GPUs is refused with the nearest job that does.

The times are estimates from operations and bytes, with the shares of the peak named here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from plaudit_job.load import load_job, locate
from plaudit_job.model_shape import DEVICES, Device, ModelShape, divides_heads, find_device
from plaudit_job.problem import JobError, Problem
from plaudit_job.rules.job import rule_problems
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import RLJob, Spec, TrainerSpec
from plaudit_wire.errors import RefusedError
from plaudit_wire.printable import print_text
from plaudit_workers.commands.sizing import (
    DTYPE_BYTES,
    FORWARD_BYTES,
    MemoryItem,
    cache_tokens,
    frozen_bytes,
    host_parts,
    kept_bytes,
    longest_sample,
    resident_bytes,
    rollout_parts,
    row_tokens,
    trained_parameters,
    trainer_parts,
)
from plaudit_workers.launch.checks import hub_cache
from plaudit_workers.process import EXIT_DONE

TRAINING_SHARE = 0.40
"""Share of the peak FLOP/s that training reaches."""
PREFILL_SHARE = 0.50
"""Share of the peak FLOP/s that an engine step reaches."""
BANDWIDTH_SHARE = 0.70
"""Share of the memory bandwidth that decoding reaches."""
PCIE_BYTES_PER_S = 20e9
"""Speed of copies between a GPU and pinned host memory: 16 lanes of PCIe 4."""
HOST_ADAMW_BYTES_PER_S = 8e9
"""Speed at which AdamW on one thread of a CPU passes through its tensors."""
VOLUME_BYTES_PER_S = 1e9
"""Speed at which weights are written to and read from the shared volume, or sent over the network."""
_MOST_GPUS = 1024
Changes = dict[str, Any]
"""Field of a section → new value."""
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label with the GPU's name; ``trainer.pod.nodeSelector`` may have it."""


def plan(arguments: argparse.Namespace) -> int:
    """Run the command."""
    job = load_job(arguments.job)
    if not job.spec.trains:
        raise RefusedError(f"{arguments.job}: the job has no rollout and no trainer, so there is no model to plan")
    shape, device = read_shape(job.spec.model), _device(job, arguments.gpu)
    if job.spec.data.images and shape.vision is None:
        raise RefusedError(
            f"spec.model.source {job.spec.model.source!r} has a vision tower that cannot be planned; those of Qwen2-VL "
            "and Qwen2.5-VL can. Run the job with few steps to see what it takes"
        )
    response = arguments.response_tokens or job.spec.rollout.sampling.max_tokens
    if problems := fit_problems(job.spec, shape, device):
        raise JobError(locate(problems, arguments.job), arguments.job)
    if arguments.json:
        print(json.dumps(as_json(job.spec, shape, device, response), indent=2))
    else:
        print_text("\n".join(_lines(job.spec, shape, device, response)))
    return EXIT_DONE


def known_problems(job: RLJob) -> list[Problem]:
    """Return why the job cannot fit, for ``validate``; nothing where the GPU or the model is unknown."""
    device = _labelled(job)
    if not job.spec.trains or device is None:
        return []
    try:
        return fit_problems(job.spec, read_shape(job.spec.model), device)
    except RefusedError:
        return []


def read_shape(model: ModelSpec) -> ModelShape:
    """Read the sizes of ``model.source`` from its folder or, for ``model.revision``, the hub's local cache."""
    path, repository = Path(model.source, "config.json"), hub_cache(model.source)
    if not path.parent.is_dir():  # a branch, tag or commit of the hub
        reference = repository / "refs" / model.revision
        commit = reference.read_text().strip() if reference.is_file() else model.revision
        path = repository / "snapshots" / commit / "config.json"
    if path.exists():
        try:
            return ModelShape.from_config(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{path} does not describe a decoder that can be planned: {error!r}") from error
    raise RefusedError(
        f"spec.model.source {model.source!r} has no config.json of revision {model.revision!r} here. Download it "
        f"(hf download {model.source} config.json --revision {model.revision}), or name a folder"
    )


def _device(job: RLJob, name: str) -> Device:
    device = find_device(name) if name else _labelled(job)
    if device is None:
        raise RefusedError(
            f"--gpu {name!r} is not known; give one of {', '.join(DEVICES)}"
            if name
            else f"the job does not name its GPU; give --gpu ({', '.join(DEVICES)}), or set {PRODUCT_LABEL} in "
            "spec.trainer.pod.nodeSelector"
        )
    return device


def _labelled(job: RLJob) -> Device | None:
    pods = [job.spec.trainer.pod, job.spec.rollout.pod] if job.spec.trains else []
    products = [pod.node_selector[PRODUCT_LABEL] for pod in pods if PRODUCT_LABEL in pod.node_selector]
    return find_device(products[0]) if products else None


def as_json(spec: Spec, shape: ModelShape, device: Device, response_tokens: int) -> dict[str, Any]:
    """Return the plan as plain data: bytes and seconds."""
    times = step_times(spec, shape, device, response_tokens)
    return {
        "gpu": device.name,
        "parameters": shape.parameters,
        "trainer_rank_bytes": _by_name(trainer_parts(spec, shape)),
        "rollout_gpu_bytes": _by_name(rollout_parts(spec, shape)),
        "kv_cache_tokens": int(cache_tokens(spec, shape, device.memory_bytes)),
        "trainer_host_bytes": _by_name(host_parts(spec, shape)),
        "step_s": times.phases,
        "bottleneck": times.bottleneck,
    }


def _lines(spec: Spec, shape: ModelShape, device: Device, response_tokens: int) -> Iterator[str]:
    trainer, engine = spec.trainer, spec.rollout.engine
    yield f"model: {shape.parameters / 1e9:.2f} billion parameters; all figures are computed, in GB and seconds"
    if spec.data.images:
        yield (
            f"images: {(shape.vision or 0) / 1e9:.2f} billion of these parameters are the vision tower's; its "
            "activations and its time are not counted"
        )
    yield from _table(
        f"trainer, each of {trainer.ranks} on {device.name}", trainer_parts(spec, shape), device.memory_bytes
    )
    if engine.gpus:
        budget = engine.gpu_memory_utilization * device.memory_bytes
        title = f"rollout, each of {engine.gpus * spec.rollout.replicas} on {device.name}"
        yield from _table(title, rollout_parts(spec, shape), budget)
        tokens = cache_tokens(spec, shape, device.memory_bytes)
        samples = int(tokens // longest_sample(spec))
        yield f"  KV cache: {int(tokens):,} tokens, {samples:,} samples of {longest_sample(spec):,}"
    yield from _table("host of the trainer's first pod (not at once)", host_parts(spec, shape), None)
    times = step_times(spec, shape, device, response_tokens)
    yield f"step with responses of {response_tokens:,} tokens, without rewards: {times.step:.0f} s"
    phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in times.phases.items())
    yield f"  {phases} ({'side by side' if times.overlapped else 'one after the other'}); longest: {times.bottleneck}"


def _table(title: str, parts: list[MemoryItem], limit: float | None) -> Iterator[str]:
    of = "" if limit is None else f" of {limit / 1e9:.1f}"
    yield f"{title}: {sum(part.num_bytes for part in parts) / 1e9:.1f}{of}" if limit else title
    for part in parts:
        yield f"  {part.num_bytes / 1e9:8.1f}  {part.name}"


def _by_name(parts: list[MemoryItem]) -> dict[str, int]:
    return {part.name: int(part.num_bytes) for part in parts}


@dataclass(frozen=True)
class StepTimes:
    """Hold the seconds of each phase of a step."""

    generation: float
    update: float
    publication: float
    overlapped: bool
    """Generation runs beside update and publication (``maxStaleness`` of at least 1, GPUs of its own)."""

    @property
    def step(self) -> float:
        """Return the seconds of a step, without rewards."""
        others = self.update + self.publication
        return max(self.generation, others) if self.overlapped else self.generation + others

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase by its name."""
        return {"generation": self.generation, "update": self.update, "publication": self.publication}

    @property
    def bottleneck(self) -> str:
        """Return the name of the longest phase."""
        return max(self.phases, key=self.phases.__getitem__)


def step_times(spec: Spec, shape: ModelShape, device: Device, response_tokens: int) -> StepTimes:
    """Estimate a step of a job that fits, from the mean length of a response."""
    peak = _peak(device, FORWARD_BYTES[spec.model.dtype])
    passes_s = update_flops(spec, shape, response_tokens) / (spec.trainer.ranks * peak * TRAINING_SHARE)
    published = trained_parameters(spec, shape) * DTYPE_BYTES[spec.model.dtype]
    passes = 1 if spec.trainer.weights.transfer == "direct" else 2
    return StepTimes(
        generation=_generation_s(spec, shape, device, response_tokens),
        update=passes_s + _offload_s(spec, shape, response_tokens),
        publication=passes * published / VOLUME_BYTES_PER_S,
        overlapped=spec.algorithm.max_staleness > 0 and not spec.rollout.sleep_during_updates,
    )


def _offload_s(spec: Spec, shape: ModelShape, response_tokens: int) -> float:
    """Return the seconds of a step for copies between hosts and GPUs, as if none hid behind computation, and AdamW.

    Each micro-batch copies a rank's shard to the GPU for the forward and for the backward pass, and its gradients back.
    AdamW reads four float32 tensors and writes three.
    """
    algorithm, trainer = spec.algorithm, spec.trainer
    length = spec.data.train.max_prompt_length + response_tokens
    tokens = algorithm.epochs * algorithm.prompts_per_step * algorithm.samples_per_prompt * length / trainer.ranks
    micro_batches = max(algorithm.updates_per_step, tokens / row_tokens(spec))
    seconds = 0.0
    if trainer.cpu_offload:
        trained = trained_parameters(spec, shape)
        copied = (3 * 4 * trained + 2 * frozen_bytes(spec, shape)) / trainer.shards
        seconds += micro_batches * copied / PCIE_BYTES_PER_S
        seconds += algorithm.updates_per_step * 7 * 4 * trained / trainer.shards / HOST_ADAMW_BYTES_PER_S
    if trainer.activation_offload:
        seconds += 2 * tokens / row_tokens(spec) * kept_bytes(spec, shape) / PCIE_BYTES_PER_S
    return seconds


def update_flops(spec: Spec, shape: ModelShape, response_tokens: int) -> float:
    """Return the operations of a step's updates: 2 a parameter and token forward, 4 backward, causal attention."""
    algorithm = spec.algorithm
    length = spec.data.train.max_prompt_length + response_tokens
    tokens = algorithm.prompts_per_step * algorithm.samples_per_prompt * length
    forward = tokens * (2 * shape.active_parameters + 2 * shape.layers * shape.heads * shape.head_size * length)
    return forward * update_passes(spec)


def update_passes(spec: Spec) -> float:
    """Return the cost of a step's updates in forward passes over all its tokens.

    An epoch has a forward pass, a backward pass of twice its cost (once, without gradients of frozen weights), another
    forward pass for checkpointing, and one of the starting weights for the KL term. Every update but a step's first has
    a pass of the weights around which it is clipped. ``klIn: reward`` takes the starting weights' pass, and one of the
    weights to which they are compared, once a mini-batch.
    """
    algorithm, trainer = spec.algorithm, spec.trainer
    loss = algorithm.loss
    epoch = 3.0 + (trainer.activation_checkpointing != "none") - (trainer.lora is not None) + loss.has_kl_term
    corrected = loss.correction != "none"
    proximal = algorithm.epochs - 1 / algorithm.mini_batches_per_step if corrected else 0
    penalty = 1 + corrected if loss.penalises_reward else 0
    return algorithm.epochs * epoch + proximal + penalty


def _peak(device: Device, width: int) -> float:
    return device.float32_flops if width == 4 else device.flops


def _generation_s(spec: Spec, shape: ModelShape, device: Device, response_tokens: int) -> float:
    algorithm, rollout = spec.algorithm, spec.rollout
    gpus, width = max(1, rollout.engine.gpus), DTYPE_BYTES[spec.model.dtype]
    flops = gpus * _peak(device, width) * PREFILL_SHARE
    length = spec.data.train.max_prompt_length + response_tokens
    samples = -(-algorithm.prompts_per_step * algorithm.samples_per_prompt // rollout.replicas)
    room = int(cache_tokens(spec, shape, device.memory_bytes) // length)
    at_once = max(1, min(samples, rollout.engine.max_concurrent_samples, room))
    read = shape.parameters * width + at_once * length / 2 * shape.cache_bytes(width)
    decode_s = max(read / (gpus * device.bandwidth * BANDWIDTH_SHARE), 2 * shape.active_parameters * at_once / flops)
    prompts = samples * spec.data.train.max_prompt_length / algorithm.samples_per_prompt
    prefill_s = 2 * shape.active_parameters * prompts / flops
    return -(-samples // at_once) * response_tokens * decode_s + prefill_s


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
