"""Build the batch of one update: the scored samples of some groups as plain arrays, with their advantages. Pure.

Left out are samples without a score (masked: a failure must not look like a reward of zero) and samples without a token
that the policy chose. Advantages are computed over all scored samples, by one function per estimator (``ESTIMATORS``):
a sample, or each turn of it (``turn_advantages``), is compared with others of its group. Rewards may be lowered by the
divergence from the starting weights before that (``penalise``), with a coefficient that ``KlController`` may adapt.

Shapes: ``S`` scored samples in ``G`` groups. Every estimator takes ``scores: float64[S]``, ``group: int64[S]`` (which
of the G groups a sample belongs to) and ``num_tokens: int64[S]`` (trained tokens of its response), and returns
``float64[S]``: one advantage a sample, shared by all its tokens, since rewards are given to whole responses.

A group of one survivor has no baseline and a group whose scores are all equal teaches nothing about which response is
better: in both cases the group-relative estimators (all but REINFORCE++) return exactly 0 (verl gives a lone survivor
its score as advantage, which pushes towards whatever survived). ``degenerate_groups`` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plaudit_job.spec.algorithm import AdaptiveKlSpec
from plaudit_wire.messages import Branch, PolicyVersion, SampleBody
from plaudit_wire.records import ScoringRecord
from plaudit_workers.stream.groups import Group

WIDTH = 4
"""Tokens of the runs that are compared."""
_FACTOR = 1_000_003
"""Odd: the products of 64-bit integers modulo 2**64 keep runs apart."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Estimator = Callable[[Floats, Ints, Ints], Floats]
STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl."""
VARIANCE_EPSILON = 1e-8
"""Added to the batch's variance in REINFORCE++, as in verl's ``masked_whiten``."""
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
MAX_ERROR = 0.2
"""The relative error counts at most so much, so the coefficient changes by at most 20 % in ``horizon`` samples."""
COEFFICIENT = "kl_coefficient"
"""Key of the coefficient in a checkpoint's ``state.json``."""


@dataclass(frozen=True)
class TrainingSequence:
    """Hold a token sequence to learn from: a sample, or a branch of one. ``P`` prompt tokens, ``T`` response tokens."""

    group: str
    index: int
    prompt_ids: Int32s
    """int32[P]."""
    response_ids: Int32s
    """int32[T]."""
    behaviour_logprobs: Float32s
    """float32[T]: of the rollout, at the job's temperature."""
    loss_mask: NDArray[np.bool_]
    """bool[T]: the policy chose this token (tool output is False)."""
    advantage: float
    """Of all tokens, or with ``turn_advantages`` of those of the first turn."""
    version_spans: tuple[tuple[int, PolicyVersion], ...]
    """(first token, version that sampled from there on)."""
    is_branch: bool = False
    turn_advantages: tuple[tuple[int, float], ...] = ()
    """(first token, advantage from there on) of the turns after the first."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images; ``prompt_ids`` has each image's token as often as it takes tokens."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens to run through the model: P + T."""
        return int(self.prompt_ids.size + self.response_ids.size)

    @property
    def num_trained_tokens(self) -> int:
        """Return the number of tokens that take part in the loss."""
        return int(self.loss_mask.sum())

    @property
    def trained_advantages(self) -> Float32s:
        """Return float32[R]: the advantage of each trained token."""
        starts = np.array([0, *(first for first, _ in self.turn_advantages)])
        values = np.array([self.advantage, *(value for _, value in self.turn_advantages)], dtype=np.float32)
        trained: Float32s = values[np.searchsorted(starts, np.flatnonzero(self.loss_mask), side="right") - 1]
        return trained

    @property
    def has_signal(self) -> bool:
        """Return True if a trained token has an advantage other than 0."""
        return bool(self.trained_advantages.any()) if self.turn_advantages else self.advantage != 0


@dataclass(frozen=True)
class TrainingBatch:
    """Hold the sequences of one update."""

    sequences: tuple[TrainingSequence, ...]
    temperature: float
    """The sampling temperature; the trainer divides its logits by it."""
    statistics: dict[str, float]
    """Figures of the batch (rewards, advantages, lengths, degenerate groups); ``PolicyModel.update`` returns them."""

    @property
    def num_trained_tokens(self) -> int:
        """Return the number of tokens that take part in the loss, over all sequences."""
        return sum(sequence.num_trained_tokens for sequence in self.sequences)


