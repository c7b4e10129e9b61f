"""Serve ``/classify`` with vLLM's request and response, ``/health``, ``/v1/models``, ``/metrics``.

For a server that takes turns on its GPU also ``/sleep`` and ``/wake_up``, as vLLM's sleep mode has them. After a stop
it drains: it refuses new requests, answers the accepted ones and ends.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from plaudit_metrics.service.http_server import HttpServer, listening_socket
from plaudit_model_server.batcher import (
    Batcher,
    BatchLimits,
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    ErrorInfo,
    ErrorResponse,
    Forward,
    ForwardError,
    ModelServerSeries,
    Occupy,
    QueueFullError,
    ShuttingDownError,
    Usage,
)
from plaudit_reward.endpoint.served import TOKEN_VARIABLE
from plaudit_reward.endpoint.vllm_sleep import is_permitted
from plaudit_wire.errors import DataError
from plaudit_wire.logs import get_logger

if TYPE_CHECKING:
    from plaudit_model_server.model import Classifier


logger = get_logger(__name__)


@dataclass(frozen=True)
class Access:
    """Bound the requests that the server reads: who may send them, how large they are, how slowly they may come."""

    token: str = ""
    """Bearer token that a request must carry; empty: none. ``/health`` and ``/metrics`` never need it."""
    max_body_bytes: int = 4 << 20
    """Bytes of a request's body."""
    sleep_token: str = ""
    """Bearer token of ``/sleep`` and ``/wake_up``; empty: there are no such routes."""
    body_within_s: float = 30.0
    """Seconds within which a whole body must arrive."""


class AccessError(Exception):
    """The request is refused before it is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_token(request: Request, access: Access) -> None:
    """Raise ``AccessError`` (401) unless the request carries the token."""
    if not access.token:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), access.token.encode()):
        raise AccessError(401, f"the bearer token is missing or wrong: send the one of {TOKEN_VARIABLE}")


async def read_body(request: Request, access: Access) -> bytes:
    """Return the request's body. Raises ``AccessError`` (413: too long, 408: too late) or ``ClientDisconnect``."""
    too_long = AccessError(413, f"the body is longer than {access.max_body_bytes} bytes (--max-body-bytes): send less")
    if int(request.headers.get("content-length", 0)) > access.max_body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(access.body_within_s):
            async for part in request.stream():
                body += part
                if len(body) > access.max_body_bytes:
                    raise too_long
    except TimeoutError:
        raise AccessError(408, f"the body did not arrive within {access.body_within_s:g} s") from None
    return bytes(body)


