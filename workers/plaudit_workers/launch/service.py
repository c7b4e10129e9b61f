"""Report where a scoring service is and how to submit to it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from plaudit_workers.client.connect import ServiceError, connect
from plaudit_workers.launch.private_files import write_private
from plaudit_workers.stream.connection import RedisAddress

ADDRESS_FILE = "service.json"
"""In the run's folder, for ``plaudit submit`` on the same machine; only its owner can read it."""

_READY_WITHIN_S = 600.0
_STRETCH_S = 600.0


def write_address(folder: Path, redis: RedisAddress) -> None:
    """Write the address and password for clients into the run's folder."""
    write_private(folder / ADDRESS_FILE, json.dumps({"run": folder.name, **asdict(redis)}))


async def print_when_ready(folder: Path, redis: RedisAddress, console: Console) -> None:
    """Print the address and an example once a reward worker has opened all scorers."""
    try:
        transport, service = await connect(redis, run=folder.name, job="", wait_s=_READY_WITHIN_S)
    except ServiceError:
        return
    await transport.close()
    console.out(
        f"scoring service {service.job} is ready: {redis.url}, run {folder.name} (Ctrl-C ends it)\n"
        f"  plaudit submit --runs-folder {folder.parent} --run {folder.name} samples.jsonl -o scores.jsonl",
        highlight=False,
    )


def stretches_of_uptime() -> int:
    """Count periods of 10 minutes. A service closes no steps, so its processes regain their restarts with each."""
    return int(time.monotonic() / _STRETCH_S)
