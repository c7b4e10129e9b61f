"""Read ``status.progress`` from a job's metrics service, and the troubles that no pod shows.

The service runs in the job's namespace, in an image that its user chooses: nothing that it sends is trusted. A response
has a limited size and time, is never decompressed or redirected, and is read into the fields below and no others. All
requests run on one event loop of their own, so that no service can hold a thread of the operator.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import aiohttp
import msgspec

from plaudit_operator.children.roles import metrics_address
from plaudit_operator.names import Reason
from plaudit_operator.runtime.threads import BackgroundLoop
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
_REQUEST_WITHIN_S = 3.0
_MOST_BYTES = 2 << 20
_AT_A_TIME = 16
_WAIT_S = 0.25
"""A healthy service responds in milliseconds. A later response is used in the next look."""
_LAST_WITHIN_S = 20.0
"""The last look has no next one: it is repeated until a response comes, which is late where the machine is busy."""
_BUSY_WITHIN_S = 1.0
_FAILED_PAUSE_S = 20.0
"""A service that failed is left alone for this long."""
_MOST_JUDGES = 16
_MOST_CHARACTERS = 64
_MOST_BUSY = 2**31 - 1
_NEARLY_FULL = 0.65
"""Share of Redis's memory. From 70 % on nothing is admitted, so a Redis that is full stays a little below or above."""
JobProgress = dict[str, Any]
_Key = tuple[str, str, bool]
"""Namespace and name of a job, and whether it is the last look at it."""


class _Step(msgspec.Struct):
    step: int | None = None
    verdict: str | None = None
    reward_mean: float | None = msgspec.field(default=None, name="reward/mean")
    exposed_reward_s: float | None = None


class _Steps(msgspec.Struct):
    steps: list[_Step]


class _Stream(msgspec.Struct):
    undelivered: int = 0


class _Look(msgspec.Struct):
    streams: dict[str, _Stream] = {}
    redis_memory_bytes: int = 0
    redis_memory_limit_bytes: int = 0


class _Worker(msgspec.Struct):
    worker: str = ""
    role: str = ""
    busy: int = 0
    circuits_open: list[str] = []


class _Queues(msgspec.Struct):
    looks: list[_Look]
    workers: list[_Worker] = []


class ProgressReader:
    """Read the progress of jobs from their metrics services, on a thread of its own."""

    def __init__(
        self, address_of: Callable[[str, str], str] = metrics_address, last_within_s: float = _LAST_WITHIN_S
    ) -> None:
        self._address_of = address_of
        self._last_within_s = last_within_s
        self._lock = threading.Lock()
        self._pending: dict[_Key, Future[JobProgress]] = {}
        self._failed_at: dict[_Key, float] = {}
        self._last_until: dict[_Key, float] = {}
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self._background = BackgroundLoop("progress")

    def read(self, name: str, namespace: str, *, is_last: bool = False) -> JobProgress | None:
        """Return the job's progress; empty if its service does not respond at once, or responds badly.

        Args:
            is_last: Its trainer has ended, and the service may go next. It is asked anew, however it responded before,
                and again where that fails: None until it has responded, or had 20 s for it.
        """
        key = (namespace, name, is_last)
        with self._lock:
            if is_last:
                self._pending.pop((namespace, name, False), None)  # it may have been asked before the last step closed
            now = time.monotonic()
            if now - self._failed_at.get(key, -math.inf) < _FAILED_PAUSE_S:
                return {}
            until = self._last_until.get(key, -math.inf) if is_last else now + _REQUEST_WITHIN_S
            if until < now - _FAILED_PAUSE_S:  # it is the first look, or the other was of a job that went meanwhile
                until = self._last_until[key] = now + self._last_within_s
            if key not in self._pending:
                fetched = self._fetch(self._address_of(name, namespace), until - now, waits=not is_last)
                self._pending[key] = self._background.submit(fetched)
            pending = self._pending[key]
        wait([pending], _WAIT_S)
        if not pending.done():
            return None if is_last else {}
        error = pending.exception()
        is_over = error is None or not is_last or time.monotonic() >= until
        self._finish(key, failed=error is not None, is_over=is_over)
        if error is not None:
            logger.info("no progress from the metrics service", namespace=namespace, job=name, error=repr(error)[:500])
            return {} if is_over else None
        return pending.result()

    def busy(self, name: str, namespace: str) -> dict[str, int]:
        """Return the samples in flight by rollout worker's name; empty without a good response within 1 s."""
        asked = self._background.submit(self._fetch_queues(self._address_of(name, namespace)))
        wait([asked], _BUSY_WITHIN_S)
        if not asked.done():
            asked.cancel()
            return {}
        if (error := asked.exception()) is not None:
            logger.info("no load of rollouts", namespace=namespace, job=name, error=repr(error)[:500])
            return {}
        rollouts = (worker for worker in asked.result().workers if worker.role == "rollout")
        return {worker.worker: max(0, min(worker.busy, _MOST_BUSY)) for worker in rollouts}

    def close(self) -> None:
        """Cancel the requests in flight and end the thread."""
        self._background.close()

    def _finish(self, key: _Key, *, failed: bool, is_over: bool) -> None:
        with self._lock:
            self._pending.pop(key, None)
            if not is_over:
                return
            self._last_until.pop(key, None)
            self._failed_at.pop(key, None)
            now = time.monotonic()
            if failed:
                recent = {k: at for k, at in self._failed_at.items() if now - at < _FAILED_PAUSE_S}
                self._failed_at = {**recent, key: now}

    async def _fetch(self, base: str, within_s: float, *, waits: bool) -> JobProgress:
        # One that waits has its time from when its turn comes: a thousand jobs may be looked at.
        async with asyncio.timeout(None if waits else within_s), self._slots, _session(within_s) as session:
            steps = msgspec.json.decode(await _get(session, f"{base}/api/v1/steps?newest=1"), type=_Steps)
            queues = msgspec.json.decode(await _get(session, f"{base}/api/v1/queues?newest=1"), type=_Queues)
        return _progress(steps, queues)

    async def _fetch_queues(self, base: str) -> _Queues:
        async with self._slots, _session(_REQUEST_WITHIN_S) as session:
            return msgspec.json.decode(await _get(session, f"{base}/api/v1/queues?newest=1"), type=_Queues)


