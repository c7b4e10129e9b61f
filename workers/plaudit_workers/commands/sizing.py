"""Compute the memory of a trainer's rank, a rollout's GPU and the trainer's hosts, in named parts. Pure, and light.

It imports nothing that reads a job, for ``benchmarks/gpu`` runs where those packages are not. The formulas follow the
code: float32 weights, gradients and AdamW's two averages divided by the ranks that share them (FSDP2, ``fsdpSize``),
layers gathered in the precision of the forward passes, activations of one micro-batch or of a rank's share of the
longest sample (``sequenceParallelSize``), one chunk of logits, or all of a row where the model changes them behind its
head. What ``cpuOffload`` and ``activationOffload`` move lies on the host instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plaudit_job.model_shape import ModelShape

if TYPE_CHECKING:
    from plaudit_job.spec.rljob import Spec

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""``model.dtype`` → bytes of a published value, and of a rollout's."""
FORWARD_BYTES = DTYPE_BYTES | {"float16": 4}
"""``model.dtype`` → bytes of a value in the trainer's forward passes (``training.model.head.FORWARD_DTYPES``)."""
RESERVED_BYTES = 3e9
"""CUDA's context, the libraries' workspaces, fragments."""
_FLOAT_BYTES = 4
_ADAMW_BYTES = 16
"""Bytes a trained parameter: weight, gradient, two averages, all float32."""
_CHUNK_BYTES = 1 << 29
"""``training.model.head.CHUNK_BYTES``: float32 logits of a chunk."""
LOGIT_COPIES = 5
"""Logits, their scaled copy, the softmax and gradients, all float32; counted in a test."""
_BACKWARD_SHARE = 1.5
"""A layer's saved tensors and the gradients beside them, while its backward pass runs."""
_INPUTS_UNDERWAY = 2
_OFFERED_COPIES = 2
"""The newest published weights, and those before while a rollout still receives them; older transfers are broken."""
_PREFILL_TOKENS = 8192
"""Tokens of one engine step on a GPU: vLLM's default."""


@dataclass(frozen=True)
class MemoryItem:
    """Hold one part of a memory."""

    name: str
    num_bytes: float


def longest_sample(spec: Spec) -> int:
    """Return the tokens of the longest sample, prompt included."""
    return min(
        spec.rollout.engine.max_model_length, spec.data.train.max_prompt_length + spec.rollout.sampling.max_tokens
    )


def trainer_parts(spec: Spec, shape: ModelShape) -> list[MemoryItem]:
    """Return the parts of one rank's GPU memory."""
    return [
        *([] if spec.trainer.cpu_offload else _states(spec, shape)),
        MemoryItem("gathered layers", _gathered_bytes(spec, shape)),
        MemoryItem("activations", activation_bytes(spec, shape)),
        MemoryItem("logits", LOGIT_COPIES * _logit_bytes(spec, shape)),
        MemoryItem("reserved", RESERVED_BYTES),
    ]


def resident_bytes(spec: Spec, shape: ModelShape) -> float:
    """Return one rank's bytes on its GPU between updates."""
    states = [] if spec.trainer.cpu_offload else _states(spec, shape)
    return sum(part.num_bytes for part in states) + RESERVED_BYTES


def _states(spec: Spec, shape: ModelShape) -> list[MemoryItem]:
    """Return the parts of one rank's memory that live as long as the rank."""
    trainer, algorithm, trained = spec.trainer, spec.algorithm, trained_parameters(spec, shape)
    copies = int(algorithm.loss.correction != "none" and algorithm.updates_per_step > 1)
    copies += int(bool(algorithm.loss.kl_coefficient) and trainer.lora is None)
    weights = _ADAMW_BYTES * trained + frozen_bytes(spec, shape)
    return [
        MemoryItem("weights, gradients, optimizer", weights / trainer.shards),
        MemoryItem("proximal and reference weights", copies * _FLOAT_BYTES * trained / trainer.shards),
    ]


def trained_parameters(spec: Spec, shape: ModelShape) -> int:
    """Return the parameters that updates change, and that are published."""
    lora = spec.trainer.lora
    return shape.adapter_parameters(lora.rank) if lora else shape.parameters


def frozen_bytes(spec: Spec, shape: ModelShape) -> int:
    """Return the bytes of the model beside adapters; 0 where all of it is trained."""
    return shape.parameters * FORWARD_BYTES[spec.model.dtype] if spec.trainer.lora else 0


def activation_bytes(spec: Spec, shape: ModelShape) -> float:
    """Return the GPU's bytes of one micro-batch's activations: what all layers keep, and the layer that is computed."""
    scale = FORWARD_BYTES[spec.model.dtype] / 2
    computed = row_tokens(spec) * _BACKWARD_SHARE * shape.layer_bytes() * scale
    kept = kept_bytes(spec, shape)
    # The input of the layer that is computed is on the GPU, and the next one is on its way.
    return computed + (_INPUTS_UNDERWAY / shape.layers * kept if spec.trainer.activation_offload else kept)


