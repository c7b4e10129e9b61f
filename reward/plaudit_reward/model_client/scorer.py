"""``kind: model``: sends a sample to one of the scorer's reward model servers, takes the logit as its value.

What a server says decides what becomes of the sample: 200 is a value; 429 is a queue that is full, so another server is
asked, or the same one after its ``Retry-After``; 503 is a server that ends, which is asked no more until it is healthy;
any other 4xx is about this sample (too long, no chat template) and never tried again; a lost connection or a 5xx is an
``InfrastructureError``, which the pipeline tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import httpx
import msgspec

from plaudit_reward.errors import ConfigurationError, DataError, InfrastructureError, ScoreTimeoutError
from plaudit_reward.model_client.addresses import find
from plaudit_reward.model_client.replicas import Replica, Replicas
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.logs import get_logger
from plaudit_wire.sample import Sample

logger = get_logger(__name__)

Form = Literal["chat", "text"]

_FIND_EVERY_S = 2.0
_WATCH_EVERY_S = 0.1
_PROBE_WITHIN_S = 2.0
_CONNECT_WITHIN_S = 5.0
_KEEP_IDLE_S = 2.0
"""Below the 5 s after which vLLM closes an idle connection: a request must not meet a closing one."""
_LONGEST_RETRY_AFTER_S = 60.0


class _Result(msgspec.Struct):
    probs: list[float | None]
    """None is what JSON has for NaN."""


class _Answer(msgspec.Struct):
    data: list[_Result]


class ModelScorer:
    """Scores by a reward model with one output, behind vLLM's ``/classify`` or Plaudit's own.

    Args:
        name: of the scorer in the job.
        places: of its servers; see ``addresses``.
        form: ``chat``: the messages and the response, rendered by the reward model's chat template; ``text``: prompt
            and response as they stand.
        max_concurrent: requests at a time.
    """

    def __init__(self, name: str, places: Sequence[str], *, form: Form = "chat", max_concurrent: int = 256) -> None:
        self.name = name
        self._places = list(places)
        self._form = form
        self._max_concurrent = max_concurrent
        self._replicas = Replicas()
        self._changed = asyncio.Event()
        self._in_work = 0
        self._client: httpx.AsyncClient | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begins to look for servers; they may come later than the worker.

        Raises:
            ConfigurationError: nobody said where servers are.
        """
        if not self._places:
            raise ConfigurationError(
                f"scorer {self.name}: nobody said where its reward model is served. 'plaudit run' and the operator "
                "start the servers; to start this process by hand, set PLAUDIT_MODEL_SERVERS"
            )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_IDLE_S)
        # Calls are timed by the attempt; proxies are for the world outside.
        timeout = httpx.Timeout(None, connect=_CONNECT_WITHIN_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self._watching = asyncio.create_task(self._watch())

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Asks servers until one answers."""
        self._in_work += 1
        try:
            return await self._score(request_body(sample, self._form), attempt)
        finally:
            self._in_work -= 1

    def room(self) -> int:
        """None while no server is healthy: what is not taken keeps its time."""
        return max(0, self._max_concurrent - self._in_work) if self._replicas.any_healthy else 0

    async def close(self) -> None:
        """Ends the watch and the connections."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._client is not None:
            await self._client.aclose()

    async def _score(self, body: bytes, attempt: Attempt) -> Score:
        began_s = time.monotonic()
        while True:
            replica = await self._pick(attempt, began_s)
            response = await self._ask(replica, body, _left_s(attempt, began_s))
            if response is not None:
                return _read(response)

    async def _pick(self, attempt: Attempt, began_s: float) -> Replica:
        """Waits for a server: a full one is a limit (its wait is not the sample's time), one that is away is not."""
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

    async def _ask(self, replica: Replica, body: bytes, within_s: float) -> httpx.Response | None:
        """One request; None when another server must be asked."""
        replica.outstanding += 1
        try:
            response = await self._post(replica, body, within_s)
        finally:
            replica.outstanding -= 1
        now_s = time.monotonic()
        if response.status_code == 429:
            self._replicas.full(replica, now_s, _retry_after_s(response))
            return None
        if response.status_code == 503:
            self._replicas.eject(replica, now_s, _retry_after_s(response))
            return None
        if response.status_code >= 500 or response.status_code == 408:
            self._replicas.failed(replica, now_s)
            raise InfrastructureError(f"{replica.url} answered {_told(response)}")
        self._replicas.answered(replica)
        return response

    async def _post(self, replica: Replica, body: bytes, within_s: float) -> httpx.Response:
        assert self._client is not None
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(within_s):
                return await self._client.post(f"{replica.url}/classify", content=body, headers=headers)
        except TimeoutError as error:
            self._replicas.failed(replica, time.monotonic())
            raise ScoreTimeoutError(f"{replica.url} did not answer within {within_s:.1f} s") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._replicas.eject(replica, time.monotonic())
            raise InfrastructureError(f"{replica.url} cannot be reached: {error}") from error
        except httpx.TransportError as error:
            self._replicas.failed(replica, time.monotonic())
            raise InfrastructureError(f"{replica.url} broke off: {type(error).__name__} {error}") from error

    async def _watch(self) -> None:
        """Finds servers and probes those that are not healthy, for as long as the scorer is open."""
        find_at_s = 0.0
        while True:
            if time.monotonic() >= find_at_s:
                urls, complete = await find(self._places)
                self._replicas.update(urls, complete=complete)
                find_at_s = time.monotonic() + _FIND_EVERY_S
            await asyncio.gather(*(self._probe(replica) for replica in self._replicas.due(time.monotonic())))
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _probe(self, replica: Replica) -> None:
        assert self._client is not None
        try:
            response = await self._client.get(f"{replica.url}/health", timeout=_PROBE_WITHIN_S)
            healthy = response.status_code == 200
        except httpx.TransportError:
            healthy = False
        self._replicas.probed(replica, time.monotonic(), healthy=healthy)
        if healthy:
            logger.info("reward model server is healthy", scorer=self.name, url=replica.url)
            self._changed.set()  # all who wait look again
            self._changed = asyncio.Event()


def request_body(sample: Sample, form: Form) -> bytes:
    """What is sent for a sample: its raw logit is asked for.

    A prompt without messages is one message of the user.
    """
    if form == "text":
        return msgspec.json.encode({"input": sample.prompt + sample.response, "use_activation": False})
    prompt: list[dict[str, Any]] = sample.messages or [{"role": "user", "content": sample.prompt}]
    messages = [*prompt, {"role": "assistant", "content": sample.response}]
    return msgspec.json.encode({"messages": messages, "use_activation": False})


def _read(response: httpx.Response) -> Score:
    if response.status_code != 200:
        raise DataError(f"the reward model's server refused the sample: {_told(response)}")
    try:
        answer = msgspec.json.decode(response.content, type=_Answer)
        (result,) = answer.data
    except (msgspec.DecodeError, ValueError) as error:
        raise InfrastructureError(f"{response.url} answered what is no classification: {error}") from error
    if len(result.probs) != 1:
        raise DataError(
            f"the model has {len(result.probs)} labels; a reward model has one (num_labels: 1). Name another source"
        )
    (logit,) = result.probs
    return Score.scored(math.nan if logit is None else logit)


def _told(response: httpx.Response) -> str:
    """The server's own words: the ``message`` of vLLM's error form, else the body's beginning."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    return f"HTTP {response.status_code}: {message}"


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds of ``Retry-After``; one where it is missing, or is a date, which the servers do not send."""
    told = response.headers.get("Retry-After", "")
    return min(float(told), _LONGEST_RETRY_AFTER_S) if told.isdigit() else 1.0


def _left_s(attempt: Attempt, began_s: float) -> float:
    """What the attempt may still work, waits for limits excluded."""
    return attempt.limit_s - (time.monotonic() - began_s - attempt.waited_s)
