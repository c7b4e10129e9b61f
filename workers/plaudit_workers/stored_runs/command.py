"""``plaudit runs list|delete``: list the runs whose keys an external Redis holds, or delete the keys of finished ones.

A job's own Redis ends with its run. An external one keeps the counters and streams of every run until they are deleted
here, each by its id or all that have been silent for some days (from a CronJob, say). Prints JSON: one object a run and
line. Exit code 2 where a run could not be deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from plaudit_wire.errors import RefusedError
from plaudit_wire.limits import LIVE_WITHIN_S
from plaudit_wire.names import Names
from plaudit_wire.outage import OUTAGE
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED, redis_from

_SCANNED_AT_ONCE = 1000
_TIMEOUT_S = 30.0
_DAY_S = 86_400.0


def runs(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.action == "delete" and bool(arguments.runs) == bool(arguments.silent_for):
        raise RefusedError("plaudit runs delete needs the ids of runs (plaudit runs list), or --silent-for DAYS")
    return asyncio.run(_runs(arguments))


async def _runs(arguments: argparse.Namespace) -> int:
    address = redis_from(os.environ, arguments.redis)
    client = address.client(timeout_s=_TIMEOUT_S, retries=3)
    try:
        if arguments.action == "list":
            found = await _keys_of_runs(client)
            for run in sorted(found):
                _print({"run": run, "keys": found[run], "last_heartbeat_s": await _silent_s(client, run)})
            return EXIT_DONE
        chosen = arguments.runs or await _silent_runs(client, arguments.silent_for * _DAY_S)
        fine = [await _delete(client, run) for run in chosen]
        return EXIT_DONE if all(fine) else EXIT_REFUSED
    except (AuthenticationError, NoPermissionError) as error:
        raise RefusedError(
            f"Redis at {address.url} refuses: {error}. Give its password in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except ResponseError as error:
        raise RefusedError(f"Redis at {address.url} refuses: {error}") from error
    except OUTAGE as error:
        unreachable = f"Redis at {address.url} cannot be reached: {error}. Is it running?"
        raise RefusedError(await address.tls_problem(error) or unreachable) from error
    finally:
        await client.aclose(close_connection_pool=True)


async def _keys_of_runs(client: Redis) -> Counter[str]:
    found: Counter[str] = Counter()
    async for key in client.scan_iter("plaudit:{*}:*", count=_SCANNED_AT_ONCE):
        found[key.decode().partition("{")[2].partition("}")[0]] += 1
    return found


async def _silent_runs(client: Redis, silent_s: float) -> list[str]:
    """Return the runs of which no process reported for so long; what never reported may not be a run of Plaudit."""
    silences = {run: await _silent_s(client, run) for run in sorted(await _keys_of_runs(client))}
    return [run for run, silence in silences.items() if silence is not None and silence >= silent_s]


async def _silent_s(client: Redis, run: str) -> float | None:
    """Return the seconds since a process of the run last reported; None if none ever did."""
    workers = Names(run).workers
    if await client.type(workers) != b"zset":  # missing, or written by something else under a run's name
        return None
    newest: Any = await client.zrevrange(workers, 0, 0, withscores=True)
    seconds, microseconds = await client.time()
    return round(seconds + microseconds / 1e6 - newest[0][1], 1) if newest else None


async def _delete(client: Redis, run: str) -> bool:
    silent_s = await _silent_s(client, run)
    if silent_s is not None and silent_s < LIVE_WITHIN_S:
        problem = f"a process of it reported {silent_s:.0f} s ago. Stop the run first"
        return _print({"run": run, "deleted": 0, "problem": problem}, fine=False)
    deleted, some = 0, list[bytes]()
    async for key in client.scan_iter(f"{Names(run).prefix}*", count=_SCANNED_AT_ONCE):
        some.append(key)
        if len(some) >= _SCANNED_AT_ONCE:
            deleted += await client.unlink(*some)
            some.clear()
    if some:
        deleted += await client.unlink(*some)
    if not deleted:
        return _print({"run": run, "deleted": 0, "problem": "no such run; see plaudit runs list"}, fine=False)
    return _print({"run": run, "deleted": deleted})


def _print(content: dict[str, object], *, fine: bool = True) -> bool:
    print(msgspec.json.encode(content).decode())
    return fine
