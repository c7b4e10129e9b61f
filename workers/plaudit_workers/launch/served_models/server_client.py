"""Ask a model server whether it is healthy, and make it sleep and wake up. Called by the process that started it."""

from __future__ import annotations

from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError
from plaudit_reward.http.response import error_message
from plaudit_wire.errors import CallTimeoutError

_RESPONSE_WITHIN_S = 5.0
_MOVED_WITHIN_S = 600.0
"""Running requests end first, and 100 GB travel to host memory."""


class ServerDiedError(Exception):
    """The engine's process ended or does not respond; a restart may help."""


class ServerClient:
    """Call one server; the token is for its routes ``/sleep`` and ``/wake_up``."""

    def __init__(self, url: str, sleep_token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {sleep_token}"}
        self._http = HttpClient(max_connections=2)

    async def healthy(self) -> bool:
        """Return True if the server responds that it is."""
        try:
            return (await self._http.get(f"{self._url}/health", _RESPONSE_WITHIN_S)).status == 200
        except (NoResponseError, CallTimeoutError):
            return False

    async def sleep(self) -> None:
        """Free the server's GPU: move its weights to host memory. Raise ``ServerDiedError`` if it does not do it."""
        await self._post("sleep")

    async def wake_up(self) -> None:
        """Take the GPU again. Return once requests are computed; raises as ``sleep`` does."""
        await self._post("wake_up")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _post(self, route: str) -> None:
        try:
            response = await self._http.post(f"{self._url}/{route}", b"", _MOVED_WITHIN_S, headers=self._headers)
        except (NoResponseError, CallTimeoutError) as error:
            raise ServerDiedError(f"/{route}: {error}") from error
        if response.status != 200:
            raise ServerDiedError(
                f"/{route}: the engine responded {response.status} {error_message(response.body, '')}"
            )