def _session(within_s: float) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=within_s)
    headers = {"Accept-Encoding": "identity", "Connection": "close"}
    return aiohttp.ClientSession(timeout=timeout, auto_decompress=False, headers=headers)


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    """Return the body of a response; raise ``ValueError`` if it is no success, compressed or too long."""
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200 or response.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError(f"{url}: HTTP {response.status} {response.headers.get('Content-Encoding', '')}")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise ValueError(f"{url}: more than {_MOST_BYTES} bytes")
        return bytes(body)


def _progress(steps: _Steps, queues: _Queues) -> JobProgress:
    look = queues.looks[-1] if queues.looks else _Look()
    judges = {judge for worker in queues.workers for judge in worker.circuits_open}
    progress: JobProgress = {"troubles": troubles(judges, look.redis_memory_bytes, look.redis_memory_limit_bytes)}
    if samples := look.streams.get("samples"):
        progress["backlog"] = samples.undelivered
    return progress | (dict(_of_step(steps.steps[-1])) if steps.steps else {})


def troubles(judges: set[str], memory_bytes: int, memory_limit_bytes: int) -> list[dict[str, str]]:
    """Return reason and message of what needs a person; the same for as long as it lasts.

    ``judges`` are the scorers whose judge at least one reward worker is not calling now; a limit of 0 means none.
    """
    advice = (
        "its judge fails or cannot be reached; reward workers retry it only now and then. Check the judge, its "
        "baseUrl, key and network policy; kubectl plaudit logs JOB reward shows the errors"
    )
    names = (judge[:_MOST_CHARACTERS] for judge in sorted(judges)[:_MOST_JUDGES])
    found = [{"reason": Reason.JUDGE_FAILING, "message": f"scorer {name!r}: {advice}"} for name in names]
    if memory_bytes > _NEARLY_FULL * memory_limit_bytes > 0:
        message = (
            f"Redis is full: its limit is {memory_limit_bytes / 2**20:.0f} MiB, and above 70 % of it no prompt is "
            "admitted. Raise spec.transport.managed.memory in a new job, or keep fewer or shorter samples in flight"
        )
        found.append({"reason": Reason.REDIS_FULL, "message": message})
    return found


def _of_step(step: _Step) -> Iterator[tuple[str, Any]]:
    if step.step is not None and 0 <= step.step < 2**63:
        yield "step", step.step
    if step.verdict is not None:
        yield "verdict", step.verdict[:_MOST_CHARACTERS]
    for name, value in (("rewardMean", step.reward_mean), ("exposedRewardSeconds", step.exposed_reward_s)):
        if value is not None and math.isfinite(value):
            yield name, value
