"""Guard the service against other sites in a user's browser.

A page of another site can point its own name at this service's address (DNS rebinding) and then read it as its own
origin. Its requests carry that name as ``Host``: requests for names that are not this service's are refused. Addresses,
``localhost``, names without a dot and Kubernetes' own names (``….svc``, ``….svc.cluster.local``) cannot be such a name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MISDIRECTED = 421
_PROBES = ("/healthz", "/readyz")
_INTERNAL = (".localhost", ".svc", ".svc.cluster.local")


class BrowserGuard:
    """Refuse requests for foreign names, and add ``nosniff`` to every response.

    Args:
        hosts: further names that lead here, such as an ingress's; ``*`` allows all.
    """

    def __init__(self, application: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._application = application
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        if scope["type"] == "http" and scope["path"] not in _PROBES:
            host = Headers(scope=scope).get("host", "")
            if not own_host(host, self._hosts):
                text = f"Host is {host[:200]!r}; add the name to PLAUDIT_METRICS_ALLOWED_HOSTS if it leads here"
                await JSONResponse({"error": text}, _MISDIRECTED)(scope, receive, send_guarded)
                return
        await self._application(scope, receive, send_guarded)


def own_host(header: str, hosts: Collection[str]) -> bool:
    """Return True where a ``Host`` header (with or without a port) names this service.

    Args:
        header: an empty one (HTTP/1.0) names it.
        hosts: further names, lower case; ``*`` allows all.
    """
    name = _without_port(header.strip().lower()).rstrip(".")
    if "*" in hosts or name in hosts or ("." not in name and ":" not in name) or name.endswith(_INTERNAL):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
