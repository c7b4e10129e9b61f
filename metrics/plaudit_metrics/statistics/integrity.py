"""Compute from stored samples alone what the reward taught: pure functions over arrays of one entry a sample.

All relations are taken *within groups*: the samples of a prompt are compared with each other, as the advantage compares
them, so that hard and easy prompts do not pass for a relation. With x and y the values less their group's mean::

    slope       b = sum(x y) / sum(x x)
    correlation r = sum(x y) / sqrt(sum(x x) sum(y y))

Intervals are percentiles of bootstrap samples of whole groups, because samples of one group are not independent. Such
figures do not prove that a reward is wrong (a right answer may need more words). ``plaudit audit`` computes them for a
run; ``step_integrity`` has those of a step that need no texts, and two of them, over the newest steps, have an alert:
``length_pays`` and ``escape_probability``.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_RESAMPLES = 400
_TAIL = 0.025
_REPEATED_WORDS = 4
_WORD = re.compile(r"[^\W\d_]+")
_LEAST_WORDS = 8
_RUN_WORDS = 3
_BANDS, _IN_BAND = 4, 8
_FACTORS, _SHIFTS = np.random.default_rng(0).integers(1, 2**63, (2, _BANDS * _IN_BAND, 1), dtype=np.uint64)
"""Of the hash functions of a signature."""
_FORMAT = re.compile(r"\s*(?:#{1,6} |[-*•] |\d{1,3}[.)] |\||```)|.*(?:\*\*|</?[A-Za-z_]{1,40}>|\\boxed)")
"""A heading, list, table or fence that begins a line; bold text, a tag or a box in it."""
KEY = "integrity/"
"""Prefix of the figures of a step."""
CORRELATION, LONGEST, OTHERS = f"{KEY}length/correlation", f"{KEY}masked/longest", f"{KEY}masked/others"
WINDOW_STEPS = 20
RELATION_MATTERS = 0.3
"""From this correlation on length is a large part of what the reward pays for."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float
    groups: int
    """Groups that it was computed from: those in which both quantities vary."""

    @property
    def is_positive(self) -> bool:
        """Return True if the whole interval lies above 0."""
        return self.low > 0


class GroupShares(msgspec.Struct, frozen=True):
    """Shares of the groups without a signal: the samples of each have one score."""

    groups: int
    saturated: float
    """All samples have the highest score of the run."""
    dead: float
    """All samples have another single score."""


def centred(values: Array, groups: NDArray[np.int64]) -> Array:
    """Return values less the mean of their group."""
    sums, counts = np.bincount(groups, weights=values), np.bincount(groups)
    centred: Array = values - (sums / np.maximum(counts, 1))[groups]
    return centred


_LARGEST_SQUARED = 1e150


def _unit_of(values: Array) -> float:
    """Return what to divide values by so that their squares and sums are floats: 1 but for enormous ones."""
    largest = float(np.abs(values).max(initial=0.0))
    return largest if largest > _LARGEST_SQUARED else 1.0


def correlation(x: Array, y: Array, groups: NDArray[np.int64]) -> Estimate | None:
    """Return the correlation within groups; None if no group has two different values of each."""
    return _estimate(x / _unit_of(x), y / _unit_of(y), groups, lambda xx, yy, xy: xy / math.sqrt(xx * yy))


def slope(x: Array, y: Array, groups: NDArray[np.int64]) -> Estimate | None:
    """Return how much y rises within groups for each unit of x; None as for ``correlation``."""
    return _estimate(x, y, groups, lambda xx, _, xy: xy / xx)


def _estimate(
    x: Array, y: Array, groups: NDArray[np.int64], figure: Callable[[float, float, float], float]
) -> Estimate | None:
    parts = _products(x, y, groups)
    if not parts.shape[1]:
        return None

    def resampled(draws: NDArray[np.int64]) -> list[float]:
        return [figure(*map(float, sums)) for sums in parts[:, draws].sum(axis=2).T]

    return estimate(figure(*map(float, parts.sum(axis=1))), parts.shape[1], resampled)


