"""Update the policy with AdamW, and measure the work of an update: tokens a second, the share of a GPU's peak (MFU).

``probe_ids`` chooses the text whose log-probabilities show whether a rollout loaded the updated weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from plaudit_job.model_shape import ModelShape, find_device

if TYPE_CHECKING:
    from plaudit_job.spec.algorithm import AlgorithmSpec, OptimizerSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's averages of gradients and of their squares."""
_TOKENS = "training/computed_tokens"
_TFLOPS = "training/tflops"
PROBE_LIMITS = {"bfloat16": 0.3, "float16": 0.05, "float32": 0.05}
"""``model.dtype`` → mean absolute difference in nats above which weights are refused: several times the rounding of two
correct passes, half of a wrong layer."""
MAX_PROBE_TOKENS = 64
_MIN_PROBE_TOKENS = 16
_STRIDE = 7919
"""A prime: arbitrary ids are spread over the vocabulary."""
_TEXT = (
    "Tom has 12 apples. He gives 5 of them to his sister and buys 8 more at the market. How many apples does he have "
    "now? After the gift he has 12 - 5 = 7 apples, and 7 + 8 = 15. So the answer is 15."
)


class PolicyOptimizer:
    """Update a policy's parameters: warm-up, schedule, gradient clipping. Its state does not depend on the ranks.

    The rate grows linearly over the updates of ``optimizer.warmupSteps`` steps (a step has ``miniBatchesPerStep`` ×
    ``epochs`` updates), then follows ``optimizer.schedule``; see ``rate_share``. It depends on the place in the run
    alone, not on how many updates were computed: a step without a signal is a step of the schedule too.

    Args:
        parameters: the same names and order on every rank.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], algorithm: AlgorithmSpec) -> None:
        self._parameters = dict(parameters)
        self._settings = algorithm.optimizer
        self._updates_per_step = algorithm.updates_per_step
        self._warmup_updates = algorithm.optimizer.warmup_steps * algorithm.updates_per_step
        self._all_updates = algorithm.steps * algorithm.updates_per_step
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=self._settings.learning_rate,
            betas=(self._settings.beta1, self._settings.beta2),
            weight_decay=self._settings.weight_decay,
            fused=True,
        )
        self.updates = 0
        """Updates computed so far."""
        self.place = Fraction(0)
        """Steps of the run before the next update, with the share of the present one: 2 1/4 after the first of four
        updates of step 3."""
        self._is_restored = False

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        update = float(self.place * self._updates_per_step)
        share = rate_share(self._settings, update, self._warmup_updates, self._all_updates)
        return self._settings.learning_rate * share

    def begin_step(self, num_done: int) -> None:
        """Continue the schedule behind so many steps of the run; a restored place within the step is kept."""
        if not (self._is_restored and 0 <= self.place - num_done < 1):
            self.place = Fraction(num_done)
        self._is_restored = False

    def pass_over(self) -> None:
        """Count an update that has nothing to train: its share of the step is over."""
        self.place += Fraction(1, self._updates_per_step)

    def step(self) -> dict[str, float]:
        """Clip the parameters' gradients, apply and clear them. A collective call.

        A gradient that is not finite is discarded: the parameters do not change, but the update counts.

        Returns:
            ``actor/grad_norm`` (before clipping; absent when not finite), ``actor/lr``, ``actor/skipped_updates``.
        """
        rate = self.learning_rate
        norm = _number(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self._adamw.zero_grad()
        self.updates += 1
        self.pass_over()
        figures = {"actor/lr": rate, "actor/skipped_updates": float(not finite)}
        return figures | ({"actor/grad_norm": norm} if finite else {})

    @property
    def steps(self) -> dict[str, int]:
        """Return parameter name → updates applied to it, empty before the first."""
        return {
            name: int(self._adamw.state[parameter]["step"].item())
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
        }

    def averages(self) -> dict[str, Tensor]:
        """Return AdamW's averages as ``exp_avg/NAME`` and ``exp_avg_sq/NAME``, sharded as the parameters."""
        return {
            f"{key}/{name}": self._adamw.state[parameter][key]
            for key in MOMENTS
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
        }

    def restore(self, updates: int, steps: Mapping[str, int], place: Fraction | None = None) -> None:
        """Set the progress of a saved state and create its ``averages``, to be filled by the caller.

        Args:
            updates: computed so far.
            steps: parameter name → updates applied to it.
            place: ``place`` of the saved state; None: as if all updates so far were computed, in equal steps.
        """
        self.updates = updates
        self.place = Fraction(updates, self._updates_per_step) if place is None else place
        self._is_restored = True
        self._adamw.state.clear()
        for name, num_updates in steps.items():
            parameter = self._parameters[name]
            step = torch.tensor(float(num_updates), device=parameter.device)
            averages = {key: torch.empty_like(parameter.detach()) for key in MOMENTS}
            self._adamw.state[parameter] = {"step": step, **averages}


