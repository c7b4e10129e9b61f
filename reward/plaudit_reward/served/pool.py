"""Send requests to the servers of one scorer's model: to the least busy healthy one, and to others while it is full.

The response decides. 429 means a full queue: the request goes to another server, or to the same one after its
``Retry-After``. 503 means a server that is shutting down: it gets no requests until it is healthy. 401 and 403 mean a
wrong token. A lost connection or a 5xx is an ``InfrastructureError``, which the pipeline retries. Everything else is
the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError, UnreachableError
from plaudit_reward.http.response import Response, error_message, retry_after_s
from plaudit_reward.scorer import Attempt
from plaudit_reward.served.addresses import TOKEN_VARIABLE, find
from plaudit_reward.served.gate import CallGate
from plaudit_reward.served.replicas import Replica, Replicas
from plaudit_wire.errors import CallTimeoutError, ConfigurationError, InfrastructureError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_FIND_EVERY_S = 2.0
_WATCH_EVERY_S = 0.1
_PROBE_WITHIN_S = 2.0
_SPARE_CONNECTIONS = 16
"""For probes, so that they never wait for samples."""
_WRONG_TOKEN = frozenset({401, 403})
_LONGEST_RETRY_AFTER_S = 60.0


_Send = Callable[[str, float], Awaitable[Response]]
"""Sends a request to a server (its URL, seconds until the whole response has arrived)."""


class ServerResponseError(InfrastructureError):
    """A server responded that it failed, or refuses every request; the message has URL, status and the server's own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerPool:
    """Send requests to the servers of one scorer's model.

    Args:
        places: of its servers; see ``addresses``.
        token: bearer token of the servers; empty: none.
        gate: holds requests while the servers' GPUs are in other use; None: they never are.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[str],
        *,
        max_concurrent: int = 256,
        token: str = "",
        gate: CallGate | None = None,
    ) -> None:
        self.name = name
        self._gate = gate or CallGate()
        self._places = list(places)
        self._max_concurrent = max_concurrent
        self._replicas = Replicas()
        self._changed = asyncio.Event()
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
                f"scorer {self.name}: the address of its model is missing. 'plaudit run' and the operator "
                "start the servers; to start this process by hand, set PLAUDIT_MODEL_SERVERS"
            )
        # The servers belong to the job, so no proxy lies between.
        self._http = HttpClient(
            max_connections=self._max_concurrent + _SPARE_CONNECTIONS,
            bearer_token=self._token,
            key_field=TOKEN_VARIABLE,
        )
        self._watching = asyncio.create_task(self._watch())

    @property
    def any_healthy(self) -> bool:
        """Return True where a request could be sent, now or after a pause."""
        return self._gate.is_open and self._replicas.any_healthy

    async def post(
        self,
        path: str,
        body: bytes,
        attempt: Attempt,
        *,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> tuple[str, Response]:
        """Send JSON to one server after another until one takes it.

        Args:
            attempt: its limit; waits for full servers are added to ``waited_s``.
            on_sent: called when the body has been handed to a connection, for each server that was asked.

        Returns:
            The URL of the server, and its response: 200, or a 4xx that is about this request.

        Raises:
            InfrastructureError: a server failed or refused the token, or none is healthy within the limit.
            CallTimeoutError: no response within the limit.
        """
        http = self._opened()
        return await self._send(
            lambda url, limit_s: http.post(f"{url}{path}", body, limit_s, headers=headers, on_sent=on_sent), attempt
        )

    async def get(self, path: str, attempt: Attempt) -> tuple[str, Response]:
        """Read from one server; returns and raises as ``post`` does."""
        http = self._opened()
        return await self._send(lambda url, limit_s: http.get(f"{url}{path}", limit_s), attempt)

    def explained(self, response: Response) -> str:
        """Return a response's status and message, without the token."""
        return f"{response.status}: {error_message(response.body, self._token)}"

    async def close(self) -> None:
        """Stop the probes and close the connections."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._http is not None:
            await self._http.close()

    def _opened(self) -> HttpClient:
        assert self._http is not None
        return self._http

    async def _send(self, send: _Send, attempt: Attempt) -> tuple[str, Response]:
        began_s = time.monotonic()
        while True:
            replica = await self._pick(attempt, began_s)
            with self._gate.call():
                response = await self._ask(replica, send, _left_s(attempt, began_s))
            if response is not None:
                return replica.url, response

    async def _pick(self, attempt: Attempt, began_s: float) -> Replica:
        """Wait for a server: for one that sleeps or is full as limiter wait, else within the sample's time."""
        while True:
            attempt.waited_s += await self._gate.passed()
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
                raise InfrastructureError(
                    f"none of {len(self._replicas)} servers of the model of scorer {self.name} is healthy"
                )
            await self._wait(left_s)

    async def _wait(self, at_most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, at_most_s)):
                await self._changed.wait()

    async def _ask(self, replica: Replica, send: _Send, limit_s: float) -> Response | None:
        """Send one request; return None when another server must be asked."""
        replica.outstanding += 1
        try:
            response = await self._asked(replica, send, limit_s)
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
            raise ServerResponseError(f"{replica.url} responded {self.explained(response)}", response.status)
        self._replicas.answered(replica)
        if response.status in _WRONG_TOKEN:
            raise ServerResponseError(
                f"{replica.url} responded {self.explained(response)} (set {TOKEN_VARIABLE} to the server's token)",
                response.status,
            )
        if response.status != 200 and response.status < 400:
            message = f"{replica.url} responded {response.status}; the server of a model sends 200"
            raise ServerResponseError(message, response.status)
        return response

    async def _asked(self, replica: Replica, send: _Send, limit_s: float) -> Response:
        try:
            return await send(replica.url, limit_s)
        except UnreachableError:
            self._replicas.eject(replica, time.monotonic())
            raise
        except (CallTimeoutError, NoResponseError):
            self._replicas.failed(replica, time.monotonic())
            raise

    async def _watch(self) -> None:
        """Look up the servers and probe the unhealthy ones until the pool closes."""
        find_at_s = 0.0
        while True:
            if time.monotonic() >= find_at_s:
                urls, complete = await find(self._places)
                self._replicas.update(urls, complete=complete)
                find_at_s = time.monotonic() + _FIND_EVERY_S
            await asyncio.gather(*(self._probe(replica) for replica in self._replicas.due(time.monotonic())))
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _probe(self, replica: Replica) -> None:
        try:
            healthy = (await self._opened().get(f"{replica.url}/health", _PROBE_WITHIN_S)).status == 200
        except (NoResponseError, CallTimeoutError):
            healthy = False
        self._replicas.probed(replica, time.monotonic(), healthy=healthy)
        if healthy:
            logger.info("the server of a model is healthy", scorer=self.name, url=replica.url)
            self._changed.set()  # all waiting samples look again
            self._changed = asyncio.Event()


def _pause_s(response: Response) -> float:
    """Return the seconds of ``Retry-After``, at most a minute; one where the header is missing."""
    asked_s = retry_after_s(response.headers)
    return 1.0 if asked_s is None else min(asked_s, _LONGEST_RETRY_AFTER_S)


def _left_s(attempt: Attempt, began_s: float) -> float:
    """Return the seconds that the attempt has left, waits for limits excluded."""
    return attempt.limit_s - (time.monotonic() - began_s - attempt.waited_s)