def row_tokens(spec: Spec) -> int:
    """Return the most tokens that one rank computes at a time."""
    return max(spec.trainer.micro_batch_tokens, -(-longest_sample(spec) // spec.trainer.sequence_parallel_size))


def kept_bytes(spec: Spec, shape: ModelShape) -> float:
    """Return the bytes of one micro-batch that all layers keep for the backward pass, on the GPU or on the host."""
    scale = FORWARD_BYTES[spec.model.dtype] / 2
    # In one process autocast keeps the sum of the layers in float32.
    row = shape.hidden * (_FLOAT_BYTES if spec.trainer.ranks == 1 and spec.trainer.lora is None else 2 * scale)
    kept = {"none": shape.layer_bytes() * scale, "selective": row + 4 * shape.hidden * scale}
    return row_tokens(spec) * shape.layers * kept.get(spec.trainer.activation_checkpointing, row)


def _logit_bytes(spec: Spec, shape: ModelShape) -> float:
    """Return the bytes of the float32 logits that exist at a time: a chunk's, or a row's, as if all were trained."""
    whole = _FLOAT_BYTES * row_tokens(spec) * shape.vocabulary
    return whole if shape.whole_logits else min(whole, _CHUNK_BYTES)


def _gathered_bytes(spec: Spec, shape: ModelShape) -> float:
    width = FORWARD_BYTES[spec.model.dtype]
    if spec.trainer.ranks == 1:
        return shape.parameters * width if width < _FLOAT_BYTES and spec.trainer.lora is None else 0
    largest = max(shape.layer_parameters, shape.edge_parameters)
    gradients = 0 if spec.trainer.lora else largest * (width + _FLOAT_BYTES)
    return (shape.edge_parameters + 2 * shape.layer_parameters) * width + gradients


def rollout_parts(spec: Spec, shape: ModelShape) -> list[MemoryItem]:
    """Return the parts of one GPU of a rollout, but for the key-value cache, which takes what is left."""
    engine, width = spec.rollout.engine, DTYPE_BYTES[spec.model.dtype]
    gpus = max(1, engine.gpus)
    lora = spec.trainer.lora
    adapters = shape.adapter_parameters(lora.rank) * width * spec.adapters_at_once if lora else 0
    step = _PREFILL_TOKENS * (4 * shape.hidden + 3 * shape.intermediate / engine.tensor_parallel_size) * width
    logits = 2 * _FLOAT_BYTES * engine.max_concurrent_samples * shape.vocabulary
    return [
        MemoryItem("weights", (shape.parameters * width + adapters) / gpus),
        MemoryItem("activations and logits", step + logits),
        MemoryItem("reserved", RESERVED_BYTES),
    ]


def cache_tokens(spec: Spec, shape: ModelShape, memory_bytes: float) -> float:
    """Return the tokens that the key-value cache of one rollout holds; negative where the weights do not fit.

    vLLM's argument ``kv_cache_memory_bytes`` sets the cache of a GPU, whatever the utilization.
    """
    engine = spec.rollout.engine
    given = engine.arguments.get("kv_cache_memory_bytes")
    others = sum(part.num_bytes for part in rollout_parts(spec, shape))
    free = engine.gpu_memory_utilization * memory_bytes - others
    free = min(given, memory_bytes - others) if isinstance(given, int) else free
    split = min(engine.tensor_parallel_size, shape.key_value_heads) * engine.pipeline_parallel_size
    return free * split / shape.cache_bytes(DTYPE_BYTES[spec.model.dtype])


def host_parts(spec: Spec, shape: ModelShape) -> list[MemoryItem]:
    """Return the host memory of the trainer's first pod: at the start, for a checkpoint, for weights that it offers.

    Each of several ranks, and one with adapters, reads its rows of one tensor after the other, but the whole model if
    it has code of its own. Adapters start whole on every rank. Experts are stacked, gate beside up, which takes their
    tensor a second time. A checkpoint is a copy of the ranks' rows of weights and averages. What ``cpuOffload`` and
    ``activationOffload`` move comes on top; torch rounds pinned blocks up to powers of two.
    """
    trainer, trained = spec.trainer, trained_parameters(spec, shape)
    ranks_here = min(trainer.ranks, trainer.ranks_per_pod)
    by_rows = (trainer.ranks > 1 or trainer.lora is not None) and not spec.model.trust_remote_code
    largest = max(shape.vocabulary * shape.hidden, 2 * 2 * shape.experts * shape.intermediate * shape.hidden)
    adapters = trained if trainer.lora else 0
    loading = _FLOAT_BYTES * (largest / trainer.shards + adapters if by_rows else shape.parameters)
    parts = [
        MemoryItem("loading", loading * ranks_here),
        MemoryItem("checkpoint", 3 * _FLOAT_BYTES * trained * ranks_here / trainer.ranks),
    ]
    if trainer.cpu_offload:
        parts += [MemoryItem(part.name, part.num_bytes * ranks_here) for part in _states(spec, shape)]
    if trainer.activation_offload:
        parts.append(MemoryItem("activations", kept_bytes(spec, shape) * ranks_here))
    if trainer.weights.transfer == "direct":
        copies = _OFFERED_COPIES * DTYPE_BYTES[spec.model.dtype] * shape.parameters
        parts.append(MemoryItem("offered weights", copies * ranks_here / trainer.ranks))
    if trainer.weights.full_every > 1:
        published = DTYPE_BYTES[spec.model.dtype] * shape.parameters
        parts.append(MemoryItem("published weights", published * ranks_here / trainer.ranks))
    return parts
