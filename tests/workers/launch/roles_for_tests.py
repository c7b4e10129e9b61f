"""Roles that do what the supervisor must cope with. Started as real processes with this folder on PYTHONPATH."""

import asyncio
import json
import os
import signal
from pathlib import Path

from plaudit_wire.errors import JobFailedError, RefusedError
from plaudit_workers.process import ProcessSettings


def _starts(settings: ProcessSettings, name: str) -> int:
    """Counts the starts of this role in the run's folder."""
    file = settings.run_folder / f"{name}.starts"
    with file.open("a") as lines:
        lines.write("start\n")
    return len(file.read_text().splitlines())


async def lasts(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Runs until it is stopped, and says that it was asked."""
    _starts(settings, "lasts")
    await stop.wait()
    Path(settings.run_folder / "lasts.stopped").touch()
    return 0


async def trains(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Is done after a moment."""
    await asyncio.sleep(0.2)
    return 0


async def dies_twice(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Is killed on its first two starts, done on its third."""
    if _starts(settings, "dies_twice") < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


async def crashes(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Raises whenever it is started."""
    _starts(settings, "crashes")
    raise ValueError("broken on purpose")


async def refuses(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Cannot run as configured."""
    raise RefusedError("spec.example: 'x' is wrong; write 'y'")


async def fails(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Gives the job up."""
    raise JobFailedError("too many failed scores")


async def describes_itself(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Writes what others see of it, and the secret that only one role gets."""
    name = Path("/proc/self/comm").read_text().strip()
    described = {
        "comm": name,
        "leads_session": os.getsid(0) == os.getpid(),
        "variable": os.environ.get("JUDGE_KEY"),
        "in_environ": "JUDGE_KEY" in Path("/proc/self/environ").read_text(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    (settings.run_folder / f"{name}.described").write_text(json.dumps(described))
    return 0
