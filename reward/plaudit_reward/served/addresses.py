"""Find the servers of a scorer: by URLs, by a name with several addresses, or in a folder that lists them.

- ``http://10.0.0.7:8000``: one server;
- ``http://name:8000``: one server for each address that DNS has for the name (a headless Service: its ready pods);
- ``file:///runs/run/servers/name``: one server for each file in the folder, which contains its URL (``plaudit run``).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

TOKEN_VARIABLE = "PLAUDIT_MODEL_SERVER_TOKEN"  # noqa: S105  # the variable's name
"""Environment variable of servers and clients: the bearer token of every request; unset or empty: none."""


async def find(places: Sequence[str]) -> tuple[list[str], bool]:
    """Look the servers up.

    Returns:
        Their URLs, and True if every place could be looked up. If not, keep the servers known before.
    """
    found = [await _find(place) for place in places]
    return [url for urls in found for url in urls or ()], None not in found


async def _find(place: str) -> list[str] | None:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return await asyncio.to_thread(_listed, Path(url2pathname(parts.path)))
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    hosts = sorted({str(answer[4][0]) for answer in answers})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]


def _listed(folder: Path) -> list[str] | None:
    try:
        return [file.read_text().strip() for file in sorted(folder.glob("*.url"))]
    except OSError:
        return None
