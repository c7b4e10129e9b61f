"""Find a scoring service in Redis, with a separate message for each kind of failure."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from redis.exceptions import AuthenticationError, ResponseError

from plaudit_wire.codec import RecordError, decode
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Service
from plaudit_wire.names import Names
from plaudit_wire.outage import OUTAGE
from plaudit_workers.stream.connection import RedisAddress, Transport
from plaudit_workers.stream.transitions.scripts import Scripts

_LOOK_AGAIN_S = 0.5


class ServiceError(RefusedError):
    """The service cannot be used as requested. The message has the remedy."""


async def connect(address: RedisAddress, *, run: str, job: str, wait_s: float) -> tuple[Transport, Service]:
    """Open the transport of a scoring service.

    Args:
        run: id of the run; empty: the only service of this ``job``, or the only one in this Redis.
        wait_s: seconds to wait for a service that does not exist yet.

    Raises:
        ServiceError: Redis cannot be reached or refuses the password; the run does not exist or is no scoring service.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await _connect(address, run, job)
        except _NotFoundError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_LOOK_AGAIN_S)


class _NotFoundError(ServiceError):
    """The service may still appear."""


async def _connect(address: RedisAddress, run: str, job: str) -> tuple[Transport, Service]:
    client = address.client(timeout_s=5.0, retries=0)
    try:
        run = run or await _only_service(client, address, job)
        stored: Any = await client.get(Names(run).service)
        if stored is None:
            raise await _no_service(client, address, run)
        return Transport(address, run, None, Scripts()), decode(stored, Service)
    except (AuthenticationError, ResponseError) as error:
        raise ServiceError(
            f"Redis at {address.url} refuses the password: {error}. Give password=, or set PLAUDIT_REDIS_PASSWORD"
        ) from error
    except OUTAGE as error:
        if problem := await address.tls_problem(error):
            raise ServiceError(problem) from error
        raise _NotFoundError(
            f"Redis at {address.url} cannot be reached: {error}. Is the service running, and is the address right?"
        ) from error
    except RecordError as error:
        raise ServiceError(f"run {run} at {address.url}: {error}") from error
    finally:
        await client.aclose(close_connection_pool=True)


async def _no_service(client: Any, address: RedisAddress, run: str) -> ServiceError:
    if await client.exists(Names(run).samples):  # created by the first process of a run
        return _NotFoundError(
            f"run {run} at {address.url} is no scoring service, or none of its reward workers has started yet. A job "
            "without rollout and trainer is one: docs/reward-service.md"
        )
    there = ", ".join(sorted(await _services(client))) or "none"
    return _NotFoundError(
        f"there is no run {run} at {address.url} (scoring services there: {there}). 'plaudit run' prints the run's name"
    )


async def _only_service(client: Any, address: RedisAddress, job: str) -> str:
    found = {run: service.job for run, service in (await _services(client)).items() if job in ("", service.job)}
    of_job = f" of job {job}" if job else ""
    if not found:
        raise _NotFoundError(f"there is no scoring service{of_job} at {address.url}. Start one with 'plaudit run'")
    if len(found) > 1:
        raise ServiceError(f"{address.url} has {len(found)} services{of_job}: name one with run=: {', '.join(found)}")
    return next(iter(found))


async def _services(client: Any) -> dict[str, Service]:
    """Return all scoring services in this Redis, by run."""
    found: dict[str, Service] = {}
    async for key in client.scan_iter("plaudit:{*}:service", count=1000):
        stored = await client.get(key)
        if stored is not None:
            found[key.decode().split("{", 1)[1].rsplit("}", 1)[0]] = decode(stored, Service)
    return found
