"""Send transitions to Redis.

Concurrent calls share a pipeline: a batch holds the calls that wait when it begins; no call waits for a batch to fill.
Every transition is idempotent, so a call whose reply was lost is sent again until Redis has answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ReadOnlyError, ResponseError

from plaudit_wire.function_library import is_missing, missing_error
from plaudit_wire.outage import OUTAGE, Outages, PassingRefusalError
from plaudit_workers.stream.transitions.call import Call
from plaudit_workers.stream.transitions.scripts import Scripts

Answer = TypeVar("Answer")

_CALLS_A_PIPELINE = 256
_ANSWERED_WITHIN_S = 5.0
_LEAST_BYTES_PER_S = 1e6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class _Request:
    """Hold the calls of one caller that wait for their answers."""

    def __init__(self, calls: Sequence[Call[Any]]) -> None:
        self.calls = calls
        self.answers: list[Any] = [None] * len(calls)
        self.left = list(range(len(calls)))
        self.pause_s = _FIRST_PAUSE_S
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def resolve(self) -> None:
        """Resolve the caller's future with the answers, or with the first error among them."""
        if self.done.done():
            return
        failed = next((answer for answer in self.answers if isinstance(answer, Exception)), None)
        if failed is None:
            self.done.set_result(self.answers)
        else:
            self.done.set_exception(failed)

    def fail(self, error: Exception) -> None:
        """Resolve the caller's future with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def next_pause_s(self) -> float:
        """Return the pause before the next attempt; it doubles up to a second."""
        pause_s = self.pause_s
        self.pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return pause_s


class ScriptRunner:
    """Send calls of transitions, concurrent ones in one pipeline.

    Args:
        client: without retries and timeouts; the runner applies its own.
        scripts: the code. Where this user may, the runner loads it into a Redis that lacks it; else it waits for it.
        waits: retries calls through an outage, however long it lasts; False: raises it to the caller.
    """

    def __init__(self, client: Redis, prefix: str, scripts: Scripts, outages: Outages, *, waits: bool = True) -> None:
        self._client = client
        self._library = scripts.library
        self._outages = outages
        self._waits = waits
        self._waiting: deque[_Request] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._stopped = False
        self._heads = {
            name: b"%b%b%b%b" % (_bulk("FCALL"), _bulk(function), _bulk("1"), _bulk(prefix))
            for name, function in self._library.functions.items()
        }

    async def run(self, call: Call[Answer]) -> Answer:
        """Run one transition and return its answer.

        Raises:
            redis.RedisError: Redis refused the call for good; with ``waits=False`` also one of ``OUTAGE``.
        """
        (answer,) = await self.answers((call,))
        return call.read(answer)

    async def run_many(self, calls: Sequence[Call[Answer]]) -> list[Answer]:
        """Run several transitions and return their answers, in the same order. Raises as ``run``."""
        answers = await self.answers(calls)
        return [call.read(answer) for call, answer in zip(calls, answers, strict=True)]

    async def answers(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return Redis's unconverted answers to several transitions. Raises as ``run``."""
        if not calls:
            return []
        request = _Request(calls)
        self._enqueue(request)
        return await request.done

    async def stop(self) -> None:
        """Cancel the calls that still wait for Redis."""
        self._stopped = True
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft().done.cancel()

    def _enqueue(self, request: _Request) -> None:
        if self._stopped:
            request.done.cancel()
            return
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
                self._outages.report(error)
                await self._after_outage(batch, error)
            except asyncio.CancelledError:
                self._waiting.extendleft(reversed(batch))
                raise
            except Exception as error:  # the boundary to the callers: each of them raises it
                for request in batch:
                    request.fail(error)

    async def _send(self, batch: Sequence[_Request]) -> None:
        """Send the calls that have no answer yet; those that Redis refuses for now are sent again after a pause."""
        places = [(request, i) for request in batch for i in request.left]
        replies = await self._replies([request.calls[i] for request, i in places])
        for (request, i), reply in zip(places, replies, strict=True):
            request.answers[i] = reply
        if not isinstance(replies[0], PassingRefusalError):
            self._outages.end()
        for request in batch:
            request.left = [i for i in request.left if isinstance(request.answers[i], PassingRefusalError)]
            if not request.left or not self._waits or request.done.done():
                request.resolve()
                continue
            self._outages.report(request.answers[request.left[0]])
            asyncio.get_running_loop().call_later(request.next_pause_s(), self._enqueue, request)

    async def _after_outage(self, batch: Sequence[_Request], error: Exception) -> None:
        """Return the batch to the head of the queue and pause; or raise the outage to the callers."""
        if not self._waits:
            for request in batch:
                request.fail(error)
            return
        self._waiting.extendleft(request for request in reversed(batch) if not request.done.done())
        if self._waiting:
            await asyncio.sleep(self._waiting[0].next_pause_s())

    async def _replies(self, calls: Sequence[Call[Any]]) -> list[Any]:
        replies = await self._pipeline([self._packed(call) for call in calls])
        unknown = [i for i, reply in enumerate(replies) if is_missing(reply)]
        if unknown:
            loaded, *again = await self._pipeline([self._packed_load(), *(self._packed(calls[i]) for i in unknown)])
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = missing_error(self._library, loaded) if is_missing(reply) else reply
        return replies

    async def _pipeline(self, packed: Sequence[bytes]) -> list[Any]:
        pool: Any = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            async with asyncio.timeout(_ANSWERED_WITHIN_S + sum(map(len, packed)) / _LEAST_BYTES_PER_S):
                await connection.send_packed_command(packed)
                return [await _reply(connection) for _ in packed]
        except BaseException:
            await connection.disconnect(nowait=True)  # replies may still arrive and would reach its next user
            raise
        finally:
            await pool.release(connection)

    def _packed_load(self) -> bytes:
        parts = ("FUNCTION", "LOAD", "REPLACE", self._library.text)
        return b"*%d\r\n%b" % (len(parts), b"".join(map(_bulk, parts)))

    def _packed(self, call: Call[Any]) -> bytes:
        """Return the call in Redis's protocol; redis-py's own packing takes several times as long."""
        parts = [b"*%d\r\n" % (len(call.arguments) + 5), self._heads[call.script], _bulk(call.group)]
        for argument in call.arguments:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            parts += (b"$%d\r\n" % len(data), data, b"\r\n")
        return b"".join(parts)


def _bulk(text: str) -> bytes:
    data = text.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except PassingRefusalError as error:
        if isinstance(error.__cause__, ReadOnlyError):
            raise  # the connection is closed: a new one may reach the new master
        return error
    except ResponseError as error:
        return error