def estimate(value: float, count: int, resampled: Callable[[NDArray[np.int64]], Sequence[float] | Array]) -> Estimate:
    """Return a figure of ``count`` groups with the 95 % interval of its bootstrap samples.

    ``resampled`` returns the figure of each draw of groups, given as their numbers: shape [draws, count].
    """
    draws = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    low, high = np.quantile(resampled(draws), [_TAIL, 1 - _TAIL])
    return Estimate(value, float(low), float(high), count)


def _products(x: Array, y: Array, groups: NDArray[np.int64]) -> Array:
    """Return the sums of x x, y y and x y of each group in which both vary, shape [3, groups]."""
    if not len(x):
        return np.empty((3, 0))
    x, y = centred(x, groups), centred(y, groups)
    parts = np.stack([np.bincount(groups, weights=each) for each in (x * x, y * y, x * y)])
    return np.asarray(parts[:, (parts[0] > 1e-12) & (parts[1] > 1e-12)], dtype=np.float64)


def step_integrity(
    reward: Array, tokens: Array, scorers: Mapping[str, Array], group: NDArray[np.int64]
) -> dict[str, float]:
    """Return the figures of a step by their keys (docs/metrics.md), from generated samples; NaN: no score."""
    kept = ~np.isnan(reward)
    figures: dict[str, float] = {}
    if kept.any():
        score, length = reward[kept], tokens[kept]
        _, groups = np.unique(group[kept], return_inverse=True)
        unit = _unit_of(score)
        xx, yy, xy = _products(length, score / unit, groups).sum(axis=1).tolist()
        if xx > 0:
            figures |= {CORRELATION: xy / math.sqrt(xx * yy), f"{KEY}length/slope": 100 * xy / xx * unit}
        if len(scorers) > 1:
            values = {name: np.nan_to_num(of_all[kept]) for name, of_all in scorers.items()}
            shares = variance_shares(values, score, groups)
            figures |= {f"{KEY}variance/{name}": share for name, share in shares.items()}
        without = group_shares(score, groups)
        figures |= {f"{KEY}groups/saturated": without.saturated, f"{KEY}groups/dead": without.dead}
    if (masked := masked_by_length(tokens, kept)) is not None:
        figures |= {LONGEST: masked[0], OTHERS: masked[1]}
    return figures


def length_pays(steps: Iterable[Mapping[str, float]]) -> float | None:
    """Return the share of the newest 20 steps in which length is a large part of the reward; None of fewer steps."""
    known = [step[CORRELATION] for step in steps if CORRELATION in step][-WINDOW_STEPS:]
    return sum(value > RELATION_MATTERS for value in known) / WINDOW_STEPS if len(known) == WINDOW_STEPS else None


def escape_probability(steps: Iterable[Mapping[str, float]]) -> float | None:
    """Return the probability that long responses lack a score so often by chance alone; None of fewer than 20 steps.

    A sign test over the newest 20 steps: in so many of those that differ the longest quarter has the larger share
    without a score. Where few samples have none, chance gives that in less than half of the steps, so the test errs on
    the quiet side. Whole steps count, because one outage takes many samples at once.
    """
    known = [step[LONGEST] - step[OTHERS] for step in steps if {LONGEST, OTHERS} <= step.keys()][-WINDOW_STEPS:]
    if len(known) < WINDOW_STEPS:
        return None
    return ups_by_chance(sum(value > 0 for value in known), sum(value != 0 for value in known))


def ups_by_chance(ups: int, count: int) -> float:
    """Return the probability of so many ups or more among ``count`` ups and downs, by chance alone (a sign test)."""
    return float(sum(math.comb(count, number) for number in range(ups, count + 1)) / 2**count)