def rate_share(settings: OptimizerSpec, update: float, warmup: int, total: int) -> float:
    """Return the share of ``learningRate`` that an update uses.

    During the warm-up ``(u + 1) ÷ warmup``; then, with ``p`` the share of the remaining updates made so far and m
    ``minRateShare``: ``linear`` 1 - (1 - m) p, ``cosine`` m + (1 - m) (1 + cos π p) ÷ 2, ``constant`` 1.

    Args:
        update: counted from 0; beyond ``total`` as at its end. Not whole if the step was begun with other updates.
    """
    if update < warmup:
        return min(1.0, (update + 1) / warmup)
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    least = settings.min_rate_share
    if settings.schedule == "linear":
        return 1 - (1 - least) * progress
    if settings.schedule == "cosine":
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
    return 1.0


def _number(norm: Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def training_flops(shape: ModelShape, lengths: Sequence[int], adapters: int | None = None) -> float:
    """Return the operations of one forward and backward pass.

    6 a trained parameter and token (2 forward, 2 for the gradient of its input, 2 for its own), 4 a frozen one, and 6 ·
    layers · width · length for causal attention: what the update needs, without what checkpointing computes again
    (Chowdhery et al., 2022, arXiv 2204.02311).

    Args:
        lengths: tokens of each sequence, prompts included.
        adapters: parameters of the adapters, beside which the model's own are frozen; None: these are trained.
    """
    matrices = 6 * shape.active_parameters if adapters is None else 4 * shape.active_parameters + 6 * adapters
    attention = 6 * shape.layers * shape.heads * shape.head_size
    return float(sum(length * (matrices + attention * length) for length in lengths))


def work_figures(shape: ModelShape | None, lengths: Sequence[int], adapters: int | None = None) -> dict[str, float]:
    """Return ``training/computed_tokens``, and ``training/tflops`` of a known form of model."""
    figures = {_TOKENS: float(sum(lengths))}
    return figures if shape is None else figures | {_TFLOPS: training_flops(shape, lengths, adapters) / 1e12}


def speed_figures(
    work: Mapping[str, float], seconds: float, ranks: int = 1, peak: float | None = None
) -> dict[str, float]:
    """Return ``actor/tokens_per_s``, and ``perf/mfu/actor`` (verl's name) where the peak is known.

    Args:
        work: an update's figures; without computed tokens there are no figures.
        ranks: GPUs that shared it.
        peak: dense operations a second of one; None on a CPU.
    """
    if not work.get(_TOKENS) or seconds <= 0:
        return {}
    figures = {"actor/tokens_per_s": work[_TOKENS] / seconds}
    if peak and _TFLOPS in work:
        figures["perf/mfu/actor"] = work[_TFLOPS] * 1e12 / (seconds * ranks * peak)
    return figures


def peak_flops() -> float | None:
    """Return the dense bfloat16 operations a second of this process's GPU; None on a CPU or an unknown GPU."""
    if not torch.cuda.is_available():
        return None
    device = find_device(torch.cuda.get_device_name())
    return device.flops if device else None


def probe_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int, longest: int) -> list[int]:
    """Return the token ids of the text, at most ``MAX_PROBE_TOKENS``.

    A text, not arbitrary ids: a language model gives arbitrary ids logits far apart, and bfloat16 rounds a logit of 16
    to 32 in steps of 0.125. Mean differences between two bfloat16 forward passes of a 16-layer model with logits up to
    37 were 0.05-0.08 nats over likely tokens and 0.09 over arbitrary ones; a replaced layer gave 0.6 and more, a
    replaced head 11.

    Args:
        tokenizer: one that makes fewer than 16 tokens of the text gets arbitrary ids.
        vocabulary: rows of the embedding.
        longest: tokens that the engine accepts.
    """
    ids = [token for token in tokenizer(_TEXT)["input_ids"] if token < vocabulary]
    if len(ids) < _MIN_PROBE_TOKENS:
        ids = [(number * _STRIDE + 1) % min(len(tokenizer), vocabulary) for number in range(_MIN_PROBE_TOKENS)]
    return ids[: min(MAX_PROBE_TOKENS, longest)]
