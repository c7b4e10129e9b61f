"""Answer repeated samples from a cache in front of a scorer."""

from __future__ import annotations

import asyncio

from plaudit_reward.endpoint.score_cache import ScoreCache, sample_key
from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.errors import CallTimeoutError
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt, Scorer
from plaudit_wire.sample import Sample


class CachedScorer:
    """A scorer whose scores are kept. Failures are not, and of equal samples at the same time one is scored.

    Args:
        scorer: opened and closed here.
        cache: of its scores; closed here.
        usage: counts the samples that needed no request, as requests with the status ``cached``.
    """

    def __init__(self, scorer: Scorer, cache: ScoreCache, usage: EndpointUsage) -> None:
        self.name = scorer.name
        self._scorer = scorer
        self._cache = cache
        self._usage = usage
        self._scoring: dict[bytes, asyncio.Event] = {}

    async def open(self) -> None:
        """Open the scorer."""
        await self._scorer.open()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped."""
        return bool(getattr(self._scorer, "circuit_open", False))

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Return the kept score of a sample, or score it."""
        key = sample_key(sample)
        if key is None:
            return await self._scorer.score(sample, attempt)
        while (other := self._scoring.get(key)) is not None:
            try:
                await asyncio.wait_for(other.wait(), attempt.limit_s)
            except TimeoutError as error:
                raise CallTimeoutError(f"an equal sample was not scored within {attempt.limit_s:g} s") from error
        done = self._scoring[key] = asyncio.Event()
        try:
            return await self._kept_or_scored(key, sample, attempt)
        finally:
            del self._scoring[key]
            done.set()

    async def _kept_or_scored(self, key: bytes, sample: Sample, attempt: Attempt) -> Score:
        kept = await self._cache.read(key)
        if kept is not None:
            self._usage.count_request("cached")
            return kept
        score = await self._scorer.score(sample, attempt)
        if score.outcome == "scored":
            await self._cache.write(key, score)
        return score

    def room(self) -> int:
        """Return how many more samples the scorer could start soon."""
        return self._scorer.room()

    async def close(self) -> None:
        """Close the scorer and the cache."""
        await self._scorer.close()
        await self._cache.close()
