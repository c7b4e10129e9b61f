"""Score samples over HTTP: ``RewardClient`` holds a service's URL and token, and makes a trainer's calls.

``Batches`` sends the samples of one event loop that wait at the same time in one request. A request is answered as a
stream: its headers arrive when the service has accepted the samples, its lines as the samples are scored. The next
request is sent when the headers of the previous one have arrived, so that few callers wait for nobody and many callers
share requests. A slow sample delays no other. Each sample is written as JSON by its caller, so that only its caller
gets the error. ``refusal`` decides what a status other than 200 means for the samples of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import decimal
import functools
import json
import logging
import math
import os
import random
import socket
import ssl
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from plaudit_client.result import (
    AuthenticationError,
    InvalidSampleError,
    ProtocolError,
    Result,
    RewardError,
    UnavailableError,
    result_of,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_RETRY_AFTER_S = 0.1, 5.0, 60.0
SCORE, GROUPS = "/v1/score", "/v1/groups"
_FIELDS = {SCORE: b"samples", GROUPS: b"groups"}
_STREAM = {"content-type": "application/json", "accept": "application/x-ndjson"}
_MOST_ITEMS, _MOST_BYTES = 256, 4 << 20
_MOST_REQUESTS = 256
"""Open requests of one event loop; further samples wait and share the next ones."""
MOST_UNDER_WAY = 2048
_MOST_LINE_BYTES = 64 << 20
_CONNECT_S, _WARN_AFTER_S, _WARN_EVERY_S = 5.0, 5.0, 60.0
_LOG = logging.getLogger("plaudit_client")
_QUIET_S = 60.0
"""The service sends an empty line at least every 15 s: a connection that is quiet for longer is dead."""
SERVICE_FILE = "runs/<run>/service.json"
_WHERE = f"The address of a local service is in {SERVICE_FILE}"
SampleMapping = Mapping[str, Any]
"""``response``, and optionally ``prompt`` (text or chat messages), ``data_source``, ``ground_truth``, ``extra_info``,
``response_tokens``, ``max_tokens``, ``finish_reason``, ``id``."""


class RewardClient:
    """Score samples with a reward service.

    Every method may be called by any number of tasks at once, from any event loop; each loop has connections of its
    own. A client can be pickled: the copy opens its own connections. ``aclose`` (or leaving the context) closes those
    of the running loop; the client can be used again afterwards.

    An id stands for one sample: a repeat of the call under the same id gets the first call's result, also from another
    process. Samples without one get a random id.

    Args:
        url: as in ``runs/<run>/service.json``; ``ValueError`` if it is none. A service that cannot be reached is
            logged as a warning after 5 s, and once a minute.
        token: empty: none is sent; ``ValueError`` if no HTTP header can carry it.
        timeout_s: seconds that a call waits for a result, through restarts of the service.
        ca_file: certificates of the authority that signed the service's, for ``https://``; empty: the system's.
    """

    def __init__(self, url: str, token: str = "", *, timeout_s: float = 1800.0, ca_file: str = "") -> None:
        _check_url(url)
        _check_token(token)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s {timeout_s!r}: give the seconds that a call waits for a result, above 0")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._token = token
        self._ca_file = ca_file
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batches] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(type(self), self.url, self._token, timeout_s=self.timeout_s, ca_file=self._ca_file)
        return make, ()

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running event loop; calls that still wait there end with an error."""
        batches = self._by_loop.pop(asyncio.get_running_loop(), None)
        if batches is not None:
            await batches.close()

    async def score(self, sample: SampleMapping) -> Result:
        """Score one sample.

        Raises ``InvalidSampleError``, ``AuthenticationError``, ``UnavailableError`` or ``ProtocolError``; see
        ``plaudit_client.result``.
        """
        item = self._sample_item(sample)
        self._batches().add((item,))
        return _result(await item.answer)

    async def score_many(self, samples: Iterable[SampleMapping]) -> AsyncGenerator[Result, None]:
        """Score samples; yield their results in order of completion, ``index`` being the position in ``samples``.

        ``samples`` is read as results arrive, at most 2,048 ahead of them.

        Raises as ``score``; the message of an ``InvalidSampleError`` begins with the sample's position.
        """
        done: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        open_items: dict[int, Item] = {}
        numbered = enumerate(samples)
        try:
            while True:
                self._start_next(numbered, open_items, done)
                if not open_items:
                    return
                index, item = await done.get()
                del open_items[index]
                try:
                    result = _result(item.answer.result(), index)
                except InvalidSampleError as error:
                    raise InvalidSampleError(f"sample {index}: {error}") from error
                yield result
        finally:
            for item in open_items.values():
                item.answer.cancel()

    async def score_group(self, samples: Sequence[SampleMapping], id: str = "") -> list[Result]:  # noqa: A002 (what it is)
        """Score the samples of one prompt together, for scorers with ``scope: group``; return them in their order.

        A group has 1 to 1,024 samples, whose own ids are ignored, and the given ``id``, or a random one. Raises as
        ``score``.
        """
        own = _whole(id) or uuid.uuid4().hex
        bodies = []
        for index, sample in enumerate(samples):
            try:
                bodies.append(encode_sample(sample))
            except InvalidSampleError as error:
                raise InvalidSampleError(f"sample {index} of the group: {error}") from error
        body = b'{"id":' + json.dumps(own).encode() + b',"samples":[' + b",".join(bodies) + b"]}"
        item = Item(GROUPS, own, body, self.timeout_s)
        self._batches().add((item,))
        answer = await item.answer
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(samples):
            raise ProtocolError(f"the service sent {answer!r:.200}, which is no result of a group of {len(samples)}")
        return [_result(each, index) for index, each in enumerate(results)]

    async def service(self) -> dict[str, Any]:
        """Return the service's description: job, scorers, versions, limits, health (``GET /v1/service``).

        Raises ``AuthenticationError`` for a refused token, ``UnavailableError`` if it cannot be reached now.
        """
        try:
            async with self._http() as http:
                response = await http.get("/v1/service")
        except httpx.TransportError as error:
            raise UnavailableError(f"{Outage(self.url, self.timeout_s).problem_of(error)}. {_WHERE}") from error
        if response.status_code != httpx.codes.OK:
            answer = refusal(response.status_code, response.headers, response.content, 1, 0)
            raise answer.errors.get(0, UnavailableError(f"{self.url} answers with {answer.message}"))
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(description := response.json(), dict):
                return description
        raise ProtocolError(f"{self.url} is no reward service: it sent {response.content[:200]!r}")

    def _start_next(
        self,
        numbered: Iterator[tuple[int, SampleMapping]],
        open_items: dict[int, Item],
        done: asyncio.Queue[tuple[int, Item]],
    ) -> None:
        started = []
        while len(open_items) < MOST_UNDER_WAY and (following := next(numbered, None)) is not None:
            index, sample = following
            try:
                item = self._sample_item(sample)
            except InvalidSampleError as error:
                raise InvalidSampleError(f"sample {index}: {error}") from error
            item.answer.add_done_callback(functools.partial(_put_ended, done, index, item))
            open_items[index] = item
            started.append(item)
        if started:
            self._batches().add(started)

    def _sample_item(self, sample: SampleMapping) -> Item:
        own = _whole(str((sample.get("id") if isinstance(sample, Mapping) else "") or uuid.uuid4().hex))
        return Item(SCORE, own, encode_sample(sample, own), self.timeout_s)

    def _batches(self) -> Batches:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for ended in [each for each in self._by_loop if each.is_closed()]:
                del self._by_loop[ended]  # a program that calls asyncio.run for each step
            self._by_loop[loop] = Batches(self._http(), self.timeout_s)
        return self._by_loop[loop]

    def _http(self) -> httpx.AsyncClient:
        secure = self.url.startswith("https://")  # without TLS, reading certificates would only cost time
        context = ssl.create_default_context(cafile=self._ca_file or None) if secure else False
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=httpx.Timeout(_CONNECT_S, read=_QUIET_S, write=_QUIET_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
            verify=context,
        )


