"""Where the servers of a scorer are: URLs, a name that stands for many addresses, or a folder that lists them.

- ``http://10.0.0.7:8000``: one server;
- ``http://name:8000``: one server an address that DNS has for the name (a headless Service: its ready pods);
- ``file:///runs/run/servers/name``: one server a file in the folder, which holds its URL (``plaudit run``).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


async def find(places: Sequence[str]) -> tuple[list[str], bool]:
    """Looks the servers up.

    Returns:
        Their URLs, and whether all places could be looked up; what was known before is then the best guess.
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