@dataclass(frozen=True)
class RewardPenalty:
    """Lower rewards by the divergence from the starting weights (``loss.klIn: reward``)."""

    coefficient: float
    divergences: Callable[[TrainingBatch], Sequence[Float32s]]
    """Estimates of each sequence's tokens, float32[T]; advantages of the batch are not read."""


@dataclass(frozen=True)
class _Scored:
    """Hold a scored sample before its advantage is known."""

    group: Group
    group_number: int
    index: int
    body: SampleBody
    score: float
    turn_weight: float
    """The weight with which the environment's rewards are part of the score."""

    @property
    def is_truncated(self) -> bool:
        """Return True if a limit ended the sample."""
        return self.body.generation.is_truncated

    @property
    def starts(self) -> Ints:
        """Return the first token of each turn of the sample's own sequence."""
        return turn_starts([turn.first for turn in self.body.generation.turns], len(self.body.loss_mask))

    @property
    def num_turn_tokens(self) -> Ints:
        """Return the trained tokens of each turn; those of branches, which are not timed, count to the first."""
        counts = turn_tokens(self.starts, _mask(self.body))
        counts[0] += _num_chosen(self.body) - counts.sum()
        return counts


def make_batch(
    groups: Sequence[Group],
    estimator: str,
    temperature: float,
    penalty: RewardPenalty | None = None,
    turn_weights: Mapping[str, float] | None = None,
    *,
    mask_truncated: bool = False,
    filter_truncated: bool = False,
) -> TrainingBatch:
    """Turn groups into a batch, whose ``sequences`` are empty if no sample can be trained on.

    Args:
        groups: in any order, without those that are to be dropped.
        estimator: a key of ``ESTIMATORS``.
        turn_weights: scorers that read the environment's reward → their weights, for advantages of turns; None: one
            advantage a sample.
        mask_truncated: samples that ended at a limit count in the advantages of others only.
        filter_truncated: they count nowhere, as samples without a score.
    """
    weights = turn_weights or {}
    scored = [sample for number, group in enumerate(groups) for sample in _scored_samples(group, number, weights)]
    scored = [sample for sample in scored if not (filter_truncated and sample.is_truncated)]
    scores = np.array([sample.score for sample in scored], dtype=np.float64)
    num_tokens = np.array([_num_chosen(sample.body) for sample in scored], dtype=np.int64)
    # Groups are numbered without holes: one that lost all its samples must not count as a group.
    group = np.unique([sample.group_number for sample in scored], return_inverse=True)[1].astype(np.int64)
    trained = [(owner, each) for owner, each in enumerate(scored) if not (mask_truncated and each.is_truncated)]
    owned = [(owner, sequence) for owner, sample in trained for sequence in _sequences(sample)]
    owners, sequences = [owner for owner, _ in owned], tuple(sequence for _, sequence in owned)
    rewards, figures = scores, dict[str, float]()
    if penalty is not None and sequences:
        found = penalty.divergences(TrainingBatch(sequences, temperature, {}))
        own = [values[sequence.loss_mask] for values, sequence in zip(found, sequences, strict=True)]
        rewards, figures = penalise(scores, owners, own, penalty.coefficient)
        figures |= _spread("critic/rewards", rewards)
    if turn_weights is None:
        advantages = ESTIMATORS[estimator](rewards, group, num_tokens)
        sequences = tuple(replace(each, advantage=float(advantages[owner])) for owner, each in owned)
    else:
        by_turn = _turn_advantages(scored, rewards, estimator, group)
        sequences = tuple(_with_turns(each, scored[owner], by_turn[owner]) for owner, each in owned)
        advantages = np.concatenate([np.zeros(0), *by_turn])
    figures |= _of_responses(groups) | _spread("critic/score", scores) | _spread("critic/advantages", advantages)
    single, zero_variance = degenerate_groups(rewards, group)
    statistics = {
        "training/samples": float(sum(len(each.samples) for each in groups)),
        "training/scored": float(scores.size),
        "training/sequences": float(len(sequences)),
        "training/tokens": float(sum(sequence.num_trained_tokens for sequence in sequences)),
        "training/groups_single": float(single),
        "training/groups_zero_variance": float(zero_variance),
    }
    return TrainingBatch(sequences, temperature, statistics | figures)


