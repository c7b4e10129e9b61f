"""What ``plaudit run`` does for a job that only scores: says where it is, and how to submit to it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from plaudit_workers.client.connect import ServiceError, connect
from plaudit_workers.stream.connection import RedisAddress

ADDRESS_FILE = "service.json"
"""In the run's folder, for ``plaudit submit`` on the same machine; readable by its owner only."""

_ASKED_WITHIN_S = 600.0
_MENDED_AFTER_S = 600.0


def write_address(folder: Path, redis: RedisAddress) -> None:
    """Leaves address and password of the run's Redis in its folder."""
    file = folder / ADDRESS_FILE
    file.touch(mode=0o600)
    file.write_text(json.dumps({"run": folder.name, **asdict(redis)}))


async def tell_when_ready(folder: Path, redis: RedisAddress, console: Console) -> None:
    """Prints address and example once a reward worker has opened all scorers."""
    try:
        transport, service = await connect(redis, run=folder.name, job="", wait_s=_ASKED_WITHIN_S)
    except ServiceError:
        return
    await transport.close()
    console.out(
        f"scoring service {service.job} is ready: {redis.url}, run {folder.name} (Ctrl-C ends it)\n"
        f"  plaudit submit --runs-folder {folder.parent} --run {folder.name} samples.jsonl -o scores.jsonl",
        highlight=False,
    )


def stretches_of_uptime() -> int:
    """What stands for a closed step where there are none: a process that crashes has its restarts again after it."""
    return int(time.monotonic() / _MENDED_AFTER_S)
