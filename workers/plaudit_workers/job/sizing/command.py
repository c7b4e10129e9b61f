"""``plaudit plan``: print what a job needs of its GPUs and hosts, and how long a step takes, before it is started."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.loading.load import load_job, locate
from plaudit_workers.job.problem import JobError, Problem
from plaudit_workers.job.sizing.devices import DEVICES, Device, find_device
from plaudit_workers.job.sizing.fit import fit_problems
from plaudit_workers.job.sizing.memory import (
    MemoryItem,
    cache_tokens,
    host_parts,
    longest_sample,
    rollout_parts,
    trainer_parts,
)
from plaudit_workers.job.sizing.shape import ModelShape
from plaudit_workers.job.sizing.times import step_times
from plaudit_workers.job.spec.model import ModelSpec
from plaudit_workers.job.spec.rljob import RLJob, Spec
from plaudit_workers.process import EXIT_DONE

PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label with the GPU's name; ``trainer.pod.nodeSelector`` may have it."""


def plan(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        JobError: the job is invalid, or cannot fit.
        RefusedError: the model's configuration or the GPU is unknown.
    """
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
        print("\n".join(_lines(job.spec, shape, device, response)))
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
    """Read the sizes of ``model.source`` from its folder or, for ``model.revision``, the hub's local cache.

    Raises:
        RefusedError: there is no ``config.json``, or it does not describe a decoder.
    """
    path = _configuration(model)
    if path.exists():
        try:
            return ModelShape.from_config(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{path} does not describe a decoder that can be planned: {error!r}") from error
    raise RefusedError(
        f"spec.model.source {model.source!r} has no config.json of revision {model.revision!r} here. Download it "
        f"(hf download {model.source} config.json --revision {model.revision}), or name a folder"
    )


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
        "step_s": {"generation": times.generation, "update": times.update, "publication": times.publication},
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
        yield f"  KV cache: {int(tokens):,} tokens, {samples} samples of {longest_sample(spec):,}"
    yield from _table("host of the trainer's first pod (not at once)", host_parts(spec, shape), None)
    times = step_times(spec, shape, device, response_tokens)
    yield f"step with responses of {response_tokens:,} tokens, without rewards: {times.step:.0f} s"
    phases = f"generation {times.generation:.0f}, update {times.update:.0f}, publication {times.publication:.0f}"
    yield f"  {phases} ({'side by side' if times.overlapped else 'one after the other'}); longest: {times.bottleneck}"


def _table(title: str, parts: list[MemoryItem], limit: float | None) -> Iterator[str]:
    of = "" if limit is None else f" of {limit / 1e9:.1f}"
    yield f"{title}: {sum(part.num_bytes for part in parts) / 1e9:.1f}{of}" if limit else title
    for part in parts:
        yield f"  {part.num_bytes / 1e9:8.1f}  {part.name}"


def _by_name(parts: list[MemoryItem]) -> dict[str, int]:
    return {part.name: int(part.num_bytes) for part in parts}


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


def _configuration(model: ModelSpec) -> Path:
    """Return where the configuration lies: in a folder, or in the snapshot of a branch, tag or commit of the hub."""
    folder = Path(model.source)
    if folder.is_dir():
        return folder / "config.json"
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / f"models--{model.source.replace('/', '--')}"
    reference = repository / "refs" / model.revision
    commit = reference.read_text().strip() if reference.is_file() else model.revision
    return repository / "snapshots" / commit / "config.json"