def _scored_samples(group: Group, number: int, turn_weights: Mapping[str, float]) -> list[_Scored]:
    return [
        _Scored(group, number, sample.index, sample.body, scoring.value, _turn_weight(scoring, turn_weights))
        for sample in group.samples
        if sample.body is not None and (scoring := sample.scoring) is not None and scoring.value is not None
    ]


def _turn_weight(scoring: ScoringRecord, weights: Mapping[str, float]) -> float:
    """Return the weight of those scorers that had a value for this sample."""
    scorers = scoring.scorers
    return sum(weight for name, weight in weights.items() if name in scorers and scorers[name].is_scored)


def _sequences(sample: _Scored) -> list[TrainingSequence]:
    """Return the sample's own sequence and its branches, without those in which the policy chose no token.

    Their advantages follow once the rewards of all samples are known.
    """
    return [
        TrainingSequence(
            group=sample.group.id,
            index=sample.index,
            prompt_ids=np.frombuffer(part.prompt_ids or sample.group.prompt.prompt_ids, dtype="<i4"),
            response_ids=np.frombuffer(part.response_ids, dtype="<i4"),
            behaviour_logprobs=np.frombuffer(part.logprobs, dtype="<f4"),
            loss_mask=_mask(part),
            advantage=0.0,
            version_spans=tuple((first, PolicyVersion(inc, number)) for first, inc, number in part.version_spans),
            is_branch=isinstance(part, Branch),
            images=tuple(sample.group.prompt.images),
        )
        for part in _parts(sample.body)
        if _mask(part).any()
    ]


def _parts(body: SampleBody) -> list[SampleBody | Branch]:
    return [body, *body.branches]


def _num_chosen(body: SampleBody) -> int:
    """Return the number of tokens that the policy chose, over all sequences."""
    return sum(int(_mask(part).sum()) for part in _parts(body))


def _mask(part: SampleBody | Branch) -> NDArray[np.bool_]:
    return np.frombuffer(part.loss_mask, np.uint8).astype(np.bool_)


def _turn_advantages(scored: Sequence[_Scored], rewards: Floats, estimator: str, group: Ints) -> list[Floats]:
    num_tokens = [sample.num_turn_tokens for sample in scored]
    returns = [
        turn_returns(float(reward), sample.body.sample.turn_rewards, sample.turn_weight, counts.size)
        for reward, sample, counts in zip(rewards, scored, num_tokens, strict=True)
    ]
    return turn_advantages(ESTIMATORS[estimator], returns, group, num_tokens)


def _with_turns(sequence: TrainingSequence, sample: _Scored, advantages: Floats) -> TrainingSequence:
    """Return the sequence with its turns' advantages; a branch has the first turn's, whose return is the reward."""
    own = replace(sequence, advantage=float(advantages[0]))
    if sequence.is_branch:
        return own
    later = zip(sample.starts[1:].tolist(), advantages[1:].tolist(), strict=True)
    return replace(own, turn_advantages=tuple(later))


def _of_responses(groups: Sequence[Group]) -> dict[str, float]:
    """Return figures of all samples that were generated, by the tokens that the policy chose.

    A response's length includes the sample's branches; its repetition does not, as these may quote one another.
    """
    bodies = [sample.body for group in groups for sample in group.samples if sample.body is not None]
    lengths = [_num_chosen(body) for body in bodies]
    repeated = [repeated_share(np.frombuffer(body.response_ids, "<i4")[_mask(body)]) for body in bodies]
    figures = _spread("response_length", np.array(lengths, dtype=np.float64))
    return figures | _spread("response_repetition", np.array(repeated))


def _spread(name: str, values: Floats) -> dict[str, float]:
    if values.size == 0:
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/min": values.min().item(),
        f"{name}/max": values.max().item(),
    }


def repeated_share(ids: Int32s) -> float:
    """Return the share of runs of ``WIDTH`` tokens that occurred before in the response, int32[T]: 0 to nearly 1.

    It is a sign of collapse that rewards may not show. A response shorter than ``WIDTH`` has share 0.
    """
    count = ids.size - WIDTH + 1
    if count < 1:
        return 0.0
    runs = np.zeros(count, np.int64)
    for offset in range(WIDTH):
        runs = runs * _FACTOR + ids[offset : offset + count]
    return 1 - np.unique(runs).size / count