def variance_shares(scorers: Mapping[str, Array], reward: Array, groups: NDArray[np.int64]) -> dict[str, float]:
    """Return each scorer's share of the reward's variance within groups, largest first.

    The reward is fitted by least squares from the scorers' values, b their coefficients; the share of scorer i is
    cov(b_i x_i, y) / var(y), as for the parts of a sum. What remains of 1 is not explained by them (a combination that
    is no sum).
    """
    y = centred(reward / _unit_of(reward), groups)
    total = float(y @ y)
    if total <= 1e-12 or not scorers:
        return {}
    x = np.stack([centred(values / _unit_of(values), groups) for values in scorers.values()], axis=1)
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    shares = {name: float(b * (column @ y)) / total for name, b, column in zip(scorers, coefficients, x.T, strict=True)}
    return dict(sorted(shares.items(), key=lambda each: -each[1]))


def group_shares(reward: Array, groups: NDArray[np.int64]) -> GroupShares:
    """Return the shares of groups whose samples all have the same score."""
    count = int(groups.max()) + 1 if len(groups) else 0
    if not count:
        return GroupShares(0, 0.0, 0.0)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, groups, reward)
    np.maximum.at(high, groups, reward)
    equal = (high - low) < 1e-9
    best = high >= reward.max() - 1e-9
    return GroupShares(count, float((equal & best).mean()), float((equal & ~best).mean()))


def repetition(text: str) -> float:
    """Return the share of a text's runs of four words that occurred in it before; 0 for a text of fewer words."""
    words = text.split()
    runs = [tuple(words[i : i + _REPEATED_WORDS]) for i in range(len(words) - _REPEATED_WORDS + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def format_share(text: str) -> float:
    """Return the share of a text's lines, blank ones aside, with a heading, list, table, bold text, tag or box."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(_FORMAT.match(line) is not None for line in lines) / len(lines) if lines else 0.0


def repeated_across(responses: Sequence[str], prompts: Sequence[str]) -> NDArray[np.bool_]:
    """Return True for responses with nearly the words, numbers aside, of a response to another prompt.

    A policy that answers every prompt with the same sentences has stopped reading them. Responses of fewer than eight
    words do not count: short answers are alike without harm. Two responses that share nine of ten runs of three words
    are found with a probability of 0.9, those that share eight of ten with 0.5, and half of them with 0.02.
    """
    found = [_signature(_WORD.findall(text.lower())) for text in responses]
    seen: dict[tuple[int, bytes], set[str]] = {}
    for bands, prompt in zip(found, prompts, strict=True):
        for band in bands:
            seen.setdefault(band, set()).add(prompt)
    return np.array([any(len(seen[band]) > 1 for band in bands) for bands in found], dtype=np.bool_)


def _signature(words: Sequence[str]) -> list[tuple[int, bytes]]:
    """Return the bands of the words' MinHash (Broder 1997): texts are alike with a probability of similarity ** 8 each.

    Similarity is the share of runs of three words that both texts have, of those that either has.
    """
    if len(words) < _LEAST_WORDS:
        return []
    runs = {" ".join(words[start : start + _RUN_WORDS]) for start in range(len(words) - _RUN_WORDS + 1)}
    codes = np.array([zlib.crc32(run.encode(errors="replace")) for run in runs], dtype=np.uint64)
    least = ((_FACTORS * codes + _SHIFTS) >> np.uint64(32)).min(axis=1)
    return [(band, least[band * _IN_BAND : (band + 1) * _IN_BAND].tobytes()) for band in range(_BANDS)]


def masked_by_length(tokens: Array, has_score: NDArray[np.bool_]) -> tuple[float, float] | None:
    """Return the shares without a score among the longest quarter of the samples, and among all others.

    Samples without a score are left out of the loss, so a policy that fails on purpose escapes a bad one.
    """
    if len(tokens) < 4:
        return None
    longest = tokens > np.quantile(tokens, 0.75)
    if longest.all() or not longest.any():
        return None
    return float((~has_score[longest]).mean()), float((~has_score[~longest]).mean())


def group_numbers(names: Sequence[str]) -> NDArray[np.int64]:
    """Return a number for each name, from 0."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
