"""Keep the scores of a scorer in Redis, so that the same sample is scored once.

Entries lie in hashes by half of their lifetime; a read looks into the present hash and the one before, a hash expires
as a whole. So an entry lives for at least half of ``lifetime_s`` and at most all of it, and the number of entries is
bounded without a search for the oldest one.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from plaudit_reward.score import Score
from plaudit_wire.logs import get_logger
from plaudit_wire.sample import Sample

logger = get_logger(__name__)

_decoder = msgspec.msgpack.Decoder(Score)


class ScoreCache:
    """Cache the scores of one scorer. Without Redis every read is a miss, and a write is left out.

    Args:
        client: of the run's Redis; closed here.
        prefix: of its keys; names the version of the scorer.
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


def sample_key(sample: Sample) -> bytes | None:
    """Return the digest of what an endpoint sees of a sample; None if it holds what JSON cannot express."""
    return _digest(
        sample.prompt,
        sample.messages,
        sample.response,
        sample.ground_truth,
        sample.data_source,
        sample.extra_info,
        sample.finish_reason,
        sample.completion,
    )


def whole_sample_key(sample: Sample) -> bytes | None:
    """Return the digest of a sample without its place in the run, for functions, which see all of it."""
    return _digest(msgspec.structs.replace(sample, group="", index=0))


def _digest(*seen: Any) -> bytes | None:
    try:
        return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).digest()[:16]
    except (TypeError, ValueError):
        return None
