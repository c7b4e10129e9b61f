"""``plaudit runs`` and ``plaudit dead``: inspect and delete what a Redis holds of runs.

- ``plaudit runs list|delete``: the runs whose keys an external Redis holds. A job's own Redis ends with its run; an
  external one keeps the counters and streams of every run until they are deleted here, each by its id or all that have
  been silent for some days (from a CronJob, say).
- ``plaudit dead list|show|retry|drop RUN``: a live run's dead letters. ``bury.lua`` writes them, ``retry_dead.lua``
  describes a retry.

Both print JSON, one object a line, and exit with 2 where something could not be done as asked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Prompt, RecordError, decode
from plaudit_wire.names import Names, Stream
from plaudit_wire.records import LIVE_WITHIN_S, Sample
from plaudit_wire.redis import OUTAGE, RedisAddress
from plaudit_workers.launch.transport import redis_address
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED, redis_from
from plaudit_workers.stream.calls import retry_dead
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import VolumeError


def _print(line: dict[str, Any], *, fine: bool = True) -> bool:
    print(msgspec.json.encode(line).decode())
    return fine


async def _unreachable(address: RedisAddress, error: Exception, question: str) -> RefusedError:
    text = f"Redis at {address.url} cannot be reached: {error}. {question}"
    return RefusedError(await address.tls_problem(error) or text)


_SCANNED_AT_ONCE = 1000
_TIMEOUT_S = 30.0
_DAY_S = 86_400.0


def runs(arguments: argparse.Namespace) -> int:
    """Run ``plaudit runs``."""
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
        raise await _unreachable(address, error, "Is it running?") from error
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


Retried = Literal["retried", "unknown", "ended"]
"""``unknown``: there is no such letter (any more); ``ended``: its group has no use for the entry any more."""


class Letter(msgspec.Struct, frozen=True):
    """Hold one dead letter."""

    id: str
    stream: Stream
    """The stream of the entry: ``samples`` (scoring), ``prompts`` (generation) or ``groups`` (group-scope scoring)."""
    role: str
    """Role of the worker that recorded it."""
    group: str
    index: int | None
    """Index of the sample; None for prompts and groups."""
    reason: str
    deliveries: int
    age_s: float
    """Seconds since it was recorded, by Redis's clock."""
    consumer: str
    """Worker that recorded it."""
    history: list[str]
    """Workers that died with it, and the time of their last heartbeat: ``worker@seconds since the epoch``."""
    fields: dict[str, bytes] = {}
    """The fields of the entry."""

    def description(self) -> dict[str, Any]:
        """Return the letter as printed, without the fields of its entry."""
        about: dict[str, Any] = msgspec.to_builtins(self)
        del about["fields"]
        return about | {"age_s": round(self.age_s, 1)}


class DeadLetters:
    """List, retry and delete the dead letters of a run."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Letter]:
        """Return all, oldest first."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead)
        now_s = await self._transport.now()
        return [_letter(entry.decode(), fields, now_s) for entry, fields in entries]

    async def payload(self, letter: Letter) -> Prompt | Sample | str | None:
        """Return the entry's payload; the reason as text if it cannot be read; None for groups, which have none."""
        record = letter.fields.get("record")
        if record is None:
            return None
        kind: type[Prompt] | type[Sample] = Prompt if letter.stream == "prompts" else Sample
        try:
            return decode(await self._transport.volume.load(record), kind)
        except (RecordError, VolumeError) as error:
            return str(error)

    async def retry(self, letter: Letter) -> Retried:
        """Put an entry back into its stream once, with all its deliveries, and open its sample again.

        Only while its group is open: a group whose last sample has ended is on its way to the trainer.
        """
        return cast(Retried, await self._transport.scripts.run(retry_dead(letter.group, letter.id)))

    async def drop(self, letter: Letter) -> bool:
        """Delete a letter; its sample stays ``poison``. Return False if there is no such letter."""
        return bool(await self._transport.commands.xdel(self._transport.names.dead, letter.id))


