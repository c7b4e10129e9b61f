"""Send requests to an environment's server, from the process of a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_workers.agent_processes.messages import EnvironmentServer
from plaudit_workers.agent_processes.sources.in_fork import first_cause, in_fork

_ASK_WITHIN_S = 30.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Routes:
    """Hold the OpenAPI description of a server (FastAPI's ``/openapi.json``)."""

    document: dict[str, Any]

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths."""
        return frozenset(self.document.get("paths", {}))

    def resolved(self, schema: Any) -> Any:
        """Return a schema with its references replaced by what they refer to."""
        if isinstance(schema, list):
            return [self.resolved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            return self.resolved(self.document.get("components", {}).get("schemas", {}).get(name, {}))
        return {key: self.resolved(value) for key, value in schema.items()}


def routes_of(source: EnvironmentServer) -> Routes:
    """Read the routes of a server.

    Raises:
        ConfigurationError: it cannot be reached or does not describe itself.
    """
    return Routes(ask_in_fork(source, lambda session: get_json(session, f"{source.url.rstrip('/')}/openapi.json")))


def ask_in_fork(source: EnvironmentServer, ask: Callable[[aiohttp.ClientSession], Awaitable[Result]]) -> Result:
    """Return what ``ask`` returns; it runs in a fork, since the template must not keep connections.

    Raises:
        ConfigurationError: it raised.
    """

    async def asked() -> Result:
        async with asyncio.timeout(_ASK_WITHIN_S), aiohttp.ClientSession() as session:
            return await ask(session)

    try:
        return in_fork(lambda: asyncio.run(asked()))
    except ConfigurationError as error:
        raise ConfigurationError(f"the environment's server {source.url} cannot be used: {error}") from error


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """Return the JSON at a URL.

    Raises:
        aiohttp.ClientError: it cannot be reached, or responds with an error.
    """
    async with session.get(url, raise_for_status=True) as response:
        return await response.json()


async def retry_until(limit_s: float, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat ``attempt`` with growing pauses while the server is unreachable or full.

    Raises:
        InfrastructureError: it still is after ``limit_s``.
    """
    deadline, pause_s = asyncio.get_running_loop().time() + limit_s, _FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except (InfrastructureError, aiohttp.ClientError, OSError) as error:
            if asyncio.get_running_loop().time() + pause_s > deadline:
                raise InfrastructureError(first_cause(error)) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
