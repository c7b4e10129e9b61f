"""Join the figures of several updates: of the epochs of a mini-batch, and of the mini-batches of a step. Pure.

Counts are added. ``…/min`` and ``…/max`` are the least and the largest. Speeds are weighted by seconds, means of
samples by samples, means of tokens by tokens. Losses, norms and learning rates are plain means of the updates. An
update that lacks a figure, or whose value is not finite, does not count for it; without any other there is no figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Figures = Mapping[str, float]

_COUNTS = "training/"
_WORK = ("training/computed_tokens", "training/tflops", "actor/skipped_updates")
"""Counts of what each epoch does again."""
_TOKENS, _TOKENS_PER_S = "training/computed_tokens", "actor/tokens_per_s"
_SPEEDS = (_TOKENS_PER_S, "perf/mfu/actor")
_OF_UPDATES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr", "actor/reward_kl_penalty_coeff")
_WEIGHTS = {
    "critic/": "training/scored",
    "actor/reward_kl_penalty": "training/scored",
    "response_": "training/samples",
    "actor/": "training/loss_tokens",
}
"""Beginning of a mean's key → the count by which it is weighted; the first that fits."""


def join_epochs(updates: Sequence[Figures]) -> dict[str, float]:
    """Return the figures of all updates on the same mini-batch: its samples count once, tokens as often as computed."""
    return _joined(updates, lambda key: key in _WORK)


def join_mini_batches(updates: Sequence[Figures]) -> dict[str, float]:
    """Return the figures of a step from those of its mini-batches."""
    return _joined(updates, lambda key: key in _WORK or key.startswith(_COUNTS))


def _joined(updates: Sequence[Figures], is_count: Callable[[str], bool]) -> dict[str, float]:
    joined: dict[str, float] = {}
    for key in dict.fromkeys(key for update in updates for key in update):
        reporting = [update for update in updates if math.isfinite(update.get(key, math.nan))]
        if reporting:
            values = [update[key] for update in reporting]
            joined[key] = sum(values) if is_count(key) else _summary(key, values, reporting)
    return joined


def _summary(key: str, values: Sequence[float], updates: Sequence[Figures]) -> float:
    if key.endswith("/min"):
        return min(values)
    if key.endswith("/max"):
        return max(values)
    weights = [_weight(key, update) for update in updates]
    if not sum(weights):
        weights = [1.0] * len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _weight(key: str, update: Figures) -> float:
    if key in _SPEEDS:
        return update[_TOKENS] / update[_TOKENS_PER_S]  # seconds
    if key in _OF_UPDATES:
        return 1.0
    count = next((count for beginning, count in _WEIGHTS.items() if key.startswith(beginning)), "")
    return update.get(count, 1.0)