_ROLES: dict[str, str] = {"prompts": "rollout", "samples": "reward", "groups": "reward"}
_OF_LETTER = ("stream", "entry", "reason", "consumer", "deliveries", "history", "buried")


def _letter(letter: str, fields: Mapping[bytes, bytes], now_s: float) -> Letter:
    about = {name.decode(): value for name, value in fields.items()}
    stream = cast(Stream, about["stream"].decode())
    group, _, rest = (about.get("sample") or about.get("group") or b"").decode(errors="replace").partition(" ")
    index = next(iter(rest.split()), "")
    return Letter(
        id=letter,
        stream=stream,
        role=_ROLES[stream],
        group=group,
        index=int(index) if index.isdigit() else None,
        reason=about["reason"].decode(),
        deliveries=int(about["deliveries"]),
        age_s=max(0.0, now_s - float(about["buried"])),
        consumer=about["consumer"].decode(),
        history=about["history"].decode().split(),
        fields={name: value for name, value in about.items() if name not in _OF_LETTER},
    )


def dead(arguments: argparse.Namespace) -> int:
    """Run ``plaudit dead``."""
    if arguments.action != "list" and not arguments.letters:
        raise RefusedError(f"plaudit dead {arguments.action} needs ids of letters (plaudit dead list), or all")
    return asyncio.run(_dead(arguments))


async def _dead(arguments: argparse.Namespace) -> int:
    folder = arguments.runs_folder / arguments.run
    address = redis_address(folder, arguments.redis)
    transport = Transport(address, arguments.run, folder / "spill")
    try:
        await _check_run(transport, arguments.run)
        letters = DeadLetters(transport)
        action = _ACTIONS[arguments.action]
        found = {letter.id: letter for letter in await letters.list()}
        names = found if not arguments.letters or arguments.letters == ["all"] else arguments.letters
        fine = [await action(letters, name, found.get(name)) for name in names]
    finally:
        await transport.close()
    return EXIT_DONE if all(fine) else EXIT_REFUSED


async def _check_run(transport: Transport, run: str) -> None:
    """Connect without creating anything; refuse a Redis that holds no such run."""
    url = transport.address.url
    try:
        there = await transport.commands.exists(transport.names.samples)
    except (AuthenticationError, ResponseError) as error:
        raise RefusedError(
            f"Redis at {url} refuses the password: {error}. Give it in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except OUTAGE as error:
        question = f"Dead letters are those of a live run: is run {run} running?"
        raise await _unreachable(transport.address, error, question) from error
    if not there:
        raise RefusedError(f"there is no run {run} at {url}: 'plaudit run' prints the run's name")


_REMEDIES = {
    "unknown": "no such letter; see plaudit dead list",
    "ended": "its group has ended or is on its way to the trainer, so it cannot be retried; drop the letter",
}


async def _list(_: DeadLetters, name: str, letter: Letter | None) -> bool:
    if letter is None:
        return _print({"id": name, "problem": _REMEDIES["unknown"]}, fine=False)
    return _print(letter.description())


async def _show(letters: DeadLetters, name: str, letter: Letter | None) -> bool:
    if letter is None:
        return await _list(letters, name, letter)
    payload = await letters.payload(letter)
    return _print(letter.description() | {"unreadable" if isinstance(payload, str) else "payload": payload})


async def _retry(letters: DeadLetters, name: str, letter: Letter | None) -> bool:
    answer = await letters.retry(letter) if letter else "unknown"
    if answer == "retried":
        return _print({"id": name, "retried": True})
    return _print({"id": name, "retried": False, "problem": _REMEDIES[answer]}, fine=False)


async def _drop(letters: DeadLetters, name: str, letter: Letter | None) -> bool:
    if letter is not None and await letters.drop(letter):
        return _print({"id": name, "dropped": True})
    return _print({"id": name, "dropped": False, "problem": _REMEDIES["unknown"]}, fine=False)


_ACTIONS: dict[str, Callable[[DeadLetters, str, Letter | None], Awaitable[bool]]] = {
    "list": _list,
    "show": _show,
    "retry": _retry,
    "drop": _drop,
}
