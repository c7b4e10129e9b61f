"""Keep the timeline of a run's start: every process stamps what it has done, ``plaudit run --timings`` prints it.

Stamps are lines of ``timeline.jsonl`` in the run's folder. Each has the CPU seconds of its process beside the time, so
that a busy machine does not hide what a start costs. Only the processes of ``plaudit run`` write stamps: elsewhere
``PLAUDIT_TIMELINE`` is not set.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

TIMELINE = "PLAUDIT_TIMELINE"
"""Variable with the file of the stamps."""
FILE = "timeline.jsonl"
STARTED = "started"
"""The operating system made the process; on Ray it then waits for its role."""
FIRST_STEP = "first step"
FIRST_SCORE = "first score"


class Stamp(msgspec.Struct, frozen=True):
    """Hold one moment of one process; written by the process, read by ``plaudit run``."""

    process: str
    """``rollout-0-1c2d3e4f``: new at each start."""
    stage: str
    """What is done: ``imported``, ``ready``."""
    time_s: float
    """Unix time, seconds."""
    cpu_s: float
    """User and system seconds of the process until then."""


def stamp(
    stage: str, process: str = "", *, file: Path | None = None, time_s: float | None = None, cpu_s: float = 0
) -> None:
    """Append a stamp of this process.

    Args:
        process: its name; empty: that of ``PLAUDIT_WORKER``.
        file: where it goes; None: that of ``PLAUDIT_TIMELINE``, without which nothing is written.
        time_s: Unix time, seconds; None: now, with this process's CPU time.
        cpu_s: CPU seconds at ``time_s``.
    """
    file = file or Path(os.environ.get(TIMELINE, ""))
    if not file.name:
        return
    name = process or os.environ.get("PLAUDIT_WORKER", "")
    made = Stamp(name, stage, *((time.time(), time.process_time()) if time_s is None else (time_s, cpu_s)))
    with suppress(OSError), file.open("ab", buffering=0) as stream:  # one write a line: the file has many writers
        stream.write(msgspec.json.encode(made) + b"\n")


@contextmanager
def imports(stage: str) -> Iterator[None]:
    """Import heavy packages without garbage collections, and stamp the stage.

    What an import makes stays: to look for garbage in it is a tenth of the CPU time to import vLLM or transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    stamp(stage)


def started_s(pid: int | str = "self") -> float:
    """Return when the operating system made this process, or another: Unix time, to 0.01 s."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def read_timeline(file: Path) -> list[Stamp]:
    """Read the stamps of a run, oldest first; a torn last line does not count."""
    stamps = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with suppress(msgspec.DecodeError):
            stamps.append(msgspec.json.decode(line, type=Stamp))
    return sorted(stamps, key=lambda each: each.time_s)


def timings(stamps: Sequence[Stamp]) -> Iterator[str]:
    """Return a table of a timeline: seconds since its first stamp, seconds and CPU seconds of each stage.

    A stage lasts from the stamp before it of the same process; the first of a process has no such time.
    """
    yield f"{'at s':>8}{'took s':>8}{'CPU s':>8}  process, stage"
    before: dict[str, Stamp] = {}
    for each in stamps:
        at, last = each.time_s - stamps[0].time_s, before.get(each.process)
        took = f"{each.time_s - last.time_s:8.2f}{each.cpu_s - last.cpu_s:8.2f}" if last else " " * 16
        yield f"{at:8.2f}{took}  {each.process}, {each.stage}"
        before[each.process] = each
