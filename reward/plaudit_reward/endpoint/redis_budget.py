"""Share a budget among any number of workers, stored in Redis and timed by its clock. ``lua/budget.lua`` decides."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from plaudit_reward.endpoint.limits import BudgetReport, Passed, RateLimits
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.function_library import FunctionLibrary, is_missing, missing_error

LEASE_S = 15.0
"""Seconds for which the requests in flight of a killed worker still count."""

BUDGET: Final = FunctionLibrary(
    "plaudit_budget", {"exchange": (files("plaudit_reward.endpoint") / "lua" / "budget.lua").read_text()}
)
"""The function that decides, for Redis."""

_SECOND = 1_000_000
_AS_RESERVED = -2
_AT_ONCE = -1


class RedisBudget:
    """Exchange a worker's reports with a shared budget.

    Args:
        client: of the Redis that stores it; closed here.
        key: the budget's name. All workers that use the same key share the budget; its hash tag routes it on a cluster.
        limits: the same in every worker.
    """

    def __init__(self, client: Redis, key: str, worker: str, limits: RateLimits, *, lease_s: float = LEASE_S) -> None:
        self.limits = limits
        self._client = client
        self._key = key
        # A name of its own for each start: requests of a killed process are not this one's.
        self._worker = f"{worker}-{os.urandom(4).hex()}"
        self._lease_s = lease_s

    async def exchange(self, report: BudgetReport) -> Passed:
        """See ``Budget``."""
        limits = self.limits
        arguments: list[Any] = [
            self._worker,
            round(limits.window_s * _SECOND),
            round(self._lease_s * _SECOND),
            limits.requests or 0,
            limits.tokens or 0,
            limits.concurrency or 0,
            report.in_flight,
            report.num_waiting,
            len(report.settled),
        ]
        for settled in report.settled:
            tokens = _AS_RESERVED if settled.tokens is None else settled.tokens
            ago = _AT_ONCE if settled.sent_ago_s is None else round(settled.sent_ago_s * _SECOND)
            arguments += (f"{settled.id}@{self._worker}", tokens, ago)
        for request in report.waiting:
            arguments += (f"{request.id}@{self._worker}", request.tokens)
        try:
            passed, again = await self._call(arguments)
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise ConnectionError(str(error)) from error
        except RedisError as error:
            raise InfrastructureError(f"the Redis of the limits refuses: {error}") from error
        return Passed(passed, again / _SECOND)

    async def _call(self, arguments: list[Any]) -> Any:
        function = BUDGET.functions["exchange"]
        call: Any = self._client.fcall
        try:
            return await call(function, 1, self._key, *arguments)
        except ResponseError as error:
            if not is_missing(error):
                raise
        try:
            await self._client.function_load(BUDGET.text, replace=True)
        except ResponseError as error:
            raise missing_error(BUDGET, error) from error
        return await call(function, 1, self._key, *arguments)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()
