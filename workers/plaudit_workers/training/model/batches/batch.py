"""Build the batch of one update: the scored samples of some groups as plain arrays, with their advantages.

``make_batch`` is pure; ``torch_backend`` passes its result to ``PolicyModel.update``.
Left out are samples without a score (masked: a failure must not look like a reward of zero) and
samples without a token that the policy chose. Advantages are computed over all scored samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plaudit_wire.messages import Branch, PolicyVersion, SampleBody
from plaudit_wire.records import ScoringRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.training.model.batches.advantage import ESTIMATORS, degenerate_groups
from plaudit_workers.training.model.batches.repetition import repeated_share
from plaudit_workers.training.model.batches.reward_penalty import penalise
from plaudit_workers.training.model.batches.turn_credit import (
    turn_advantages,
    turn_returns,
    turn_starts,
    turn_tokens,
)

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


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
    def parts(self) -> list[SampleBody | Branch]:
        """Return the sample's own sequence and its branches."""
        return _parts(self.body)

    @property
    def num_trained_tokens(self) -> int:
        """Return the number of tokens that the policy chose, over all sequences."""
        return _num_chosen(self.body)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return the first token of each turn of the sample's own sequence."""
        return turn_starts([turn.first for turn in self.body.generation.turns], len(self.body.loss_mask))

    @property
    def num_turn_tokens(self) -> NDArray[np.int64]:
        """Return the trained tokens of each turn; those of branches, which are not timed, count to the first."""
        counts = turn_tokens(self.starts, _mask(self.body))
        counts[0] += self.num_trained_tokens - counts.sum()
        return counts


def _parts(body: SampleBody) -> list[SampleBody | Branch]:
    return [body, *body.branches]


def _num_chosen(body: SampleBody) -> int:
    """Return the number of tokens that the policy chose, over all sequences."""
    return sum(int(_mask(part).sum()) for part in _parts(body))


def _mask(part: SampleBody | Branch) -> NDArray[np.bool_]:
    return np.frombuffer(part.loss_mask, np.uint8).astype(np.bool_)


def make_batch(
    groups: Sequence[Group],
    estimator: str,
    temperature: float,
    penalty: RewardPenalty | None = None,
    turn_weights: Mapping[str, float] | None = None,
) -> TrainingBatch:
    """Turn groups into a batch, whose ``sequences`` are empty if no sample can be trained on.

    Args:
        groups: in any order, without those that are to be dropped.
        estimator: a key of ``advantage.ESTIMATORS``.
        temperature: of sampling, > 0.
        penalty: lowers rewards before advantages are computed.
        turn_weights: scorers that read the environment's reward → their weights, for advantages of turns; None: one
            advantage a sample.
    """
    weights = turn_weights or {}
    scored = [sample for number, group in enumerate(groups) for sample in _scored_samples(group, number, weights)]
    scores = np.array([sample.score for sample in scored], dtype=np.float64)
    num_tokens = np.array([sample.num_trained_tokens for sample in scored], dtype=np.int64)
    # Groups are numbered without holes: one that lost all its samples must not count as a group.
    group = np.unique([sample.group_number for sample in scored], return_inverse=True)[1].astype(np.int64)
    owned = [(owner, sequence) for owner, sample in enumerate(scored) for sequence in _sequences(sample)]
    owners, sequences = [owner for owner, _ in owned], tuple(sequence for _, sequence in owned)
    rewards, figures = scores, {}
    if penalty is not None and sequences:
        found = penalty.divergences(TrainingBatch(sequences, temperature, {}))
        own = [values[sequence.loss_mask] for values, sequence in zip(found, sequences, strict=True)]
        penalised = penalise(scores, owners, own, penalty.coefficient)
        rewards, figures = penalised.scores, penalised.figures | _spread("critic/rewards", penalised.scores)
    if turn_weights is None:
        advantages = ESTIMATORS[estimator](rewards, group, num_tokens)
        sequences = tuple(replace(each, advantage=float(advantages[owner])) for owner, each in owned)
    else:
        by_turn = _turn_advantages(scored, rewards, estimator, group)
        sequences = tuple(_with_turns(each, scored[owner], by_turn[owner]) for owner, each in owned)
        advantages = np.concatenate([np.zeros(0), *by_turn])
    figures |= _of_responses(groups) | _spread("critic/score", scores) | _spread("critic/advantages", advantages)
    statistics = {
        "training/samples": float(sum(len(each.samples) for each in groups)),
        "training/scored": float(scores.size),
        "training/sequences": float(len(sequences)),
        "training/tokens": float(sum(sequence.num_trained_tokens for sequence in sequences)),
        **_without_signal(rewards, group),
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


def _turn_advantages(
    scored: Sequence[_Scored], rewards: NDArray[np.float64], estimator: str, group: NDArray[np.int64]
) -> list[NDArray[np.float64]]:
    num_tokens = [sample.num_turn_tokens for sample in scored]
    returns = [
        turn_returns(float(reward), sample.body.sample.turn_rewards, sample.turn_weight, counts.size)
        for reward, sample, counts in zip(rewards, scored, num_tokens, strict=True)
    ]
    return turn_advantages(ESTIMATORS[estimator], returns, group, num_tokens)


def _with_turns(sequence: TrainingSequence, sample: _Scored, advantages: NDArray[np.float64]) -> TrainingSequence:
    """Return the sequence with its turns' advantages; a branch has the first turn's, whose return is the reward."""
    own = replace(sequence, advantage=float(advantages[0]))
    if sequence.is_branch:
        return own
    later = zip(sample.starts[1:].tolist(), advantages[1:].tolist(), strict=True)
    return replace(own, turn_advantages=tuple(later))


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
        for part in sample.parts
        if _mask(part).any()
    ]


def _without_signal(rewards: NDArray[np.float64], group: NDArray[np.int64]) -> dict[str, float]:
    """Count groups without a group-relative signal, by the rewards from which advantages are computed."""
    degenerate = degenerate_groups(rewards, group)
    return {
        "training/groups_single": float(degenerate.single),
        "training/groups_zero_variance": float(degenerate.zero_variance),
    }


def _of_responses(groups: Sequence[Group]) -> dict[str, float]:
    """Return figures of all samples that were generated, by the tokens that the policy chose.

    A response's length includes the sample's branches; its repetition does not, as these may quote one another.
    """
    bodies = [sample.body for group in groups for sample in group.samples if sample.body is not None]
    lengths = [_num_chosen(body) for body in bodies]
    repeated = [repeated_share(np.frombuffer(body.response_ids, "<i4")[_mask(body)]) for body in bodies]
    figures = _spread("response_length", np.array(lengths, dtype=np.float64))
    return figures | _spread("response_repetition", np.array(repeated))


def _spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    if values.size == 0:
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/min": values.min().item(),
        f"{name}/max": values.max().item(),
    }
