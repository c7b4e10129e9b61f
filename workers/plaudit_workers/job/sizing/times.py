"""Time of a step, by phase, from operations and bytes. Pure; estimates, with the shares of the peak named here."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit_workers.job.sizing.devices import Device
from plaudit_workers.job.sizing.memory import DTYPE_BYTES, FORWARD_BYTES, cache_tokens, kept_bytes, row_tokens
from plaudit_workers.job.sizing.shape import ModelShape
from plaudit_workers.job.spec.rljob import Spec

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
    def bottleneck(self) -> str:
        """Return the name of the longest phase."""
        phases = {"generation": self.generation, "update": self.update, "publication": self.publication}
        return max(phases, key=lambda name: phases[name])


def step_times(spec: Spec, shape: ModelShape, device: Device, response_tokens: int) -> StepTimes:
    """Estimate a step of a job that fits, from the mean length of a response."""
    lora = spec.trainer.lora
    peak = _peak(device, FORWARD_BYTES[spec.model.dtype])
    passes_s = update_flops(spec, shape, response_tokens) / (spec.trainer.ranks * peak * TRAINING_SHARE)
    published = (shape.adapter_parameters(lora.rank) if lora else shape.parameters) * DTYPE_BYTES[spec.model.dtype]
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
        trained = shape.adapter_parameters(trainer.lora.rank) if trainer.lora else shape.parameters
        frozen = shape.parameters * FORWARD_BYTES[spec.model.dtype] if trainer.lora else 0
        copied = (3 * 4 * trained + 2 * frozen) / trainer.shards
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
    """Return the operations a second on values of so many bytes."""
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
    decode_s = max(
        read / (gpus * device.bandwidth * BANDWIDTH_SHARE),
        2 * shape.active_parameters * at_once / flops,
    )
    prompts = samples * spec.data.train.max_prompt_length / algorithm.samples_per_prompt
    prefill_s = 2 * shape.active_parameters * prompts / flops
    return -(-samples // at_once) * response_tokens * decode_s + prefill_s
