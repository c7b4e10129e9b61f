"""The transitions: their texts, and how calls of them travel to Redis.

Each ``lua/<name>.lua`` is one transition; what they share (``lua/shared``) is put before each. Calls that wait go
together in one pipeline, so that a batch is what is there, never what one waits for. Every transition is idempotent, so
a call whose reply was lost is sent again until Redis has answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

logger = logging.getLogger(__name__)

OUTAGE = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a Redis that is away raises."""

_BATCH = 256
_SHARED = ("run", "group")
_names = itertools.count()
_boot = os.urandom(6).hex()

Argument = str | bytes | int | float


def new_call() -> str:
    """A token that no other call has: Redis tells a repeated call from a second one by it."""
    return f"{_boot}{os.getpid():x}.{next(_names):x}"


class Call(NamedTuple):
    """One transition and its ARGV."""

    script: str
    arguments: Sequence[Argument]


class Scripts:
    """The texts of the transitions.

    Args:
        overrides: other texts for some of them, by file name without ending (``shared/group`` included); the tests of
            the tests seed bugs with it.
    """

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        folder = files("plaudit_workers.stream") / "lua"
        read = {entry.name[:-4]: entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".lua")}
        read |= {f"shared/{name}": (folder / "shared" / f"{name}.lua").read_text() for name in _SHARED}
        self.files: dict[str, str] = read | dict(overrides or {})
        shared = "".join(self.files[f"shared/{name}"] for name in _SHARED)
        self.texts: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        for name in read:
            if not name.startswith("shared/"):
                flags, _, body = self.files[name].partition("\n")
                self.texts[name] = f"{flags}\n{shared}{body}"
                self.digests[name] = hashlib.sha1(self.texts[name].encode()).hexdigest()  # noqa: S324 - Redis's own name


class ScriptRunner:
    """Sends calls to Redis, those that wait together in one pipeline.

    Args:
        client: for commands; the runner itself tries again, so the client need not.
        prefix: of the run's keys.
        scripts: the texts.
        patience_s: how long an outage of Redis is waited out, seconds.
    """

    def __init__(self, client: Redis, prefix: str, scripts: Scripts, patience_s: float = 300.0) -> None:
        self._client = client
        self._prefix = prefix
        self._scripts = scripts
        self._patience_s = patience_s
        self._waiting: list[tuple[Sequence[Call], asyncio.Future[list[Any]]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def call(self, script: str, *arguments: Argument) -> Any:
        """One transition; returns its answer.

        Raises:
            redis.RedisError: the outage outlasted the patience, or Redis refused the call.
        """
        return (await self.call_many([Call(script, arguments)]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Several transitions, in this order; returns their answers.

        Raises:
            redis.RedisError: as ``call``.
        """
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((calls, future))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return await future

    async def _send_all(self) -> None:
        while self._waiting:
            batch: list[tuple[Sequence[Call], asyncio.Future[list[Any]]]] = []
            size = 0
            while self._waiting and size < _BATCH:
                batch.append(self._waiting.pop(0))
                size += len(batch[-1][0])
            try:
                answers = await self._outlast([call for calls, _ in batch for call in calls])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            _distribute(batch, answers)

    async def _outlast(self, calls: Sequence[Call]) -> list[Any]:
        """Sends until Redis has answered every call: through lost connections, restarts and a full memory."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        answers: list[Any] = [None] * len(calls)
        left = list(range(len(calls)))
        pause_s = 0.02
        while True:
            try:
                replies = await self._send([calls[i] for i in left])
            except OUTAGE as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                logger.warning("redis is away", extra={"fields": {"error": str(error), "calls": len(left)}})
            else:
                for i, reply in zip(left, replies, strict=True):
                    answers[i] = reply
                left = [i for i in left if _unable(answers[i])]
                if not left or asyncio.get_running_loop().time() > deadline:
                    return answers
                logger.warning("redis refuses writes", extra={"fields": {"error": str(answers[left[0]])}})
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)

    async def _send(self, calls: Sequence[Call]) -> list[Any]:
        replies = await self._pipeline(calls)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            for name in {calls[i].script for i in unknown}:
                await self._client.script_load(self._scripts.texts[name])
            for i, reply in zip(unknown, await self._pipeline([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return replies

    async def _pipeline(self, calls: Sequence[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        digests = self._scripts.digests
        for script, arguments in calls:
            pipeline.execute_command("EVALSHA", digests[script], 1, self._prefix, *arguments)
        return await pipeline.execute(raise_on_error=False)


def _unable(answer: Any) -> bool:
    """Whether Redis could not run the call now: memory or disk full, loading its file, a replica."""
    return isinstance(answer, (OutOfMemoryError, ReadOnlyError, *OUTAGE)) or (
        isinstance(answer, ResponseError) and str(answer).startswith("MISCONF")
    )


def _distribute(batch: list[tuple[Sequence[Call], asyncio.Future[list[Any]]]], answers: list[Any]) -> None:
    start = 0
    for calls, future in batch:
        part = answers[start : start + len(calls)]
        start += len(calls)
        if future.done():
            continue
        failed = next((answer for answer in part if isinstance(answer, Exception)), None)
        if failed is None:
            future.set_result(part)
        else:
            future.set_exception(failed)