def grpo(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return the group-relative advantage, with the group's spread divided out.

    ``A_i = (r_i - mean_g) ÷ (std_g + 1e-6)``, ``std_g`` with n - 1 in the denominator (torch's default, as verl and
    TRL). Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1. Degenerate: 0, see the module.
    """
    centred = dr_grpo(scores, group, num_tokens)
    sizes = np.bincount(group)
    variance = np.bincount(group, weights=centred**2) / np.maximum(sizes - 1, 1)
    advantages: Floats = centred / (np.sqrt(variance)[group] + STD_EPSILON)
    return advantages


def dr_grpo(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return GRPO's advantage without the division, which favours questions nearly solved or nearly hopeless.

    ``A_i = r_i - mean_g``. Source: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783), which
    also divides the summed token losses by a constant: ``loss.aggregation: constant``. Degenerate: 0.
    """
    sizes = np.bincount(group)
    means = np.bincount(group, weights=scores) / np.maximum(sizes, 1)
    # A mean of equal floats may miss them by a rounding error, which the division by a tiny std would blow up.
    advantages: Floats = np.where(_has_spread(scores, group)[group], scores - means[group], 0.0)
    return advantages


def rloo(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return each sample's score minus the mean of the others of its group.

    ``A_i = r_i - (Σ_{j≠i} r_j) ÷ (n - 1) = n ÷ (n - 1) · (r_i - mean_g)``. Source: Ahmadian et al. 2024, Back to
    Basics (arXiv 2402.14740). Degenerate: 0 (a group of one has no others).
    """
    sizes = np.bincount(group)
    factor = sizes / np.maximum(sizes - 1, 1)
    advantages: Floats = dr_grpo(scores, group, num_tokens) * factor[group]
    return advantages


def reinforce_plus_plus(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return the rewards normalised over all tokens of the update; groups are ignored.

    ``A_i = (r_i - μ) ÷ √(σ² + 1e-8)`` with μ and σ² over the tokens of the update (a sample counts once per trained
    token, σ² with N - 1), which is verl's ``reinforce_plus_plus`` with discount 1. Source: Hu 2025, REINFORCE++
    (arXiv 2501.03262); its KL term is the loss's here (``klCoefficient``). Degenerate: fewer than two tokens, or all
    rewards equal: 0. With mini-batches the statistics are those of the mini-batch.
    """
    tokens = num_tokens.sum()
    if tokens < 2 or scores.size == 0 or scores.max() == scores.min():
        return np.zeros_like(scores)
    mean = float((scores * num_tokens).sum() / tokens)
    variance = float((num_tokens * (scores - mean) ** 2).sum() / (tokens - 1))
    advantages: Floats = (scores - mean) / np.sqrt(variance + VARIANCE_EPSILON)
    return advantages


def reinforce_plus_plus_baseline(scores: Floats, group: Ints, num_tokens: Ints) -> Floats:
    """Return the rewards minus their group's mean, then normalised over all tokens of the update.

    ``A_i = whiten(r_i - mean_g)``, the normalisation of ``reinforce_plus_plus``; verl's
    ``reinforce_plus_plus_baseline``. Source: Hu 2025, REINFORCE++ (arXiv 2501.03262). Degenerate: a lone survivor
    counts as reward = mean (in verl its mean is 0); groups without spread get the negative mean, which is near 0; all
    equal: 0.
    """
    return reinforce_plus_plus(dr_grpo(scores, group, num_tokens), group, num_tokens)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "drGrpo": dr_grpo,
    "rloo": rloo,
    "reinforcePlusPlus": reinforce_plus_plus,
    "reinforcePlusPlusBaseline": reinforce_plus_plus_baseline,
}
"""``algorithm.advantage`` of the job → its estimator."""


def degenerate_groups(scores: Floats, group: Ints) -> tuple[int, int]:
    """Count the groups of one survivor, and those of more whose scores are equal.

    Args:
        group: has every number from 0 to its maximum.
    """
    sizes = np.bincount(group)
    spread = _has_spread(scores, group)
    return int((sizes == 1).sum()), int(((sizes > 1) & ~spread).sum())


def _has_spread(scores: Floats, group: Ints) -> NDArray[np.bool_]:
    """Return bool[G]: two scores of the group differ."""
    num_groups = int(group.max()) + 1 if group.size else 0
    highest = np.full(num_groups, -np.inf)
    lowest = np.full(num_groups, np.inf)
    np.maximum.at(highest, group, scores)
    np.minimum.at(lowest, group, scores)
    differs: NDArray[np.bool_] = highest > lowest
    return differs


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
    """Return the number of trained tokens of each turn: int64[K]."""
    owners = np.searchsorted(starts, np.flatnonzero(loss_mask), side="right") - 1
    return np.bincount(owners, minlength=starts.size).astype(np.int64)


def turn_returns(score: float, turn_rewards: Sequence[float], weight: float, num_turns: int) -> Floats:
    """Return the reward of a sample without what the environment had paid before each turn: float64[K].

    ``R_t = r - w · Σ_{k<t} r_k`` with ``r_k`` the environment's reward for turn k and ``w`` the weight of the scorer
    ``environment``.

    Args:
        turn_rewards: of the environment, one a turn; missing ones are 0.
        weight: with which they are part of the reward.
    """
    paid = np.zeros(num_turns)
    before = np.asarray(turn_rewards[: num_turns - 1], dtype=np.float64)
    paid[1 : before.size + 1] = before
    returns: Floats = score - weight * np.cumsum(paid)
    return returns


def turn_advantages(
    estimator: Estimator, returns: Sequence[Floats], group: Ints, num_tokens: Sequence[Ints]
) -> list[Floats]:
    """Apply an estimator to each turn position (``algorithm.advantagePer: turn``).

    It compares ``turn_returns`` with the returns of the same turn of the other samples of the group: what a turn cannot
    have caused does not count for it. Source: the discount-free return of policy gradients (Sutton et al. 2000, Policy
    Gradient Methods for Reinforcement Learning with Function Approximation), with a group's mean at turn t as the
    baseline. Degenerate: with one turn a sample, the estimator itself, exactly. A turn that only one sample of its
    group reached has nothing to be compared with: 0 under the group-relative estimators.

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


def penalise(
    scores: Floats, owners: Sequence[int], divergences: Sequence[Float32s], coefficient: float
) -> tuple[Floats, dict[str, float]]:
    """Subtract the divergence from the starting weights from each sample's reward (``loss.klIn: reward``).

    ``r'_i = r_i - klCoefficient · Σ_t k_it`` over the trained tokens of sample i, with ``k`` the estimate
    ``klEstimator`` between the policy around which the loss is clipped and the starting weights. Advantages are
    computed from r', so the penalty has no gradient of its own. Source: Ouyang et al. 2022, InstructGPT (arXiv
    2203.02155), as verl's ``apply_kl_penalty`` with an advantage of whole responses, which sums the tokens.
    Degenerate: equal policies leave the rewards as they are.

    Args:
        owners: the sample (0 … S - 1) of each token sequence: a sample may have branches.
        divergences: of each sequence, one estimate a trained token.

    Returns:
        r', float64[S]; the mean over samples of the mean over their tokens, under verl's name.
    """
    sums, num_tokens = np.zeros_like(scores), np.zeros_like(scores)
    for owner, own in zip(owners, divergences, strict=True):
        sums[owner] += own.sum(dtype=np.float64)
        num_tokens[owner] += own.size
    trained = num_tokens > 0
    figures = {"actor/reward_kl_penalty_coeff": coefficient}
    if trained.any():
        figures["actor/reward_kl_penalty"] = float((sums[trained] / num_tokens[trained]).mean())
    return scores - coefficient * sums, figures


class KlController:
    """Hold the coefficient of the divergence, which may follow a target (``loss.adaptiveKl``).

    ``β ← β · (1 + clip(KL ÷ target - 1, -0.2, 0.2) · n ÷ horizon)`` after an update on n samples of the mean divergence
    KL. Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593), as verl's
    ``AdaptiveKLController``. Degenerate: at KL = target the coefficient stays, and 0 stays 0.

    Args:
        settings: ``adaptiveKl``; None: the coefficient is fixed.
    """

    def __init__(self, coefficient: float, settings: AdaptiveKlSpec | None) -> None:
        self.coefficient = coefficient
        self._settings = settings

    def update(self, divergence: float, num_samples: int) -> None:
        """Change the coefficient by an update's divergence in nats, a mean over samples of means over tokens."""
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
