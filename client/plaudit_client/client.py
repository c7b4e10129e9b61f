"""Hold a service's URL and token, and make a trainer's calls: ``RewardClient``."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from plaudit_client.batches import GROUPS, SCORE, Batches, Item
from plaudit_client.encoding import encode_sample
from plaudit_client.errors import InvalidSampleError, ProtocolError, UnavailableError
from plaudit_client.result import Result, result_of
from plaudit_client.retries import refusal

SampleMapping = Mapping[str, Any]
"""``response``, and optionally ``prompt`` (text or chat messages), ``data_source``, ``ground_truth``, ``extra_info``,
``response_tokens``, ``max_tokens``, ``finish_reason``, ``id``."""

_MOST_UNDER_WAY = 2048
_QUIET_S = 60.0
"""The service sends an empty line at least every 15 s: a connection that is quiet for longer is dead."""


class RewardClient:
    """Score samples with a reward service.

    Every method may be called by any number of tasks at once, from any event loop; each loop has connections of its
    own. A client can be pickled: the copy opens its own connections. ``aclose`` (or leaving the context) closes those
    of the running loop; the client can be used again afterwards.

    An id stands for one sample: a repeat of the call under the same id gets the first call's result, also from another
    process. Samples without one get a random id.

    Args:
        url: for example ``http://127.0.0.1:8710``; ``runs/<run>/service.json`` has it.
        token: empty: none is sent.
        timeout_s: seconds that a call waits for a result, through restarts of the service.
        ca_file: certificates of the authority that signed the service's, for ``https://``; empty: the system's.

    Raises:
        ValueError: the URL is none, or no HTTP header can carry the token.
    """

    def __init__(self, url: str, token: str = "", *, timeout_s: float = 1800.0, ca_file: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url {url!r}: give the service's address, for example http://127.0.0.1:8710")
        _check_token(token)
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._token = token
        self._ca_file = ca_file
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batches] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.url, self._token, self.timeout_s, self._ca_file)

    async def __aenter__(self) -> RewardClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running event loop; calls that still wait there end with an error."""
        batches = self._by_loop.pop(asyncio.get_running_loop(), None)
        if batches is not None:
            await batches.close()

    async def score(self, sample: SampleMapping) -> Result:
        """Score one sample.

        Raises:
            InvalidSampleError: the service refuses it, or its id belongs to another sample.
            AuthenticationError: the service refuses the token.
            UnavailableError: no result within ``timeout_s``.
            ProtocolError: the URL is not that of a reward service.
        """
        item = self._sample_item(sample)
        self._batches().add((item,))
        return _result(await item.answer)

    async def score_many(self, samples: Iterable[SampleMapping]) -> AsyncGenerator[Result, None]:
        """Score samples; yield their results in order of completion, ``index`` being the position in ``samples``.

        ``samples`` is read as results arrive, at most 2,048 ahead of them.

        Raises:
            InvalidSampleError: see ``score``; the message begins with the sample's position. The others likewise.
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

        Args:
            samples: 1 to 1,024 of them; their own ids are ignored.
            id: of the group; empty: a random one.

        Raises:
            InvalidSampleError: see ``score``; the others likewise.
        """
        own = id or uuid.uuid4().hex
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
        return [_result(each, index) for index, each in enumerate(answer["results"])]

    async def service(self) -> dict[str, Any]:
        """Return the service's description: job, scorers, versions, limits, health (``GET /v1/service``).

        Raises:
            AuthenticationError: the service refuses the token.
            UnavailableError: it cannot be reached, now.
        """
        try:
            async with self._http() as http:
                response = await http.get("/v1/service")
        except httpx.TransportError as error:
            raise UnavailableError(f"{self.url}: {type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            answer = refusal(response.status_code, response.headers, response.content, 1, 0)
            raise answer.errors.get(0, UnavailableError(f"{self.url}: {answer.message}"))
        try:
            description: dict[str, Any] = response.json()
        except ValueError as error:
            raise ProtocolError(f"{self.url} is no reward service: it sent {response.content[:200]!r}") from error
        return description

    def _start_next(
        self,
        numbered: Iterator[tuple[int, SampleMapping]],
        open_items: dict[int, Item],
        done: asyncio.Queue[tuple[int, Item]],
    ) -> None:
        started = []
        while len(open_items) < _MOST_UNDER_WAY and (following := next(numbered, None)) is not None:
            index, sample = following
            try:
                item = self._sample_item(sample)
            except InvalidSampleError as error:
                raise InvalidSampleError(f"sample {index}: {error}") from error
            item.answer.add_done_callback(functools.partial(_put, done, index, item))
            open_items[index] = item
            started.append(item)
        if started:
            self._batches().add(started)

    def _sample_item(self, sample: SampleMapping) -> Item:
        own = str((sample.get("id") if isinstance(sample, Mapping) else "") or uuid.uuid4().hex)
        return Item(SCORE, own, encode_sample(sample, own), self.timeout_s)

    def _batches(self) -> Batches:
        loop = asyncio.get_running_loop()
        batches = self._by_loop.get(loop)
        if batches is None:
            batches = self._by_loop[loop] = Batches(self._http())
        return batches

    def _http(self) -> httpx.AsyncClient:
        secure = self.url.startswith("https://")  # without TLS, reading certificates would only cost time
        context = ssl.create_default_context(cafile=self._ca_file or None) if secure else False
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=httpx.Timeout(10.0, read=_QUIET_S, write=_QUIET_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
            verify=context,
        )


def _check_token(token: str) -> None:
    """Refuse a token that no HTTP header can carry, such as one read from a file with its line end."""
    remedy = "give it as service.json has it, without spaces around it and line ends"
    if token != token.strip(" "):
        raise ValueError(f"token: there is a space before or behind it, which an HTTP header loses; {remedy}")
    for position, character in enumerate(token, 1):
        if not " " <= character <= "~":
            raise ValueError(f"token: no HTTP header can carry its character {position}, {character!r}; {remedy}")


def _put(done: asyncio.Queue[tuple[int, Item]], index: int, item: Item, _: object) -> None:
    done.put_nowait((index, item))


def _result(answer: Mapping[str, Any], index: int = 0) -> Result:
    try:
        return result_of(answer, index)
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the service sent {answer!r:.200}, which is no result") from error


def _restored(kind: type[RewardClient], url: str, token: str, timeout_s: float, ca_file: str) -> RewardClient:
    return kind(url, token, timeout_s=timeout_s, ca_file=ca_file)
