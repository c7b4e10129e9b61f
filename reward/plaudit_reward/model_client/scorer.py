"""``kind: model``: sends a sample to one of the scorer's reward model servers and returns the logit as its value.

The response decides. 200 carries the value. 429 means a full queue: the sample goes to another server, or to the same
one after its ``Retry-After``. 503 means a server that is shutting down: it gets no requests until it is healthy. 401
and 403 mean a wrong token. Any other 4xx is about this sample (too long, no chat template) and is never retried. A lost
connection or a 5xx is an ``InfrastructureError``, which the pipeline retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from plaudit_reward.errors import (
    CallTimeoutError,
    ConfigurationError,
    DataError,
    InfrastructureError,
    ScoreTimeoutError,
)
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError, UnreachableError
from plaudit_reward.http.response import Response, error_message, retry_after_s
from plaudit_reward.model_client.addresses import TOKEN_VARIABLE, find
from plaudit_reward.model_client.replicas import Replica, Replicas
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.logs import get_logger
from plaudit_wire.sample import Sample

logger = get_logger(__name__)

InputForm = Literal["chat", "text"]


_FIND_EVERY_S = 2.0
_WATCH_EVERY_S = 0.1
_PROBE_WITHIN_S = 2.0
_SPARE_CONNECTIONS = 16
"""For probes, so that they never wait for samples."""
_WRONG_TOKEN = frozenset({401, 403})
_LONGEST_RETRY_AFTER_S = 60.0


class _Result(msgspec.Struct):
    probs: list[float | None]
    """None is what JSON has for NaN."""


class _Answer(msgspec.Struct):
    data: list[_Result]


_decode = msgspec.json.Decoder(_Answer).decode


class ModelScorer:
    """Scores by a reward model with one output, behind vLLM's ``/classify`` or Plaudit's own.

    Args:
        name: of the scorer in the job.
        places: of its servers; see ``addresses``.
        form: ``chat``: the messages and the response, rendered by the reward model's chat template; ``text``: prompt
            and response, concatenated.
        max_concurrent: requests at a time.
        token: bearer token of the servers; empty: none.
        traceparent: returns the trace context of a sample, sent as a header. None where nothing is traced.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[str],
        *,
        form: InputForm = "chat",
        max_concurrent: int = 256,
        token: str = "",
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self._traceparent = traceparent
        self.name = name
        self._places = list(places)
        self._form = form
        self._max_concurrent = max_concurrent
        self._replicas = Replicas()
        self._changed = asyncio.Event()
        self._in_work = 0
        self._token = token
        self._http: HttpClient | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to look for servers; they may come up later than the worker.

        Raises:
            ConfigurationError: there are no addresses of servers, an HTTP header cannot carry the token, or the process
                may not open so many connections.
        """
        if not self._places:
            raise ConfigurationError(
                f"scorer {self.name}: the address of its reward model is missing. 'plaudit run' and the operator "
                "start the servers; to start this process by hand, set PLAUDIT_MODEL_SERVERS"
            )
        # The servers belong to the job, so no proxy lies between.
        self._http = HttpClient(
            max_connections=self._max_concurrent + _SPARE_CONNECTIONS,
            bearer_token=self._token,
            key_field=TOKEN_VARIABLE,
        )
        self._watching = asyncio.create_task(self._watch())

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample; ask further servers while those asked are full or shutting down."""
        self._in_work += 1
        try:
            headers = {"traceparent": self._traceparent(sample)} if self._traceparent else None
            return await self._score(request_body(sample, self._form), attempt, headers)
        finally:
            self._in_work -= 1

    def room(self) -> int:
        """Return how many more samples could begin; none while no server is healthy, so that their time stays whole."""
        return max(0, self._max_concurrent - self._in_work) if self._replicas.any_healthy else 0

    async def close(self) -> None:
        """Stop the probes and close the connections."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._http is not None:
            await self._http.close()

    async def _score(self, body: bytes, attempt: Attempt, headers: Mapping[str, str] | None) -> Score:
        began_s = time.monotonic()
        while True:
            replica = await self._pick(attempt, began_s)
            response = await self._ask(replica, body, _left_s(attempt, began_s), headers)
            if response is not None:
                return _score_of(replica.url, response.body)

    async def _pick(self, attempt: Attempt, began_s: float) -> Replica:
        """Wait for a server: for a full one as limiter wait, for an unhealthy one within the sample's time."""
        while True:
            now_s = time.monotonic()
            replica = self._replicas.pick(now_s)
            if replica is not None:
                return replica
            full = self._replicas.any_healthy
            if full:
                await self._wait(self._replicas.free_at_s() - now_s)
                attempt.waited_s += time.monotonic() - now_s
                continue
            left_s = _left_s(attempt, began_s)
            if left_s <= 0:
                raise InfrastructureError(f"none of {len(self._replicas)} servers of the reward model is healthy")
            await self._wait(left_s)

    async def _wait(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_most_s)):
                await self._changed.wait()

    async def _ask(
        self, replica: Replica, body: bytes, limit_s: float, headers: Mapping[str, str] | None
    ) -> Response | None:
        """Send one request; return None when another server must be asked."""
        replica.outstanding += 1
        try:
            response = await self._post(replica, body, limit_s, headers)
        finally:
            replica.outstanding -= 1
        now_s = time.monotonic()
        if response.status == 429:
            self._replicas.full(replica, now_s, _pause_s(response))
            return None
        if response.status == 503:
            self._replicas.eject(replica, now_s, _pause_s(response))
            return None
        if response.status >= 500 or response.status == 408:
            self._replicas.failed(replica, now_s)
            raise InfrastructureError(f"{replica.url} responded {self._explained(response)}")
        self._replicas.answered(replica)
        if response.status in _WRONG_TOKEN:
            raise InfrastructureError(
                f"{replica.url} responded {self._explained(response)} (set {TOKEN_VARIABLE} to the server's token)"
            )
        if response.status != 200 and response.status < 400:
            raise InfrastructureError(f"{replica.url} responded {response.status}; a reward model server sends 200")
        if response.status != 200:
            raise DataError(f"{replica.url} refused the sample: {self._explained(response)}")
        return response

    async def _post(self, replica: Replica, body: bytes, limit_s: float, headers: Mapping[str, str] | None) -> Response:
        assert self._http is not None
        try:
            return await self._http.post(f"{replica.url}/classify", body, limit_s, headers=headers)
        except CallTimeoutError as error:
            self._replicas.failed(replica, time.monotonic())
            raise ScoreTimeoutError(str(error)) from None
        except UnreachableError:
            self._replicas.eject(replica, time.monotonic())
            raise
        except NoResponseError:
            self._replicas.failed(replica, time.monotonic())
            raise

    def _explained(self, response: Response) -> str:
        return f"{response.status}: {error_message(response.body, self._token)}"

    async def _watch(self) -> None:
        """Look up the servers and probe the unhealthy ones until the scorer closes."""
        find_at_s = 0.0
        while True:
            if time.monotonic() >= find_at_s:
                urls, complete = await find(self._places)
                self._replicas.update(urls, complete=complete)
                find_at_s = time.monotonic() + _FIND_EVERY_S
            await asyncio.gather(*(self._probe(replica) for replica in self._replicas.due(time.monotonic())))
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _probe(self, replica: Replica) -> None:
        assert self._http is not None
        try:
            healthy = (await self._http.get(f"{replica.url}/health", _PROBE_WITHIN_S)).status == 200
        except (NoResponseError, CallTimeoutError):
            healthy = False
        self._replicas.probed(replica, time.monotonic(), healthy=healthy)
        if healthy:
            logger.info("reward model server is healthy", scorer=self.name, url=replica.url)
            self._changed.set()  # all waiting samples look again
            self._changed = asyncio.Event()


