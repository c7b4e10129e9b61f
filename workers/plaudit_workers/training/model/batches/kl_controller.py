"""``loss.adaptiveKl``: a coefficient of the divergence that follows a target. Called by ``torch_backend``.

``β ← β · (1 + clip(KL ÷ target - 1, -0.2, 0.2) · n ÷ horizon)`` after an update on n samples of the mean divergence KL.
Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593), as verl's
``AdaptiveKLController``. Degenerate: at KL = target the coefficient stays, and 0 stays 0.
"""

from __future__ import annotations

from plaudit_workers.job.spec.algorithm import AdaptiveKlSpec

MAX_ERROR = 0.2
"""The relative error counts at most so much, so the coefficient changes by at most 20 % in ``horizon`` samples."""

COEFFICIENT = "kl_coefficient"
"""Key of the coefficient in a checkpoint's ``state.json``."""


class KlController:
    """Hold the present coefficient.

    Args:
        coefficient: ``klCoefficient``, the first value.
        settings: ``adaptiveKl``; None: the coefficient is fixed.
    """

    def __init__(self, coefficient: float, settings: AdaptiveKlSpec | None) -> None:
        self.coefficient = coefficient
        self._settings = settings

    def update(self, divergence: float, num_samples: int) -> None:
        """Change the coefficient after an update.

        Args:
            divergence: mean over the samples of the mean over their tokens, in nats.
        """
        if self._settings is not None:
            error = min(MAX_ERROR, max(-MAX_ERROR, divergence / self._settings.target - 1))
            self.coefficient *= 1 + error * num_samples / self._settings.horizon

    def snapshot(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty if the coefficient is fixed."""
        return {} if self._settings is None else {COEFFICIENT: self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of a ``snapshot``; without one, or if it is fixed, with the present one."""
        if self._settings is not None:
            self.coefficient = state.get(COEFFICIENT, self.coefficient)
