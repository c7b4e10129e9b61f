"""Send the samples that wait at the same time in one request, and pass each result to its caller.

One ``Batches`` serves one event loop. A request is answered as a stream: its headers arrive when the service has
accepted the samples, its lines as the samples are scored. The next request is sent when the headers of the previous
one have arrived, so that few callers wait for nobody and many callers share requests. A slow sample delays no other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx

from plaudit_client.encoding import batch
from plaudit_client.errors import InvalidSampleError, ProtocolError, RewardError, UnavailableError
from plaudit_client.retries import pause_after, refusal

SCORE, GROUPS = "/v1/score", "/v1/groups"
_FIELDS = {SCORE: "samples", GROUPS: "groups"}
_STREAM = {"content-type": "application/json", "accept": "application/x-ndjson"}

_MOST_ITEMS, _MOST_BYTES = 256, 4 << 20
_MOST_REQUESTS = 256
"""Open requests of one event loop; further samples wait and share the next ones."""


class Item:
    """Hold one sample or group, as JSON, that waits for its answer.

    Args:
        timeout_s: seconds until ``answer`` fails with ``UnavailableError``.
    """

    __slots__ = ("_expiry", "alone", "answer", "body", "id", "path", "problem")

    def __init__(self, path: str, id: str, body: bytes, timeout_s: float) -> None:  # noqa: A002 (the field's name)
        loop = asyncio.get_running_loop()
        self.path, self.id, self.body = path, id, body
        self.answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.alone = False
        self.problem = "the service has not scored it yet"
        self._expiry = loop.call_later(timeout_s, self._expire, timeout_s)
        self.answer.add_done_callback(lambda _: self._expiry.cancel())

    def _expire(self, timeout_s: float) -> None:
        self.fail(UnavailableError(f"no result of sample {self.id} within {timeout_s:g} s: {self.problem}"))

    def fail(self, error: RewardError) -> None:
        """End the wait with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Batches:
    """Send the requests of one event loop over ``http``, which ``close`` closes."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._waiting: deque[Item] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._num_failures = 0
        self._not_before = 0.0

    def add(self, items: Iterable[Item]) -> None:
        """Send these items soon, with all others that wait then."""
        self._waiting.extend(items)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    async def close(self) -> None:
        """Close the connections. Callers that still wait get ``UnavailableError``."""
        tasks = [*self._requests, *([self._sender] if self._sender else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for item in self._waiting:
            item.fail(UnavailableError("the client was closed"))
        await self._http.aclose()

    async def _send_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(max(self._not_before - time.monotonic(), 0.0))  # at 0: let further callers join
            while len(self._requests) >= _MOST_REQUESTS:
                self._ended.clear()
                await self._ended.wait()
            items = self._next()
            if items:
                accepted = asyncio.Event()
                request = asyncio.create_task(self._request(items, accepted))
                self._requests.add(request)
                request.add_done_callback(self._end)
                await accepted.wait()

    def _end(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._ended.set()

    def _next(self) -> list[Item]:
        """Take the items of the next request: of one path, each id once, within the bounds of a request."""
        taken: dict[str, Item] = {}
        size = 0
        while self._waiting and len(taken) < _MOST_ITEMS:
            item = self._waiting[0]
            first = next(iter(taken.values()), None)
            if item.answer.done():  # its caller has left
                self._waiting.popleft()
                continue
            if first is not None and (
                item.path != first.path
                or item.alone
                or first.alone
                or item.id in taken
                or size + len(item.body) > _MOST_BYTES
            ):
                break
            taken[item.id] = self._waiting.popleft()
            size += len(item.body)
        return list(taken.values())

    async def _request(self, items: list[Item], accepted: asyncio.Event) -> None:
        """Send items and pass on their answers; those without one are sent again."""
        left = {item.id: item for item in items}
        try:
            content = batch((item.body for item in items), _FIELDS[items[0].path])
            async with self._http.stream("POST", items[0].path, content=content, headers=_STREAM) as response:
                if response.status_code == httpx.codes.OK:
                    accepted.set()
                    await self._read(response, left)
                else:
                    await response.aread()
                    self._refused(response, items, left)
        except (httpx.TransportError, httpx.StreamError) as error:
            self._failed(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, left.values())
        except RewardError as error:
            for item in left.values():
                item.fail(error)
        finally:
            self._again(left.values())
            accepted.set()

    async def _read(self, response: httpx.Response, left: dict[str, Item]) -> None:
        num_sent = len(left)
        async for line in _lines(response):
            try:
                answer = json.loads(line)
                item = left.pop(answer["id"], None)
            except (ValueError, KeyError, TypeError) as error:
                raise ProtocolError(f"the service sent {line[:200]!r}, which is no result") from error
            if item is None or item.answer.done():
                continue
            if "error" in answer:
                item.fail(InvalidSampleError(str(answer["error"]["message"])))
            else:
                item.answer.set_result(answer)
        if len(left) < num_sent:
            self._num_failures = 0
        if left:
            self._failed("the service ended the answer early", left.values())

    def _refused(self, response: httpx.Response, items: list[Item], left: dict[str, Item]) -> None:
        answer = refusal(response.status_code, response.headers, response.content, len(items), self._num_failures)
        for position, error in answer.errors.items():
            if 0 <= position < len(items):
                left.pop(items[position].id).fail(error)
        for item in left.values():
            item.alone = item.alone or answer.alone
            item.problem = answer.message
        if answer.pause_s is not None:
            self._num_failures += 1
            self._not_before = max(self._not_before, time.monotonic() + answer.pause_s)

    def _failed(self, problem: str, items: Iterable[Item]) -> None:
        """Wait before the next request; record the problem for the error of those whose time ends."""
        self._not_before = time.monotonic() + pause_after(self._num_failures)
        self._num_failures += 1
        for item in items:
            item.problem = problem

    def _again(self, items: Iterable[Item]) -> None:
        waiting = [item for item in items if not item.answer.done()]
        if waiting:
            self._waiting.extendleft(reversed(waiting))
            self.add(())


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the complete lines of an answer; empty ones, which keep a quiet connection open, are left out."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
