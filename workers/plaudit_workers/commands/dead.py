"""``plaudit dead list|show|retry|drop RUN``: list, show, retry or drop a live run's dead letters.

Prints JSON: one object a letter and line. Exit code 2 where a letter could not be dealt with as asked.

Read, retry and drop dead letters. ``bury.lua`` writes them, ``retry_dead.lua`` describes a retry.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, cast

import msgspec
from redis.exceptions import AuthenticationError, ResponseError

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Prompt, RecordError, decode
from plaudit_wire.names import Stream
from plaudit_wire.records import Sample
from plaudit_wire.redis import OUTAGE
from plaudit_workers.launch.transport import redis_address
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED
from plaudit_workers.stream.calls import retry_dead
from plaudit_workers.stream.scripts import Scripts
from plaudit_workers.stream.transport import Transport
from plaudit_workers.stream.volume import VolumeError

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
    """Number of deliveries."""
    age_s: float
    """Seconds since it was recorded, by Redis's clock."""
    consumer: str
    """Worker that recorded it."""
    history: list[str]
    """Workers that died with it, and the time of their last heartbeat: ``worker@seconds since the epoch``."""
    fields: dict[str, bytes] = {}
    """The fields of the entry."""


class DeadLetters:
    """List, retry and delete the dead letters of a run."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[Letter]:
        """Return all, oldest first."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead)
        now_s = await self._transport.now()
        return [_letter(entry.decode(), fields, now_s) for entry, fields in entries]

    async def find(self, letter: str) -> Letter | None:
        """Return one by its id, or None."""
        entries: Any = await self._transport.commands.xrange(self._transport.names.dead, letter, letter)
        now_s = await self._transport.now()
        return next((_letter(entry.decode(), fields, now_s) for entry, fields in entries), None)

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
    return Letter(
        id=letter,
        stream=stream,
        role=_ROLES[stream],
        group=group,
        index=int(rest.split()[0]) if rest.split()[:1] and rest.split()[0].isdigit() else None,
        reason=about["reason"].decode(),
        deliveries=int(about["deliveries"]),
        age_s=max(0.0, now_s - float(about["buried"])),
        consumer=about["consumer"].decode(),
        history=about["history"].decode().split(),
        fields={name: value for name, value in about.items() if name not in _OF_LETTER},
    )


_ALL = "all"

_REMEDIES = {
    "unknown": "no such letter; see plaudit dead list",
    "ended": "its group has ended or is on its way to the trainer, so it cannot be retried; drop the letter",
}


def dead(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.action != "list" and not arguments.letters:
        raise RefusedError(f"plaudit dead {arguments.action} needs ids of letters (plaudit dead list), or all")
    return asyncio.run(_dead(arguments))


async def _dead(arguments: argparse.Namespace) -> int:
    folder = arguments.runs_folder / arguments.run
    address = redis_address(folder, arguments.redis)
    transport = Transport(address, arguments.run, folder / "spill", Scripts())
    try:
        await _check_run(transport, arguments.run)
        letters = DeadLetters(transport)
        action = _ACTIONS[arguments.action]
        found = {letter.id: letter for letter in await letters.list()}
        names = found if not arguments.letters or arguments.letters == [_ALL] else arguments.letters
        fine = [await action(letters, name, found.get(name)) for name in names]
    finally:
        await transport.close()
    return EXIT_DONE if all(fine) else EXIT_REFUSED


async def _check_run(transport: Transport, run: str) -> None:
    """Connect without creating anything.

    Raises:
        RefusedError: Redis is away or refuses the password, or holds no such run.
    """
    url = transport.address.url
    try:
        there = await transport.commands.exists(transport.names.samples)
    except (AuthenticationError, ResponseError) as error:
        raise RefusedError(
            f"Redis at {url} refuses the password: {error}. Give it in PLAUDIT_REDIS_PASSWORD"
        ) from error
    except OUTAGE as error:
        raise RefusedError(
            await transport.address.tls_problem(error)
            or f"Redis at {url} cannot be reached: {error}. Dead letters are those of a live run: is run {run} running?"
        ) from error
    if not there:
        raise RefusedError(f"there is no run {run} at {url}: 'plaudit run' prints the run's name")


async def _list(_: DeadLetters, name: str, letter: Letter | None) -> bool:
    return _print({"id": name, **(_about(letter) if letter else {"problem": _REMEDIES["unknown"]})}, fine=bool(letter))


async def _show(letters: DeadLetters, name: str, letter: Letter | None) -> bool:
    if letter is None:
        return _print({"id": name, "problem": _REMEDIES["unknown"]}, fine=False)
    payload = await letters.payload(letter)
    whole = {"unreadable": payload} if isinstance(payload, str) else {"payload": payload}
    return _print({**_about(letter), **whole})


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


def _about(letter: Letter) -> dict[str, Any]:
    about: dict[str, Any] = msgspec.to_builtins(letter)
    del about["fields"]
    return about | {"age_s": round(letter.age_s, 1)}


def _print(line: dict[str, Any], *, fine: bool = True) -> bool:
    print(msgspec.json.encode(line).decode())
    return fine