def request_body(sample: Sample, form: InputForm) -> bytes:
    """Return the body of the request for a sample's raw logit.

    A prompt without messages becomes one message of the user.
    """
    if form == "text":
        return msgspec.json.encode({"input": sample.prompt + sample.response, "use_activation": False})
    prompt: list[dict[str, Any]] = sample.messages or [{"role": "user", "content": sample.prompt}]
    messages = [*prompt, {"role": "assistant", "content": sample.response}]
    return msgspec.json.encode({"messages": messages, "use_activation": False})


def _score_of(url: str, body: bytes) -> Score:
    try:
        (result,) = _decode(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InfrastructureError(f"{url}: the response is not a classification of one input: {error}") from error
    if len(result.probs) != 1:
        raise DataError(
            f"{url}: the model has {len(result.probs)} labels; a reward model has one (num_labels: 1). Name another "
            "source"
        )
    (logit,) = result.probs
    return Score.scored(math.nan if logit is None else logit)


def _pause_s(response: Response) -> float:
    """Return the seconds of ``Retry-After``, at most a minute; one where the header is missing."""
    asked_s = retry_after_s(response.headers)
    return 1.0 if asked_s is None else min(asked_s, _LONGEST_RETRY_AFTER_S)


def _left_s(attempt: Attempt, began_s: float) -> float:
    """Return the seconds that the attempt has left, waits for limits excluded."""
    return attempt.limit_s - (time.monotonic() - began_s - attempt.waited_s)
