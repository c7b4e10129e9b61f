"""``plaudit dead list|show|retry|drop RUN``: list, show, retry or drop a live run's dead letters.

Prints JSON: one object a letter and line. Exit code 2 where a letter could not be dealt with as asked.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from redis.exceptions import AuthenticationError, ResponseError

from plaudit_wire.errors import RefusedError
from plaudit_wire.outage import OUTAGE
from plaudit_workers.deadletters.address import redis_address
from plaudit_workers.deadletters.letters import DeadLetters, Letter
from plaudit_workers.process import EXIT_DONE, EXIT_REFUSED
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.transitions.scripts import Scripts

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
