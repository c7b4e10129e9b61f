"""How calls of transitions travel to Redis.

Calls that wait go together in one pipeline: a batch is what is there, never what one waits for. Every transition is
idempotent, so a call whose reply was lost is sent again until Redis has answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from plaudit_wire.logs import get_logger
from plaudit_workers.stream.transitions.scripts import OUTAGE, Argument, Call, Scripts

logger = get_logger(__name__)

_CALLS_A_PIPELINE = 256
_ANSWERED_WITHIN_S = 5.0
_LEAST_BYTES_PER_S = 1e6


class _Request:
    """Calls of one caller that wait for their answers."""

    def __init__(self, calls: Sequence[Call], deadline: float) -> None:
        self.calls = calls
        self.deadline = deadline
        self.answers: list[Any] = [None] * len(calls)
        self.left = list(range(len(calls)))
        self.pause_s = 0.02
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def resolve(self) -> None:
        """Gives the answers to the caller, or the first error among them."""
        if self.done.done():
            return
        failed = next((answer for answer in self.answers if isinstance(answer, Exception)), None)
        if failed is None:
            self.done.set_result(self.answers)
        else:
            self.done.set_exception(failed)


class ScriptRunner:
    """Sends calls to Redis, those that wait together in one pipeline.

    Args:
        client: without retries and timeouts: the runner sees to both.
        prefix: of the run's keys.
        scripts: the texts.
        patience_s: how long an outage or a full memory of Redis is waited out, seconds.
    """

    def __init__(self, client: Redis, prefix: str, scripts: Scripts, patience_s: float = 300.0) -> None:
        self._client = client
        self._scripts = scripts
        self._patience_s = patience_s
        self._waiting: deque[_Request] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._heads = {
            name: b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$%d\r\n%b\r\n"
            % (digest.encode(), len(prefix.encode()), prefix.encode())
            for name, digest in scripts.digests.items()
        }

    async def call(self, script: str, *arguments: Argument) -> Any:
        """One transition; returns its answer.

        Raises:
            redis.RedisError: the outage outlasted the patience, or Redis refused the call.
        """
        return (await self.call_many([Call(script, arguments)]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Several transitions; returns their answers.

        Raises:
            redis.RedisError: as ``call``.
        """
        request = _Request(calls, asyncio.get_running_loop().time() + self._patience_s)
        self._enqueue(request)
        return await request.done

    async def stop(self) -> None:
        """Gives up what is still waiting for Redis."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft().done.cancel()

    def _enqueue(self, request: _Request) -> None:
        self._waiting.append(request)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            batch, size = [], 0
            while self._waiting and size < _CALLS_A_PIPELINE:
                batch.append(self._waiting.popleft())
                size += len(batch[-1].left)
            try:
                await self._send(batch)
            except OUTAGE as error:
                await self._wait_out(batch, error)
            except Exception as error:
                for request in batch:
                    request.answers = [error]
                    request.resolve()

    async def _send(self, batch: Sequence[_Request]) -> None:
        """Sends what is left of the requests; those that Redis is not able to run now come again after a pause."""
        places = [(request, i) for request in batch for i in request.left]
        replies = await self._replies([request.calls[i] for request, i in places])
        for (request, i), reply in zip(places, replies, strict=True):
            request.answers[i] = reply
        for request in batch:
            request.left = [i for i in request.left if _unable(request.answers[i])]
            if not request.left or self._is_late(request):
                request.resolve()
                continue
            error = str(request.answers[request.left[0]])
            logger.warning("redis refuses writes", error=error, calls=len(request.left))
            asyncio.get_running_loop().call_later(request.pause_s, self._enqueue, request)
            request.pause_s = min(request.pause_s * 2, 1.0)

    async def _wait_out(self, batch: Sequence[_Request], error: Exception) -> None:
        """Redis is away: whoever has patience left waits, at the head of the queue."""
        logger.warning("redis is away", error=str(error), requests=len(batch))
        for request in reversed(batch):
            if self._is_late(request):
                request.answers = [error]
                request.resolve()
            else:
                self._waiting.appendleft(request)
        if self._waiting:
            await asyncio.sleep(self._waiting[0].pause_s)
            self._waiting[0].pause_s = min(self._waiting[0].pause_s * 2, 1.0)

    @staticmethod
    def _is_late(request: _Request) -> bool:
        return request.done.done() or asyncio.get_running_loop().time() >= request.deadline

    async def _replies(self, calls: Sequence[Call]) -> list[Any]:
        replies = await self._pipeline(calls)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            for name in {calls[i].script for i in unknown}:
                await self._client.script_load(self._scripts.texts[name])
            for i, reply in zip(unknown, await self._pipeline([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return replies

    async def _pipeline(self, calls: Sequence[Call]) -> list[Any]:
        pool: Any = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            packed = [self._packed(call) for call in calls]
            async with asyncio.timeout(_ANSWERED_WITHIN_S + sum(map(len, packed)) / _LEAST_BYTES_PER_S):
                await connection.send_packed_command(packed)
                return [await _reply(connection) for _ in calls]
        except BaseException:
            await connection.disconnect(nowait=True)  # answers may be on their way to whoever reads next
            raise
        finally:
            await pool.release(connection)

    def _packed(self, call: Call) -> bytes:
        """The call as Redis reads it; redis-py's own packing takes several times as long."""
        parts = [b"*%d\r\n" % (len(call.arguments) + 4), self._heads[call.script]]
        for argument in call.arguments:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            parts += (b"$%d\r\n" % len(data), data, b"\r\n")
        return b"".join(parts)


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _unable(answer: Any) -> bool:
    """Whether Redis could not run the call now: memory or disk full, loading its file, a replica."""
    return isinstance(answer, (OutOfMemoryError, ReadOnlyError, *OUTAGE)) or (
        isinstance(answer, ResponseError) and str(answer).startswith("MISCONF")
    )
