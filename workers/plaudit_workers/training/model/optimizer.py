"""Update with AdamW: warm-up, schedule, gradient clipping. Its saved state does not depend on the number of ranks.

Called by ``policy_model``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import AlgorithmSpec, OptimizerSpec


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's averages of gradients and of their squares."""


class PolicyOptimizer:
    """Update a policy's parameters.

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
        warmup: updates of the warm-up.
        total: updates of the run.
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
