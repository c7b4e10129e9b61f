"""Serve a run's metrics: read its events, take snapshots of its streams, respond over HTTP.

Runs as ``python -m plaudit_metrics``, or as a coroutine in another process's event loop (a Ray actor's): it installs no
signal handlers and ends when ``stop`` is set. Exit codes: 0 stopped, 2 refused with one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

from prometheus_client import disable_created_metrics
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from plaudit_metrics.service.api import RunApi
from plaudit_metrics.service.http_server import HttpServer, listening_socket
from plaudit_metrics.service.series.collectors import Naming
from plaudit_metrics.service.series.run import SERVICE, RunInfo, RunSeries
from plaudit_metrics.service.settings import ServiceSettings
from plaudit_metrics.service.traces import MissingPackageError, SpanSender
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.audits import AuditHistory
from plaudit_metrics.sources.snapshot import take_snapshot
from plaudit_metrics.sources.steps import FILE_NAME, KeptSteps, read_steps
from plaudit_metrics.sources.stream import EventReader
from plaudit_metrics.statistics.audits import TREND_STEPS
from plaudit_wire.logs import get_logger
from plaudit_wire.names import Names
from plaudit_wire.redis import OUTAGE, Outages

logger = get_logger(__name__)
_LOOK_EVERY_S = 2.0
_AUDITS_EVERY_S = 5.0
_KEEP_ALIVE_S = 5
_END_WITHIN_S = 2
"""Open connections of scrapers delay the shutdown no longer."""
_REDIS_WITHIN_S = 30.0
"""After as long without a response from Redis the service is not ready."""


class CannotServeError(Exception):
    """The service cannot start: the port is taken, Redis refuses the password. The message names the remedy."""


async def serve(settings: ServiceSettings, stop: asyncio.Event) -> None:
    """Serve one run's metrics until ``stop`` is set; raise ``CannotServeError`` if the service cannot start."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # series with each counter's creation time, which nothing uses
    # One client for everything: a blocking read takes its own connection from the pool; no command is sent twice.
    client = settings.redis.client(timeout_s=5.0, retries=0)
    sender: SpanSender | None = None
    try:
        if settings.traces_endpoint:
            sender = SpanSender(settings.run, settings.traces_endpoint, settings.traces_share, settings.model)
        await _wait_for_redis(client, settings, stop)
        with listening_socket(settings.host, settings.port) as listener:
            await _serve_on(listener, client, settings, stop, sender)
    except (MissingPackageError, RedisError, OSError) as error:
        raise CannotServeError(_message(error, settings)) from error
    finally:
        await client.aclose()
        if sender is not None:
            await asyncio.to_thread(sender.close)


async def _serve_on(
    listener: socket.socket, client: Redis, settings: ServiceSettings, stop: asyncio.Event, sender: SpanSender | None
) -> None:
    series = RunSeries(
        latency_threshold_s=settings.latency_threshold_s,
        latency_target=settings.latency_target,
        info=RunInfo(settings.job, settings.schedule, settings.max_staleness),
        traces=sender.counts if sender else {},
        naming=Naming(settings.run, settings.traces_share if sender and settings.schedule != SERVICE else None),
    )
    view = RunView(series, KeptSteps(), sender.send if sender else None)
    if settings.run_folder is not None:
        view.restore(read_steps(settings.run_folder / FILE_NAME))
    keys = Names(settings.run)
    reader = EventReader(client, keys, view.handle)
    snapshots = _SnapshotTaker(client, keys, view)
    api = RunApi(
        settings.run,
        view,
        lambda: _problem(reader, snapshots),
        settings.allowed_hosts,
        settings.run_folder,
        samples_to_all=settings.samples_to_all,
    )
    server = HttpServer(api.application(), end_within_s=_END_WITHIN_S, keep_alive_s=_KEEP_ALIVE_S)
    address, port = listener.getsockname()[:2]
    logger.info("serving", run=settings.run, address=f"http://{address}:{port}")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        tasks.create_task(reader.run(stop))
        tasks.create_task(snapshots.run(stop))
        if settings.schedule == SERVICE and settings.run_folder is not None:
            tasks.create_task(_show_audits(settings.run_folder, series, stop))
        await stop.wait()
        server.should_exit = True


async def _show_audits(run_folder: Path, series: RunSeries, stop: asyncio.Event) -> None:
    """Show the figures of a service's auditors, which no trainer computes with its steps."""
    history = AuditHistory(run_folder, TREND_STEPS)
    while not stop.is_set():
        try:
            series.show_audits(await asyncio.to_thread(history.figures))
        except OSError as error:
            logger.warning("cannot read the audits; retrying", error=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AUDITS_EVERY_S):
                await stop.wait()


class _SnapshotTaker:
    """Take a snapshot of the run every two seconds."""

    def __init__(self, client: Redis, keys: Names, view: RunView) -> None:
        self._client = client
        self._keys = keys
        self._view = view
        self.responded_s = time.monotonic()
        """When Redis responded last (monotonic)."""

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                self._view.asked()
                await self._client.ping()
                self._view.heard()
                self._view.observe(await take_snapshot(self._client, self._keys))
                self.responded_s = time.monotonic()
            except (RedisError, OSError) as error:
                self._view.series.show_redis_down()
                logger.warning("cannot read the run from Redis; retrying", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await stop.wait()


def _problem(reader: EventReader, snapshots: _SnapshotTaker) -> str:
    """Return why the service is not ready; empty when it is."""
    if not reader.ready.is_set():
        return "the run's events are still being read"
    if time.monotonic() - snapshots.responded_s > _REDIS_WITHIN_S:
        return f"Redis has not responded for {_REDIS_WITHIN_S:.0f} seconds"
    return ""


async def _wait_for_redis(client: Redis, settings: ServiceSettings, stop: asyncio.Event) -> None:
    """Wait for the first answer, however long; a wrong password or certificate ends the wait at once."""
    outages = Outages(settings.redis.url)
    while not stop.is_set():
        try:
            await client.ping()
        except (AuthenticationError, ResponseError):
            raise
        except OUTAGE as error:
            if problem := await settings.redis.tls_problem(error):
                raise CannotServeError(problem) from error
            outages.report(error)
            await asyncio.sleep(0.5)
        else:
            outages.end()
            return


def _message(error: Exception, settings: ServiceSettings) -> str:
    if isinstance(error, MissingPackageError):
        return str(error)
    if isinstance(error, AuthenticationError | ResponseError):
        return f"Redis at {settings.redis.url} refused: {error}. Check PLAUDIT_REDIS_PASSWORD"
    if isinstance(error, RedisError):
        return f"Redis at {settings.redis.url} cannot be reached: {error}. Check PLAUDIT_REDIS_URL"
    return f"cannot listen on {settings.host}:{settings.port}: {error}. Choose another PLAUDIT_METRICS_PORT"
