"""Serve the live page at ``/``: plain files of this folder, and the chart library uPlot from its own package.

The content security policy restricts the browser to this service and forbids inline scripts. uPlot is the file that its
authors published; the page names its hash, so no other file would run.
"""

from __future__ import annotations

from importlib.metadata import distribution
from mimetypes import guess_type
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

FOLDER = Path(__file__).parent
FILES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".js", ".css", ".svg"}))
_CARRIER = "youplot"
_LIBRARY = {"uplot.js": "youplot/vendor/uplot.iife.min.js", "uplot.css": "youplot/vendor/uplot.min.css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # no stale files after an update of Plaudit
}


def routes() -> list[BaseRoute]:
    """Return the routes of the page and its files. Its links are relative, so it works behind a proxy's path."""
    return [Route("/", _index), Mount("/page", routes=[Route("/{name}", _file)])]


def library(name: str) -> Path:
    """Return the path of ``uplot.js`` or ``uplot.css``. Its package is located, not imported."""
    return Path(str(distribution(_CARRIER).locate_file(_LIBRARY[name])))


async def _index(_: Request) -> Response:
    return _answer(FOLDER / "index.html")


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name in _LIBRARY:
        return _answer(library(name))
    if name in FILES:
        return _answer(FOLDER / name)
    return Response("no such file\n", status_code=404, media_type="text/plain")


def _answer(path: Path) -> Response:
    """Return a small file, read at once: a client that goes away leaves no file open."""
    return Response(path.read_bytes(), headers=_HEADERS, media_type=guess_type(path.name)[0])