def _check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"url {url!r}: {error}; the url of a local service is in {SERVICE_FILE}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or not 0 < (parsed.port or 80) < 1 << 16:
        raise ValueError(f"url {url!r}: give http://HOST:PORT; that of a local service is in {SERVICE_FILE}")


def _check_token(token: str) -> None:
    """Refuse a token that no HTTP header can carry, such as one read from a file with its line end."""
    remedy = "give it as service.json has it, without spaces around it and line ends"
    if token != token.strip(" "):
        raise ValueError(f"token: there is a space before or behind it, which an HTTP header loses; {remedy}")
    for position, character in enumerate(token, 1):
        if not " " <= character <= "~":
            raise ValueError(f"token: no HTTP header can carry its character {position}, {character!r}; {remedy}")


def _put_ended(done: asyncio.Queue[tuple[int, Item]], index: int, item: Item, _: object) -> None:
    done.put_nowait((index, item))


def _result(answer: Mapping[str, Any], index: int = 0) -> Result:
    try:
        return result_of(answer, index)
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the service sent {answer!r:.200}, which is no result: {error!r:.200}") from error


class Batches:
    """Send the requests of one event loop over ``http``, which ``close`` closes."""

    def __init__(self, http: httpx.AsyncClient, timeout_s: float) -> None:
        self._http = http
        self._open: set[Item] = set()
        self._waiting: deque[Item] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._num_failures = 0
        self._not_before = 0.0
        self._outage = Outage(str(http.base_url).rstrip("/"), timeout_s)

    def add(self, items: Iterable[Item]) -> None:
        """Send these items soon, with all others that wait then."""
        for item in items:
            self._open.add(item)
            item.answer.add_done_callback(functools.partial(self._leave, item))
            self._waiting.append(item)
        self._wake()

    async def close(self) -> None:
        """Close the connections. Callers that still wait get ``UnavailableError``."""
        for item in list(self._open):  # a request that is cancelled before it began passes nothing on
            item.fail(UnavailableError("the client was closed"))
        tasks = [*self._requests, *([self._sender] if self._sender else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    def _leave(self, item: Item, _: object) -> None:
        item.expiry.cancel()
        self._open.discard(item)

    def _wake(self) -> None:
        if self._waiting and (self._sender is None or self._sender.done()):
            self._sender = asyncio.create_task(self._send_all())

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
                last = max(item.expiry.when() for item in items)  # then nobody waits any longer
                expiry = asyncio.get_running_loop().call_at(last, request.cancel)
                self._requests.add(request)
                request.add_done_callback(functools.partial(self._end, expiry, accepted))
                await accepted.wait()

    def _end(self, expiry: asyncio.TimerHandle, accepted: asyncio.Event, request: asyncio.Task[None]) -> None:
        expiry.cancel()
        accepted.set()
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
        began = time.monotonic()
        try:
            bodies = b",".join(item.body for item in items)
            content = b'{"' + _FIELDS[items[0].path] + b'":[' + bodies + b"]}"
            async with self._http.stream("POST", items[0].path, content=content, headers=_STREAM) as response:
                if response.status_code == httpx.codes.OK:
                    accepted.set()
                    await self._read(response, left)
                else:
                    await response.aread()
                    self._refused(response, items, left, began)
        except (httpx.TransportError, httpx.StreamError) as error:
            self._failed(self._outage.problem_of(error), left.values(), began)
        except RewardError as error:
            _fail_all(items, error)
        except Exception as error:  # an answer that cannot be read is no reason to ask for it again
            _fail_all(items, ProtocolError(f"the answer cannot be read: {type(error).__name__}: {error}"))
        finally:
            self._again(left.values())

    async def _read(self, response: httpx.Response, left: dict[str, Item]) -> None:
        num_sent, began = len(left), time.monotonic()
        async for line in _lines(response):
            try:
                answer = json.loads(line)
                message = answer["error"]["message"] if "error" in answer else None
                item = left.pop(answer["id"], None)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ProtocolError(f"the service sent {line[:200]!r}, which is no result") from error
            if item is None:
                raise ProtocolError(f"the service sent {line[:200]!r}, which nobody asked for, or twice")
            if item.answer.done():
                continue
            if message is not None:
                item.fail(InvalidSampleError(str(message)))
            else:
                item.answer.set_result(answer)
        if len(left) < num_sent:
            self._num_failures = 0
            self._outage.end()
        kind = response.headers.get("content-type", "")
        if len(left) == num_sent and not kind.startswith(_STREAM["accept"]):
            raise ProtocolError(f"the service sent {kind or 'no content type'} and no result")
        if left:
            self._failed(f"{self._outage.url} ended the answer early", left.values(), began)

    def _refused(self, response: httpx.Response, items: list[Item], left: dict[str, Item], began: float) -> None:
        answer = refusal(response.status_code, response.headers, response.content, len(items), self._num_failures)
        for position, error in answer.errors.items():
            left.pop(items[position].id).fail(error)
        for item in left.values():
            item.alone = item.alone or answer.alone
            item.problem = answer.message
        if answer.pause_s is not None:
            self._num_failures += 1
            self._not_before = max(self._not_before, time.monotonic() + answer.pause_s)
            self._outage.note(f"{self._outage.url} answers with {answer.message}", began)

    def _failed(self, problem: str, items: Iterable[Item], began: float) -> None:
        """Wait before the next request; record the problem for the error of those whose time ends."""
        self._not_before = time.monotonic() + pause_after(self._num_failures)
        self._num_failures += 1
        self._outage.note(problem, began)
        for item in items:
            item.problem = problem

    def _again(self, items: Iterable[Item]) -> None:
        self._waiting.extendleft(reversed([item for item in items if not item.answer.done()]))
        self._wake()


def _fail_all(items: Iterable[Item], error: RewardError) -> None:
    for item in items:
        item.fail(type(error)(*error.args))


class Outage:
    """Warn while no request to a service succeeds: after 5 s, and once a minute."""

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._clock = clock
        self._timeout_s = timeout_s
        self._began: float | None = None
        self._warned_at = -math.inf

    def problem_of(self, error: Exception) -> str:
        """Say what a failed request means, with the system's own reason."""
        if isinstance(error, httpx.ConnectTimeout):
            return f"cannot reach {self.url}: no connection within {_CONNECT_S:g} s"
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
            return f"{self.url} has sent nothing for {_QUIET_S:g} s: it may be stopped, or have no processor time"
        if isinstance(error, httpx.ConnectError):
            return f"cannot reach {self.url}: {_reason(error)}"
        return f"{self.url} broke the connection: {_reason(error)}"

    def note(self, problem: str, began: float) -> None:
        """Note a failure of a request that ``began`` then."""
        if self._began is None:
            self._began = began
        now = self._clock()
        if now - self._began >= _WARN_AFTER_S and now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            _LOG.warning("%s; waiting up to %g s. %s", problem, self._timeout_s, _WHERE)

    def end(self) -> None:
        """Note that the service has given a result."""
        self._began = None


def _reason(error: BaseException) -> str:
    """Return the system's reason for a failed connection, which stands at the end of the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        group = getattr(cause, "exceptions", None)  # of the addresses of one name
        cause = group[0] if group else cause
        if isinstance(cause, (ssl.SSLError, socket.gaierror)):
            return str(cause.strerror)
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the complete lines of an answer; empty ones, which keep a quiet connection open, are left out."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise ProtocolError(
                f"the service sent a line of more than {_MOST_LINE_BYTES >> 20} MiB, which is no result"
            )
        for line in lines:
            if line:
                yield line


class Item:
    """Hold one sample or group, as JSON, whose ``answer`` fails with ``UnavailableError`` after ``timeout_s``."""

    __slots__ = ("alone", "answer", "body", "expiry", "id", "path", "problem")

    def __init__(self, path: str, id: str, body: bytes, timeout_s: float) -> None:  # noqa: A002 (the field's name)
        loop = asyncio.get_running_loop()
        self.path, self.id, self.body = path, id, body
        self.answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.alone = False
        self.problem = "the service has not scored it yet"
        self.expiry = loop.call_later(timeout_s, self._expire, timeout_s)

    def _expire(self, timeout_s: float) -> None:
        self.fail(UnavailableError(f"no result of sample {self.id} within {timeout_s:g} s: {self.problem}"))

    def fail(self, error: RewardError) -> None:
        """End the wait with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(frozen=True)
class Refusal:
    """A status other than 200."""

    errors: Mapping[int, RewardError] = field(default_factory=dict)
    """By position in the request; these samples are not sent again."""
    pause_s: float | None = None
    """Seconds to wait before the others are sent again; None: send them now."""
    alone: bool = False
    """The others must be sent one by one, because the service did not name which one it refuses."""
    message: str = ""


def refusal(status: int, headers: Mapping[str, str], body: bytes, num_sent: int, num_failures: int) -> Refusal:
    """Read an answer that has no results.

    Args:
        body: ``{"error": {"type", "message", "samples": {position: message}}}``, or anything from a proxy.
        num_sent: samples or groups in the request.
        num_failures: requests in a row that have failed; sets the pause where the service gives none.
    """
    error = _error_of(body)
    message = error.get("message") or f"status {status}: {body[:200].decode(errors='replace')}"
    if status in (401, 403):
        return _refuse_all(num_sent, AuthenticationError(message))
    if status in (408, 425, 429) or status >= 500:
        return Refusal(pause_s=_pause_s(headers, num_failures), message=f"status {status}: {message}")
    if status in (409, 410, 413, 422):
        named = {i: InvalidSampleError(str(each)) for i, each in _samples_of(error).items() if i < num_sent}
        if named:
            return Refusal(named, message=message)
        return _refuse_all(1, InvalidSampleError(message)) if num_sent == 1 else Refusal(alone=True, message=message)
    return _refuse_all(num_sent, ProtocolError(f"{message}. Is the URL that of a Plaudit reward service?"))


def pause_after(num_failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; it doubles up to 5 s, with jitter."""
    return float(min(FIRST_PAUSE_S * 2 ** min(num_failures, 10), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))


def _refuse_all(num_sent: int, error: RewardError) -> Refusal:
    return Refusal({i: type(error)(*error.args) for i in range(num_sent)}, message=str(error))


def _error_of(body: bytes) -> Mapping[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def _samples_of(error: Mapping[str, Any]) -> dict[int, Any]:
    """Return what the service says of samples, by their position in the request."""
    named = error.get("samples")
    items = named.items() if isinstance(named, dict) else ()
    return {int(position): each for position, each in items if position.isascii() and position.isdigit()}


def _pause_s(headers: Mapping[str, str], num_failures: int) -> float:
    try:
        asked_s = float(headers["retry-after"])
    except (KeyError, ValueError):
        asked_s = math.nan
    if not math.isfinite(asked_s):
        return pause_after(num_failures)
    return min(max(asked_s, FIRST_PAUSE_S), LONGEST_RETRY_AFTER_S) * random.uniform(1.0, 1.2)


def encode_sample(sample: Mapping[str, Any], id: str = "") -> bytes:  # noqa: A002 (the field's name)
    """Return a sample as JSON, under this id (empty: its own, if it has one).

    Arrays and scalars of NumPy and torch become lists and numbers; tuples and sets lists; decimals, dates, times and
    UUIDs text; NaN, which pandas writes for an absent value, null. Raises ``InvalidSampleError``, which names the
    part, for anything but a mapping with a ``response`` and values that JSON can hold.
    """
    if not isinstance(sample, Mapping):
        raise InvalidSampleError(f"a sample is a mapping with at least response, not {type(sample).__name__}")
    if not isinstance(sample.get("response"), str):
        raise InvalidSampleError(f"response: give the generated text, not {type(sample.get('response')).__name__}")
    written = {**sample, "id": id} if id else dict(sample)
    try:
        return _json(written)
    except Exception:  # a part has no form in JSON, or its own code fails: the slower way names or mends it
        return _json({name: _judged(part, str(name), 1) for name, part in written.items()})


def _json(value: Any) -> bytes:
    text = _encode(value)
    return _whole(_encode_unescaped(value)).encode() if "\\ud" in text else text.encode()


def _whole(text: str) -> str:
    """Return a text in which a half of a surrogate pair, which no JSON text may hold, is the replacement character."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_MOST_LEVELS, _LARGEST = 64, 2**64
_TEXTS = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


def _plain(value: Any) -> Any:
    """Convert a value that ``json`` does not know."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, _TEXTS):
        return value.isoformat() if hasattr(value, "isoformat") else str(value)
    if hasattr(value, "dtype") and value.dtype.kind in "Mm":  # NumPy's times, whose numbers have any unit
        value = value.astype(f"{value.dtype.kind}8[us]")
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


_encode = json.JSONEncoder(default=_plain, allow_nan=False, separators=(",", ":")).encode
_encode_unescaped = json.JSONEncoder(default=_plain, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode


def _judged(value: Any, where: str, level: int) -> Any:
    """Return a part of a sample in types that ``json`` writes; raise ``InvalidSampleError`` for one without such."""
    if level > _MOST_LEVELS:
        raise InvalidSampleError(f"{where[:160]}: is nested more than {_MOST_LEVELS} levels deep; give flatter data")
    try:
        if isinstance(value, Mapping):
            return {_key(key): _judged(part, f"{where}.{str(key)[:60]}", level + 1) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [_judged(part, f"{where}[{place}]", level + 1) for place, part in enumerate(value)]
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, float) and not math.isinf(value):
            return None if math.isnan(value) else float(value)
        if isinstance(value, int) and abs(value) < _LARGEST:
            return value
        if not isinstance(value, (int, float)):
            return _judged(_plain(value), where, level + 1)
    except InvalidSampleError:
        raise
    except Exception as error:  # the value's own code, or a type without a form
        raise InvalidSampleError(f"{where[:160]}: {error}; give text, numbers, lists or mappings") from error
    raise InvalidSampleError(f"{where[:160]}: a number beyond 64 bits, or infinite; write it as text")


def _key(key: Any) -> Any:
    if key is None or isinstance(key, str) or (isinstance(key, (int, float)) and -_LARGEST < key < _LARGEST):
        return key
    raise TypeError(f"has the key {key!r:.60}, which is no text")