T = TypeVar("T")
RETRY_AFTER_S = 1
"""A queue of the default size is empty after about this."""
_SHORT_BYTES = 16_384
"""Texts up to this size are tokenized on the event loop: handing them to a thread would cost more. Chats never are: a
template may take any time."""
_decode = msgspec.json.Decoder(ClassifyRequest).decode
_CLIENT_CLOSED_REQUEST = 499
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ModelApi:
    """Answer requests with one model; the caller runs ``batcher``, which computes the sequences."""

    def __init__(
        self,
        classifier: Classifier,
        batcher: Batcher,
        name: str,
        series: ModelServerSeries,
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        self._classifier = classifier
        self._batcher = batcher
        self._name = name
        self._series = series
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        """Keeps chats and long requests off the event loop."""
        self.draining = False
        """True once the server is shutting down: it is no longer ready."""

    def application(self) -> Starlette:
        """Build the ASGI application."""
        return Starlette(
            routes=[
                Route("/classify", self._classify, methods=["POST"]),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/sleep", self._sleep, methods=["POST"]),
                Route("/wake_up", self._wake_up, methods=["POST"]),
            ]
        )

    async def _classify(self, request: Request) -> Response:
        try:
            check_token(request, self._access)
            response = await self._answer(await read_body(request, self._access), request)
        except AccessError as error:
            response = _refusal(error.status, str(error))
        except ClientDisconnect:
            response = _refusal(_CLIENT_CLOSED_REQUEST, "the client is gone")
        self._series.answered(response.status_code)
        return response

    async def _answer(self, body: bytes, request: Request) -> Response:
        try:
            asked, sequences = await self._read(body)
            logits = await _unless_gone(request, self._batcher.logits(sequences))
        except (msgspec.DecodeError, DataError) as error:  # a ValidationError is a DecodeError
            return _refusal(400, str(error))
        except QueueFullError:
            return _refusal(429, "the queue is full", RETRY_AFTER_S)
        except ShuttingDownError:
            return _refusal(503, "the server is shutting down", RETRY_AFTER_S)
        except _GoneError:
            return _refusal(_CLIENT_CLOSED_REQUEST, "the client is gone")
        except ForwardError as error:
            return _refusal(500, str(error))
        return _json(self._response(asked, sequences, logits))

    async def _read(self, body: bytes) -> tuple[ClassifyRequest, Sequence[Sequence[int]]]:
        """Decode, render and tokenize; everything that may take long in a thread."""
        asked = await self._in_thread(lambda: _decode(body)) if len(body) > _SHORT_BYTES else _decode(body)
        if len(body) > _SHORT_BYTES or asked.messages is not None:
            return asked, await self._in_thread(lambda: self._sequences(asked))
        return asked, self._sequences(asked)

    def _sequences(self, asked: ClassifyRequest) -> Sequence[Sequence[int]]:
        sequences = self._tokens(asked)
        if not sequences:
            raise DataError("input is empty")
        if len(sequences) > self._batcher.max_queue:
            raise DataError(f"input has {len(sequences)} entries, the queue takes {self._batcher.max_queue}: send less")
        for tokens in sequences:
            self._classifier.check(tokens)
        return sequences

    def _tokens(self, asked: ClassifyRequest) -> Sequence[Sequence[int]]:
        """Return the token ids of a request's input, whatever its form."""
        if asked.model not in {None, self._name}:
            raise DataError(f"model {asked.model!r} is not served here; this server has {self._name!r}")
        if (asked.input is None) == (asked.messages is None):
            raise DataError("give either input or messages")
        if asked.messages is not None:
            text = self._classifier.render(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=asked.chat_template_kwargs,
            )
            return self._classifier.tokenize([text], add_special_tokens=bool(asked.add_special_tokens))
        given: Any = asked.input
        if isinstance(given, str):
            given = [given]
        kinds = {type(one) for one in given}
        if kinds == {str}:
            return self._classifier.tokenize(given, add_special_tokens=asked.add_special_tokens is not False)
        if kinds == {int}:
            return [given]
        if kinds <= {list}:
            return list(given)
        raise DataError("input mixes texts, token ids and lists of token ids: send one kind")

    def _response(
        self, asked: ClassifyRequest, sequences: Sequence[Sequence[int]], logits: Sequence[list[float]]
    ) -> ClassifyResponse:
        raw = asked.use_activation is False
        values = logits if raw else [self._classifier.activate(each) for each in logits]
        tokens = sum(len(each) for each in sequences)
        return ClassifyResponse(
            id=f"classify-{asked.request_id or uuid.uuid4().hex}",
            object="list",
            created=int(time.time()),
            model=self._name,
            data=[
                Classification(index, self._classifier.labels.get(probs.index(max(probs))), probs, len(probs))
                for index, probs in enumerate(values)
            ],
            usage=Usage(tokens, tokens),
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.draining else 200)

    async def _models(self, request: Request) -> Response:
        try:
            check_token(request, self._access)
        except AccessError as error:
            return _refusal(error.status, str(error))
        model = {"id": self._name, "object": "model", "owned_by": "plaudit"}
        return _json({"object": "list", "data": [model | {"max_model_len": self._classifier.max_length}]})

    async def _sleep(self, request: Request) -> Response:
        return await self._moved(request, self._batcher.sleep, "sleeping")

    async def _wake_up(self, request: Request) -> Response:
        return await self._moved(request, self._batcher.wake_up, "awake")

    async def _moved(self, request: Request, move: Callable[[], Awaitable[None]], status: str) -> Response:
        if not is_permitted(request.headers, self._access.sleep_token):
            return Response(status_code=404)
        try:
            await move()
        except ForwardError as error:
            return _refusal(500, str(error))
        return _json({"status": status})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._series.registry), media_type=CONTENT_TYPE_LATEST)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)


class _GoneError(Exception):
    """The client disconnected."""


async def _unless_gone(request: Request, work: Any) -> Any:
    """Return the result of ``work``; cancel it when the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _GoneError
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    """Return when the client disconnects; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _refusal(code: int, message: str, retry_after_s: int | None = None) -> Response:
    error = ErrorInfo(message, _TYPES.get(code, "Error"), None, code)
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if code == 408:
        headers["Connection"] = "close"  # the rest of the body is not read
    return Response(msgspec.json.encode(ErrorResponse(error)), code, media_type="application/json", headers=headers)


_LAST_ANSWERS_WITHIN_S = 10
"""Pause at the end of a drain, so that results reach their clients."""


@dataclass(frozen=True)
class Address:
    """Hold the server's address and the name of its model."""

    host: str
    port: int
    name: str
    """Name of the model, in ``/v1/models`` and in responses."""


async def serve(
    classifier: Classifier,
    address: Address,
    limits: BatchLimits,
    stop: asyncio.Event,
    forward: Forward | None = None,
    access: Access | None = None,
    occupy: Occupy | None = None,
) -> None:
    """Serve a loaded model until ``stop`` is set and all accepted requests are answered.

    The server listens only after the model is loaded: a client that can connect reaches a ready server. ``forward`` and
    ``occupy``, if given, replace the classifier's own. Raises ``OSError`` if the port is taken, and what a pass raises.
    """
    series = ModelServerSeries()
    batcher = Batcher(forward or classifier.logits, _limits(limits, classifier), series, occupy or classifier.occupy)
    api = ModelApi(classifier, batcher, address.name, series, access)
    with listening_socket(address.host, address.port) as listener:
        server = HttpServer(api.application(), end_within_s=_LAST_ANSWERS_WITHIN_S)
        host, port = listener.getsockname()[:2]
        logger.info("serving", host=host, port=port)
        answering = asyncio.create_task(server.serve(sockets=[listener]))
        computing = asyncio.create_task(batcher.run())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({computing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            api.draining = True
            batcher.stop()
            await computing
        finally:
            stopped.cancel()
            server.should_exit = True
            await answering


def _limits(given: BatchLimits, classifier: Classifier) -> BatchLimits:
    if classifier.packs:
        tokens = min(given.max_batch_tokens, classifier.enough_tokens)
        return replace(given, max_batch_tokens=tokens, max_padding=None)
    return given if classifier.batches else replace(given, max_batch_tokens=1)
