"""Score samples by somebody else's reward endpoint (``kind: http``, ``kind: service``), in one of ``shapes``.

A sample is one request; two where the endpoint has sessions (NeMo Gym's ``/seed_session`` opens one, its cookies name
it in ``/verify``). It ends with one score or one typed error.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

import msgspec
from multidict import MultiMapping

from plaudit_job.rules.answers import json_path, value_at
from plaudit_reward.endpoint.access import EndpointAccess, EndpointUsage, UsageReport, failure_of
from plaudit_reward.endpoint.budget import Limiter
from plaudit_reward.endpoint.shapes import EndpointShape, MalformedAnswerError, scored
from plaudit_reward.http import MAX_RESPONSE_BYTES, HttpClient, Response, Token, error_message, excerpt, proxy_for
from plaudit_reward.scorer import Attempt, Score
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.plain import plain
from plaudit_wire.records import Sample


@dataclass(frozen=True)
class Remedies:
    """List what to do when an endpoint refuses every request, by the section of the scorer that names it."""

    section: str
    """Of the scorer, for errors about its other fields."""
    key_field: str
    """Names the Secret of the token."""
    by_status: Mapping[int, str]


HTTP = Remedies(
    "http",
    "http.apiKeySecret",
    {
        401: "check http.apiKeySecret",
        403: "check http.apiKeySecret and the key's permissions",
        404: "check http.url: it includes the route",
    },
)
SERVICE = Remedies(
    "service",
    "service.tokenSecret",
    {
        401: "service.tokenSecret must hold a token that the service accepts: a value of the Secret that its gateway "
        "reads, or 'token' in its service.json. If the service was created again, its token has changed",
        403: "something in front of the gateway refuses the request: check service.url and network policies",
        404: "check service.url: it is the address of a gateway, without a route",
    },
)
NO_SESSIONS = frozenset({404, 405})
"""Statuses of a server without the route: it verifies without a session."""


def cookie_header(headers: MultiMapping[str]) -> dict[str, str]:
    """Return the header that sends a response's cookies (any number of ``Set-Cookie``) back; empty without cookies."""
    cookies: dict[str, str] = {}
    for line in headers.getall("Set-Cookie", []):
        try:
            cookies |= {name: morsel.coded_value for name, morsel in SimpleCookie(line).items()}
        except CookieError:
            continue  # a cookie that cannot be sent back
    return {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())} if cookies else {}


class RemoteClient:
    """Send samples to one reward endpoint.

    Args:
        api_key: sent as a bearer token (``Token``); empty: none.
        arguments: further members of each request; an object is merged into the shape's own.
        path: of the score in the answer (``json_path``), in place of the shape's own; empty: the shape's own.
        max_connections: requests at a time; the rest wait, which counts as part of their call.

    Raises as ``HttpClient``, and ``ConfigurationError`` if ``path`` is not a path.
    """

    def __init__(
        self,
        url: str,
        shape: EndpointShape,
        usage: EndpointUsage,
        *,
        api_key: Token = "",
        headers: Mapping[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
        path: str = "",
        max_connections: int = 256,
        remedies: Remedies = HTTP,
    ) -> None:
        self.url = url
        self._shape = shape
        self._usage = usage
        self._headers = dict(headers or {})
        self._arguments = dict(arguments or {})
        self._path = path
        self._remedies = remedies.by_status
        try:
            self._steps = json_path(path) if path else None
        except ValueError as error:
            raise ConfigurationError(f"{remedies.section}.jsonPath {error}") from error
        self._http = HttpClient(
            max_connections=max_connections, bearer_token=api_key, key_field=remedies.key_field, proxy=proxy_for(url)
        )

    async def score(
        self,
        sample: Sample,
        limit_s: float,
        on_sent: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Score:
        """Send one sample and return its score; call ``on_sent`` once the request is written to its connection.

        Raises:
            CallTimeoutError: the whole answer has not arrived within ``limit_s``, the opening of a session included.
            InfrastructureError: the endpoint is unreachable, busy, broken, refuses all requests, or its answer does not
                have the shape.
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
        response = await self._usage.counted(self._http.post(url, msgspec.json.encode(row), limit_s, headers=headers))
        if response.status in NO_SESSIONS:
            return {}
        self._check(url, response)
        return cookie_header(response.headers)

    def _check(self, url: str, response: Response) -> None:
        if response.status != 200:
            message = error_message(response.body, response.token)
            raise failure_of(url, response.status, response.headers, message, self._remedies)

    def _read(self, body: bytes) -> Score:
        """Return the score of an answer, all of which must be plain data: no part of another kind goes any further."""
        try:
            # Python's servers write NaN and Infinity: as the score they are none, as an extra they are left out.
            found = json.loads(body, parse_constant=_no_number, parse_float=_finite)
            answer = plain(found, most_units=MAX_RESPONSE_BYTES)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise MalformedAnswerError(f"{self.url}: the answer is not JSON: {self._excerpt(body)}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.url}: the answer cannot be read: {error}: {self._excerpt(body)}") from error
        try:
            if self._steps is None:
                return self._shape.score(answer)
            return scored(value_at(answer, self._steps))
        except LookupError as error:
            found = f"{self._path} finds nothing: {error.args[0]}"
            raise MalformedAnswerError(f"{self.url}: {found}: {self._excerpt(body)}") from error
        except MalformedAnswerError as error:
            raise MalformedAnswerError(f"{self.url}: {error}: {self._excerpt(body)}") from error

    def _excerpt(self, body: bytes) -> str:
        return excerpt(body, self._http.token)


def _no_number(constant: str) -> None:
    """Read ``NaN`` and the infinities, which are no JSON, as null."""


def _finite(digits: str) -> float | None:
    """Read a number beyond all floats (``1e400``), which Python takes for an infinity, as null."""
    return number if math.isfinite(number := float(digits)) else None


def _merged(body: dict[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``body`` with ``arguments``; objects on both sides are merged, member by member."""
    merged = dict(body)
    for name, value in arguments.items():
        own = merged.get(name)
        merged[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return merged


class RemoteScorer:
    """Score samples by somebody else's endpoint. Starts and stops its parts; arguments as ``JudgeScorer``."""

    def __init__(
        self,
        name: str,
        client: RemoteClient,
        limiter: Limiter,
        report: UsageReport | None = None,
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._access = EndpointAccess(name, client.url, limiter, report)
        self._traceparent = traceparent

    async def open(self) -> None:
        """Start the limiter. The endpoint may come up later: the first sample connects to it."""
        self._access.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._access.circuit_open

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        headers = {"traceparent": self._traceparent(sample)} if self._traceparent else None
        async with self._access.request(0, attempt) as passage:
            return await self._client.score(sample, attempt.limit_s, self._access.on_sent(passage), headers)

    def room(self) -> int:
        """Return how many more samples could begin soon; one, the probe, while the circuit is open."""
        return self._access.room()

    async def close(self) -> None:
        """Stop the limiter and the report, and close the connections."""
        await self._access.stop()
        await self._client.close()
