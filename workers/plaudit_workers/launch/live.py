"""Print what happens between two closed steps, and react to Ctrl-C and SIGTERM.

Lines are about processes that are still loading, problems, failed scores and long waits. They come from the run's
metrics service. ``LiveMessages`` decides what is worth a line, and is pure.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from plaudit_reward.http import HttpClient, NoResponseError
from plaudit_wire.errors import CallTimeoutError
from plaudit_wire.printable import printable
from plaudit_wire.records import Failure, WorkerRecord
from plaudit_workers.launch.plan import Role

REPORTED_AFTER_S = 3.0
"""A wait that is shorter is not worth a line."""
_READ_EVERY_S = 0.5
_RESPONSE_WITHIN_S = 5.0
_REPEATED_AFTER_S = 30.0
"""A wait for the same processes is reported again after so long."""
_WITH_HEARTBEAT = ("trainer", "rollout", "reward")
_NUMBER = re.compile(r"\d+")
_Reply = TypeVar("_Reply")


class RunConsole(Console):
    """Print the lines of a run, in which names, data sources and reasons may be text of any origin."""

    def out(self, *objects: Any, **options: Any) -> None:
        """Print as ``Console.out`` without escape sequences but its own."""
        super().out(*(printable(str(each), keep="\n") for each in objects), **options)


class LiveMessages:
    """Choose the lines to print; ``expected`` are processes (``rollout-0``), awaited if their role has heartbeats."""

    def __init__(self, expected: Sequence[tuple[Role, str]]) -> None:
        self._loading = {name for role, name in expected if role in _WITH_HEARTBEAT}
        self._reported: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._reasons: set[tuple[str, str, str]] = set()
        self._problems: dict[str, str] = {}
        self._notices: set[str] = set()
        self._seen = 0.0

    def news(self, snapshot: NewestSnapshot | None, waited_s: float) -> list[str]:
        """Return the lines about processes, from a snapshot, or None without a response.

        One that was seen before says nothing about now: while Redis does not respond, the service returns its last one.
        """
        if snapshot is None or not snapshot.looks or snapshot.looks[-1].time <= self._seen:
            return self.waiting([], waited_s)
        self._seen = snapshot.looks[-1].time
        return (
            self.waiting(snapshot.workers, waited_s) + self.problems(snapshot.workers) + self.notices(snapshot.workers)
        )

    def waiting(self, workers: Sequence[WorkerRecord], waited_s: float) -> list[str]:
        """Return a line that names the processes that are not ready, when there is news of them."""
        self._loading -= {worker.worker.rpartition("-")[0] for worker in workers if worker.ready}
        reported, at_s = self._reported
        news = self._loading != reported or waited_s - at_s >= _REPEATED_AFTER_S
        if not self._loading or not news or waited_s - at_s < REPORTED_AFTER_S:
            return []
        self._reported = (frozenset(self._loading), waited_s)
        return [f"waiting for {', '.join(sorted(self._loading))} to load ({waited_s:.0f} s) …"]

    def problems(self, workers: Sequence[WorkerRecord]) -> list[str]:
        """Return a line for each process that reports a new problem."""
        now = {worker.worker.rpartition("-")[0]: worker.problem for worker in workers if worker.problem}
        news = [f"{name}: {problem}" for name, problem in sorted(now.items()) if self._problems.get(name) != problem]
        self._problems = now
        return [printable(line) for line in news]

    def notices(self, workers: Sequence[WorkerRecord]) -> list[str]:
        """Return each notice once; a trainer that was started anew gives its notices again."""
        news = [notice for worker in workers for notice in worker.notices if notice not in self._notices]
        self._notices.update(news)
        return [printable(notice) for notice in news]

    def failures(self, failures: Sequence[Failure]) -> list[str]:
        """Return a line for each kind of failure that was not seen before: ``mine: 64 × KeyError …``."""
        lines = []
        for failure in failures:
            kind = (failure.scorer, failure.outcome, _NUMBER.sub("#", failure.reason))
            if kind not in self._reasons:
                self._reasons.add(kind)
                lines.append(printable(f"no score from {failure.scorer}: {failure}"))
        return lines


class NewestSnapshot(msgspec.Struct):
    """Hold the service's newest snapshot of the run."""

    looks: list[_Look]
    """The newest look at Redis; empty before the first."""
    workers: list[WorkerRecord]
    """The processes with a fresh heartbeat at that time."""


class _Look(msgspec.Struct):
    time: float


class _Failures(msgspec.Struct):
    failures: list[Failure]


async def print_live(url: str, messages: LiveMessages, console: Console) -> None:
    """Print messages until cancelled."""
    started = time.monotonic()
    async with HttpClient(max_connections=1) as client:
        while True:
            snapshot = await _read(client, f"{url}/api/v1/queues?newest=1", NewestSnapshot)
            counts = await _read(client, f"{url}/api/v1/failures", _Failures)
            lines = messages.news(snapshot, time.monotonic() - started)
            for line in lines + messages.failures(counts.failures if counts else []):
                console.out(line)
            await asyncio.sleep(_READ_EVERY_S)


async def _read(client: HttpClient, url: str, kind: type[_Reply]) -> _Reply | None:
    """Return what the service responds; None while it does not."""
    try:
        response = await client.get(url, _RESPONSE_WITHIN_S)
        return msgspec.json.decode(response.body, type=kind) if response.status == 200 else None
    except (NoResponseError, CallTimeoutError, msgspec.DecodeError):
        return None


@contextmanager
def reported_wait(console: Console, what: str) -> Iterator[None]:
    """Print ``waiting for <what> …`` once the body has taken ``REPORTED_AFTER_S``."""
    timer = threading.Timer(REPORTED_AFTER_S, lambda: console.out(f"waiting for {what} …"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Interrupt:
    """Handle the two signals of a run on its event loop. Make it inside the task that runs the job.

    ``saves`` returns True while a stop means that the trainer writes a checkpoint first.
    """

    def __init__(self, console: Console, saves: Callable[[], bool]) -> None:
        self.stop = asyncio.Event()
        self._console = console
        self._saves = saves
        self._twice = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.listen()

    @property
    def at_once(self) -> bool:
        """Return True when processes are to be killed and not asked: there is nothing to save, or a second Ctrl-C."""
        return self.stop.is_set() and (self._twice or not self._saves())

    def listen(self) -> None:
        """Handle the signals; again after ``ray.init``, whose handler of SIGTERM prints a C++ stack."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self._twice = True
            self._console.out("stopping at once")
            self._task.cancel()
            return
        self.stop.set()
        after = ": the trainer finishes its update and writes a checkpoint (Ctrl-C again stops at once)"
        self._console.out(f"stopping{after if self._saves() else ' …'}")
