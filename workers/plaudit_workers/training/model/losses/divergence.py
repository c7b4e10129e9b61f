"""Estimate KL(π_θ ‖ π_ref) from the tokens of samples: ``loss.klEstimator``.

Source: Schulman 2020, Approximating KL Divergence; bounds as in verl's ``kl_penalty_forward``. All are 0 for equal
policies. Only the gradient of ``k2`` is that of the divergence; ``k1`` has the right mean and, as a term of the loss,
no useful gradient; ``k3`` is never negative and varies least.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from plaudit_workers.training.model.losses.correction import MAX_LOG_RATIO, exp_ratio

MAX_K3 = 10.0
"""The k3 estimate of a token is cut here, as in verl: at a log-ratio of -10 it would be 22,000."""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``log π_θ - log π_ref``: unbiased, of any sign."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``(log π_θ - log π_ref)² ÷ 2``: biased, never negative."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ``r - log r - 1`` with ``r = π_ref ÷ π_θ``: unbiased, never negative.

    The log-ratio is cut to ±20 and the estimate to 10: a token beyond that has no gradient.

    Args:
        logprobs: float32[R], log π_θ, with gradient.
        reference: float32[R], log π_ref.
    """
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=MAX_K3)


ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""``loss.klEstimator`` → its function."""


def importance_weighted(estimates: Tensor, logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return ``k · π_θ ÷ π_anchor``, with the gradient of both factors: ``loss.klImportanceWeight``.

    For samples of the anchor, a weighted k1 or k3 has the divergence's own gradient; of k3 at ``π_θ = π_anchor`` it is
    ``log(π_θ ÷ π_ref) ∇ log π_θ`` for each token. Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv 2512.02556), as TRL's
    ``use_bias_correction_kl`` for ratios of tokens.
    Degenerate: 0 where the policy equals the reference.

    Args:
        estimates: float32[R], with gradient.
        logprobs: float32[R], log π_θ, with gradient.
        anchor: float32[R], log-probability under the policy around which the loss is clipped.
    """
    return estimates * exp_ratio(logprobs, anchor)
