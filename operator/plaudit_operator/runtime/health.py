"""``/healthz``, ``/readyz`` and ``/metrics`` of the operator, served beside its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

Check = Callable[[], str]
"""What is wrong, in words; empty when nothing is."""


def serve(port: int, alive: Check, ready: Check, registry: CollectorRegistry) -> ThreadingHTTPServer:
    """Starts to serve on all addresses; ``shutdown`` of the answer ends it.

    Args:
        port: TCP port; 0 = any free one.
        alive: why the process should be started again.
        ready: why it does not work yet.
        registry: what ``/metrics`` shows.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._send(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in ("/healthz", "/readyz"):
                problem = alive() if path == "/healthz" else ready()
                self._send(503 if problem else 200, f"{problem or 'ok'}\n".encode(), "text/plain; charset=utf-8")
            else:
                self._send(404, b"not found\n", "text/plain; charset=utf-8")

        def _send(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Probes are not worth a line."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
