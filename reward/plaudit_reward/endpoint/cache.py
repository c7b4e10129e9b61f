"""Keep the scores of a scorer in Redis, so that the same sample is scored once.

Entries lie in hashes by half of their lifetime; a read looks into the present hash and the one before, a hash expires
as a whole. So an entry lives for at least half of ``lifetime_s`` and at most all of it, and the number of entries is
bounded without a search for the oldest one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from plaudit_reward.endpoint.access import EndpointUsage, UsageReport
from plaudit_reward.scorer import Attempt, Score, Scorer
from plaudit_wire.errors import CallTimeoutError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import Sample

logger = get_logger(__name__)
_decoder = msgspec.msgpack.Decoder(Score)


class ScoreCache:
    """Cache the scores of one scorer. Without Redis every read is a miss, and a write is left out.

    The ``prefix`` of its keys names the version of the scorer. Closes ``client``.
    """

    def __init__(self, client: Redis, prefix: str, lifetime_s: int, most: int) -> None:
        self._client: Any = client
        self._prefix = prefix
        self._lifetime_s = lifetime_s
        self._most = most

    async def read(self, key: bytes) -> Score | None:
        """Return the score of a sample; None if it is not kept."""
        slot = self._slot()
        try:
            pipeline = self._client.pipeline(transaction=False)
            for each in (slot, slot - 1):
                pipeline.hget(self._hash(each), key)
            found = next((value for value in await pipeline.execute() if value is not None), None)
            return None if found is None else _decoder.decode(found)
        except (RedisError, OSError, msgspec.DecodeError) as error:
            logger.warning("the cache of scores cannot be read", error=str(error))
            return None

    async def write(self, key: bytes, score: Score) -> None:
        """Keep the score of a sample, while there is room for it."""
        name = self._hash(self._slot())
        try:
            if await self._client.hlen(name) < self._most // 2:
                pipeline = self._client.pipeline(transaction=False)
                pipeline.hset(name, key, msgspec.msgpack.encode(score))
                pipeline.expire(name, self._lifetime_s)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            logger.warning("the cache of scores cannot be written", error=str(error))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    def _slot(self) -> int:
        return int(time.time() // (self._lifetime_s / 2))

    def _hash(self, slot: int) -> str:
        return f"{self._prefix}:{slot}"


_SEEN = "prompt messages response ground_truth data_source extra_info finish_reason completion".split()  # noqa: SIM905


def sample_key(sample: Sample) -> bytes | None:
    """Return the digest of what an endpoint sees of a sample; None if it holds what JSON cannot express."""
    return _digest(*(getattr(sample, name) for name in _SEEN))


def whole_sample_key(sample: Sample) -> bytes | None:
    """Return the digest of a sample without its place in the run, for functions, which see all of it."""
    return _digest(msgspec.structs.replace(sample, group="", index=0))


def _digest(*seen: Any) -> bytes | None:
    try:
        return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).digest()[:16]
    except (TypeError, ValueError):
        return None


class CachedScorer:
    """Answer repeated samples from a cache in front of a scorer, which keeps no failures. Opens and closes its parts.

    Of equal samples at the same time, one is scored. Without a ``report`` of ``usage``, the scorer reports it with its
    requests, among which a hit counts as ``cached``. A sample whose ``key`` is None is scored without the cache.
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
                async with asyncio.timeout(attempt.limit_s):
                    await other.wait()
            except TimeoutError as error:
                raise CallTimeoutError(f"an equal sample was not scored within {attempt.limit_s:g} s") from error
        done = self._scoring[key] = asyncio.Event()
        try:
            kept = await self._cache.read(key)
            if kept is not None:
                self._usage.cache["cache_hits"] += 1
                if self._report is None:
                    self._usage.requests["cached"] += 1
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
