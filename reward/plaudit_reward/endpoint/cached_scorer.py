"""Answer repeated samples from a cache in front of a scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plaudit_reward.endpoint.score_cache import ScoreCache, sample_key
from plaudit_reward.endpoint.usage import EndpointUsage, UsageReport
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt, Scorer
from plaudit_wire.errors import CallTimeoutError
from plaudit_wire.sample import Sample


class CachedScorer:
    """Keep the scores of a scorer, but no failures. Of equal samples at the same time, score one.

    Args:
        scorer: opened and closed here.
        cache: closed here.
        report: of ``usage``, started and stopped here. None: the scorer reports it with its requests, among which a hit
            counts with the status ``cached``.
        key: returns the digest of what the scorer sees of a sample; None: the sample is scored without the cache.
    """

    def __init__(
        self,
        scorer: Scorer,
        cache: ScoreCache,
        usage: EndpointUsage,
        report: UsageReport | None = None,
        key: Callable[[Sample], bytes | None] = sample_key,
    ) -> None:
        self.name = scorer.name
        self.scorer = scorer
        self._cache = cache
        self._usage = usage
        self._report = report
        self._key = key
        self._scoring: dict[bytes, asyncio.Event] = {}

    async def open(self) -> None:
        """Open the scorer."""
        if self._report is not None:
            self._report.start()
        await self.scorer.open()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped."""
        return bool(getattr(self.scorer, "circuit_open", False))

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Return the kept score of a sample, or score it."""
        key = self._key(sample)
        if key is None:
            return await self.scorer.score(sample, attempt)
        while (other := self._scoring.get(key)) is not None:
            try:
                await asyncio.wait_for(other.wait(), attempt.limit_s)
            except TimeoutError as error:
                raise CallTimeoutError(f"an equal sample was not scored within {attempt.limit_s:g} s") from error
        done = self._scoring[key] = asyncio.Event()
        try:
            kept = await self._cache.read(key)
            if kept is not None:
                self._usage.cache["cache_hits"] += 1
                if self._report is None:
                    self._usage.count_request("cached")
                return kept
            self._usage.cache["cache_misses"] += 1
            score = await self.scorer.score(sample, attempt)
            if score.outcome == "scored":
                await self._cache.write(key, score)
            return score
        finally:
            del self._scoring[key]
            done.set()

    def room(self) -> int:
        """Return how many more samples the scorer could start soon."""
        return self.scorer.room()

    async def close(self) -> None:
        """Close the scorer and the cache."""
        await self.scorer.close()
        await self._cache.close()
        if self._report is not None:
            await self._report.stop()
