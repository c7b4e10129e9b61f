"""Send one sample to a reward endpoint and read its score: one score or one typed error.

It is one request; two for an endpoint with sessions (``session``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from plaudit_reward.endpoint.failures import failure_of
from plaudit_reward.endpoint.usage import EndpointUsage
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.proxy import proxy_for
from plaudit_reward.http.response import Response, error_message, excerpt
from plaudit_reward.remote.remedies import HTTP, Remedies
from plaudit_reward.remote.session import NO_SESSIONS, cookie_header
from plaudit_reward.remote.shapes.shape import EndpointShape, MalformedAnswerError, scored
from plaudit_reward.score import Score
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.sample import Sample
from plaudit_workers.job.json_path import json_path, value_at


class RemoteClient:
    """Send samples to one reward endpoint.

    Args:
        api_key: sent as a bearer token; empty: none.
        arguments: further members of each request; an object is merged into the shape's own.
        path: of the score in the answer (``json_path``), in place of the shape's own; empty: the shape's own.
        max_connections: requests at a time; the rest wait, which counts as part of their call.

    Raises:
        ConfigurationError: an HTTP header cannot carry ``api_key``, ``path`` is not a path, or the process may not open
            so many connections.
    """

    def __init__(
        self,
        url: str,
        shape: EndpointShape,
        usage: EndpointUsage,
        *,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
        path: str = "",
        max_connections: int = 256,
        remedies: Remedies = HTTP,
    ) -> None:
        self.url = url
        self._shape = shape
        self._usage = usage
        self._api_key = api_key
        self._headers = dict(headers or {})
        self._arguments = dict(arguments or {})
        self._path = path
        self._remedies = remedies.by_status
        try:
            self._steps = json_path(path) if path else None
        except ValueError as error:
            raise ConfigurationError(f"{remedies.section}.jsonPath {error}") from error
        self._http = HttpClient(
            max_connections=max_connections,
            bearer_token=api_key,
            key_field=remedies.key_field,
            proxy=proxy_for(url),
        )

    async def score(
        self,
        sample: Sample,
        limit_s: float,
        on_sent: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Score:
        """Send one sample and return its score.

        Args:
            limit_s: seconds until the whole answer has arrived; opening a session included.
            on_sent: called when the request has been written to its connection.

        Raises:
            CallTimeoutError: no whole answer within ``limit_s``.
            InfrastructureError: the endpoint is unreachable, busy, broken, refuses all requests (see ``failures``), or
                its answer does not have the shape.
            DataError: it refuses this sample, or has no finite number for it.
        """
        began = time.monotonic()
        body = _merged(self._shape.body(sample), self._arguments)
        sent = {**self._headers, **(headers or {})}
        sent |= await self._opened(body, limit_s, sent)
        left_s = max(0.0, limit_s - (time.monotonic() - began))
        request = self._http.post(self.url, msgspec.json.encode(body), left_s, headers=sent, on_sent=on_sent)
        response = await self._usage.counted(request)
        self._check(self.url, response)
        return self._read(response.body)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _opened(self, body: Mapping[str, Any], limit_s: float, headers: Mapping[str, str]) -> dict[str, str]:
        """Open the sample's session; return the header that names it, empty where the endpoint has no sessions."""
        url = self._shape.seed_url(self.url)
        if not url:
            return {}
        row = {name: item for name, item in body.items() if name not in self._shape.unseeded}
        request = self._http.post(url, msgspec.json.encode(row), limit_s, headers=headers)
        response = await self._usage.counted(request)
        if response.status in NO_SESSIONS:
            return {}
        self._check(url, response)
        return cookie_header(response.headers)

    def _check(self, url: str, response: Response) -> None:
        if response.status != 200:
            message = error_message(response.body, self._api_key)
            raise failure_of(url, response.status, response.headers, message, self._remedies)

    def _read(self, body: bytes) -> Score:
        try:
            answer = json.loads(body)  # reads NaN, which Python's servers write: this sample has no score
            if self._steps is None:
                return self._shape.score(answer)
            return scored(value_at(answer, self._steps))
        except (ValueError, RecursionError) as error:
            raise MalformedAnswerError(f"{self.url}: the answer is not JSON: {self._excerpt(body)}") from error
        except LookupError as error:
            found = f"{self._path} finds nothing: {error.args[0]}"
            raise MalformedAnswerError(f"{self.url}: {found}: {self._excerpt(body)}") from error
        except MalformedAnswerError as error:
            raise MalformedAnswerError(f"{self.url}: {error}: {self._excerpt(body)}") from error

    def _excerpt(self, body: bytes) -> str:
        return excerpt(body, self._api_key)


def _merged(body: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``body`` with ``arguments``; objects on both sides are merged, member by member."""
    merged = dict(body)
    for name, value in arguments.items():
        own = merged.get(name)
        merged[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return merged
