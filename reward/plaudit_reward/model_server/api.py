"""The server's routes: ``/classify`` as vLLM's pooling server answers it, ``/health``, ``/v1/models``, ``/metrics``."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plaudit_reward.errors import DataError
from plaudit_reward.model_server.batcher import Batcher, ForwardError, QueueFullError, StoppedError
from plaudit_reward.model_server.protocol import (
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    ErrorInfo,
    ErrorResponse,
    Usage,
)
from plaudit_reward.model_server.series import Series

if TYPE_CHECKING:
    from plaudit_reward.model_server.model import Classifier

T = TypeVar("T")

RETRY_AFTER_S = 1
"""A queue of the default size is worked off in about this."""

_SHORT_BYTES = 16_384
"""A request of at most so many is tokenised where it is read: handing it to a thread would cost more."""

_CLIENT_CLOSED_REQUEST = 499
_TYPES = {400: "BadRequestError", 429: "RateLimitError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class Api:
    """Answers requests with one model.

    Args:
        classifier: the model, loaded.
        batcher: computes its sequences; run by the caller.
        name: under which the model is served.
        series: what is measured.
    """

    def __init__(self, classifier: Classifier, batcher: Batcher, name: str, series: Series) -> None:
        self._classifier = classifier
        self._batcher = batcher
        self._name = name
        self._series = series
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        """Keeps long requests off the event loop."""
        self.draining = False
        """Set when the server is told to end: it is then no longer ready."""

    def application(self) -> Starlette:
        """The routes."""
        return Starlette(
            routes=[
                Route("/classify", self._classify, methods=["POST"]),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
            ]
        )

    async def _classify(self, request: Request) -> Response:
        response = await self._answer(await request.body(), request)
        self._series.answered(response.status_code)
        return response

    async def _answer(self, body: bytes, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(body, type=ClassifyRequest)
            short = len(body) <= _SHORT_BYTES
            sequences = self._sequences(asked) if short else await self._in_thread(lambda: self._sequences(asked))
            logits = await _unless_gone(request, self._batcher.logits(sequences))
        except (msgspec.DecodeError, DataError) as error:  # a ValidationError is a DecodeError
            return _refusal(400, str(error))
        except QueueFullError:
            return _refusal(429, "the queue is full", RETRY_AFTER_S)
        except StoppedError:
            return _refusal(503, "the server is ending", RETRY_AFTER_S)
        except _GoneError:
            return _refusal(_CLIENT_CLOSED_REQUEST, "the client is gone")
        except ForwardError as error:
            return _refusal(500, str(error))
        return _json(self._response(asked, sequences, logits))

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
        """Token ids of what was sent, in whichever of its forms."""
        if asked.model not in {None, self._name}:
            raise DataError(f"there is no model {asked.model!r} here; this server has {self._name!r}")
        if (asked.input is None) == (asked.messages is None):
            raise DataError("give input or messages, one of them")
        if asked.messages is not None:
            text = self._classifier.render(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                **asked.chat_template_kwargs,
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
        model = {
            "id": self._name,
            "object": "model",
            "owned_by": "plaudit",
            "max_model_len": self._classifier.max_length,
        }
        return _json({"object": "list", "data": [model]})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._series.registry), media_type=CONTENT_TYPE_LATEST)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)


class _GoneError(Exception):
    """The client hung up."""


async def _unless_gone(request: Request, work: Any) -> Any:
    """What ``work`` gives; cancelled when the client hangs up, so that nobody's sequences are not computed."""
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
    """Returns when the client hangs up; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _refusal(code: int, message: str, retry_after_s: int | None = None) -> Response:
    error = ErrorInfo(message, _TYPES.get(code, "Error"), None, code)
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return Response(msgspec.json.encode(ErrorResponse(error)), code, media_type="application/json", headers=headers)
