"""``algorithm.advantagePer: turn``: an advantage for each turn of a conversation, from the rewards of its turns.

The return of turn t is the reward of the sample without what the environment had paid before that turn:

``R_t = r - w · Σ_{k<t} r_k``

with ``r_k`` the environment's reward for turn k and ``w`` the weight of the scorer ``environment``. The job's estimator
(``advantage.ESTIMATORS``) then compares ``R_t`` with the returns of the same turn of the other samples of the group:
what a turn cannot have caused does not count for it. Source: the discount-free return of policy gradients (Sutton et
al. 2000, Policy Gradient Methods for Reinforcement Learning with Function Approximation), with a group's mean at turn t
as the baseline.

Degenerate: with one turn a sample, the estimator itself, exactly. A turn that only one sample of its group reached has
nothing to be compared with: 0 under the group-relative estimators.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plaudit_workers.training.model.batches.advantage import Estimator, Floats, Ints


def turn_starts(firsts: Sequence[int], num_tokens: int) -> Ints:
    """Return the first token of each turn, rising from 0: observations before the first turn count as its own.

    Args:
        firsts: first token of each turn, as recorded; empty: one turn.
        num_tokens: T, tokens of the response.

    Returns:
        int64[K], K ≥ 1.
    """
    later = sorted({first for first in firsts[1:] if 0 < first < num_tokens})
    return np.array([0, *later], dtype=np.int64)


def turn_tokens(starts: Ints, loss_mask: NDArray[np.bool_]) -> Ints:
    """Return the number of trained tokens of each turn: int64[K].

    Args:
        starts: int64[K] of ``turn_starts``.
        loss_mask: bool[T].
    """
    owners = np.searchsorted(starts, np.flatnonzero(loss_mask), side="right") - 1
    return np.bincount(owners, minlength=starts.size).astype(np.int64)


def turn_returns(score: float, turn_rewards: Sequence[float], weight: float, num_turns: int) -> Floats:
    """Return the reward of a sample from each turn on: float64[K].

    Args:
        turn_rewards: of the environment, one a turn; missing ones are 0.
        weight: with which they are part of the reward.
        num_turns: K.
    """
    paid = np.zeros(num_turns)
    before = np.asarray(turn_rewards[: num_turns - 1], dtype=np.float64)
    paid[1 : before.size + 1] = before
    returns: Floats = score - weight * np.cumsum(paid)
    return returns


def turn_advantages(
    estimator: Estimator, returns: Sequence[Floats], group: Ints, num_tokens: Sequence[Ints]
) -> list[Floats]:
    """Apply an estimator to each turn position.

    Args:
        returns: of each of S samples, float64[K_i].
        group: int64[S], as the estimator expects it.
        num_tokens: of each sample the trained tokens of its turns, int64[K_i].

    Returns:
        The advantages of each sample's turns, float64[K_i].
    """
    advantages = [np.zeros(own.size) for own in returns]
    for turn in range(max((own.size for own in returns), default=0)):
        reached = [number for number, own in enumerate(returns) if own.size > turn]
        at_turn = np.array([returns[number][turn] for number in reached], dtype=np.float64)
        tokens = np.array([num_tokens[number][turn] for number in reached], dtype=np.int64)
        # Numbered without holes: a group may have no sample that reached this turn.
        groups = np.unique(group[reached], return_inverse=True)[1].astype(np.int64)
        for number, value in zip(reached, estimator(at_turn, groups, tokens), strict=True):
            advantages[number][turn] = value
    return advantages
