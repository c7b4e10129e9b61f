"""Respond over HTTP: Prometheus, JSON about steps, queues and stored samples, health. ``openapi.py`` has the routes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

import msgspec
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plaudit_metrics.service import answers, openapi, page
from plaudit_metrics.service.openapi import RefusedQueryError, shown, whole_number
from plaudit_metrics.service.series.run import SERVICE
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.audits import AuditHistory, sample_audits
from plaudit_metrics.sources.sample_schema import FOLDER, surviving_files
from plaudit_metrics.sources.samples import (
    LISTED_COLUMNS,
    ListedSample,
    SampleDetail,
    UnreadableFileError,
    detail,
    listed,
    listed_open,
)
from plaudit_metrics.sources.search import Place, SampleOrder, SampleQuery, SampleSearch, samples_of_group
from plaudit_metrics.sources.snapshot import RunSnapshot
from plaudit_metrics.sources.steps import ClosedStep, EncodedStep, read_ending
from plaudit_metrics.statistics.audits import TREND_STEPS
from plaudit_wire.logs import traceparent
from plaudit_wire.records import SampleRecord, Split

_MISDIRECTED = 421
_PROBES = ("/healthz", "/readyz")
_INTERNAL = (".localhost", ".svc", ".svc.cluster.local")
_MOST_OPEN = 500
"""Only so many of the newest samples are looked through: they are read on the event loop."""
_DISAGREEMENTS = 20
"""Of each auditor; the page shows them with links to their conversations."""
_OWN_MACHINE = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
"""Not all of 127.0.0.0/8: the proxy of a mesh delivers what others send from an address such as 127.0.0.6."""
_FOREIGN = (
    "The metrics service shows prompts and responses only on its own machine. In a cluster use kubectl plaudit open, "
    "on another machine an SSH tunnel, or set PLAUDIT_METRICS_SAMPLES=all in its environment (spec.metrics.pod.env)"
)


class RunApi:
    """Respond to requests about one run: see ``BrowserGuard`` for ``hosts``, ``StoredSamples`` for the last two.

    ``problem`` returns why the service is not ready; empty when it is.
    """

    def __init__(
        self,
        run: str,
        view: RunView,
        problem: Callable[[], str],
        hosts: Collection[str] = (),
        run_folder: Path | None = None,
        *,
        samples_to_all: bool = False,
    ) -> None:
        self._run = run
        self._folder = run_folder
        self._stored = StoredSamples(run, run_folder, view.collector.newest_open, to_all=samples_to_all)
        self._view = view
        self._problem = problem
        self._hosts = hosts

    def application(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                *page.routes(),
                Route("/metrics", self._metrics),
                Route("/api/v1/steps", self._steps),
                Route("/api/v1/steps/{step}", self._step),
                Route("/api/v1/steps/{step}/samples", self._samples),
                Route("/api/v1/steps/{step}/trace", self._trace),
                *self._stored.routes(),
                Route("/api/v1/verdict", self._verdict),
                Route("/api/v1/failures", self._failures),
                Route("/api/v1/queues", self._queues),
                Route("/api/v1/service", self._service),
                Route("/api/v1/openapi.json", self._openapi),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
            ],
            exception_handlers={RefusedQueryError: _refuse},
            middleware=[Middleware(BrowserGuard, hosts=self._hosts)],
        )

    async def _metrics(self, request: Request) -> Response:
        """Respond in OpenMetrics, which has exemplars, to clients that accept it; else in Prometheus's text."""
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except (TypeError, ValueError):  # it compares whatever version the header names with numbers
            encode, content_type = choose_encoder("")
        return Response(encode(self._view.series.registry), headers={"Content-Type": content_type})

    async def _steps(self, request: Request) -> Response:
        steps = self._view.kept.newest(openapi.NEWEST_STEPS.of(request))
        return _json({"run": self._run, "steps": [answers.step_summary(step) for step in steps]})

    async def _step(self, request: Request) -> Response:
        return _json(answers.step_detail(self._find(request)))

    async def _samples(self, request: Request) -> Response:
        step = self._find(request)
        samples = [
            sample | {"traceparent": traceparent(self._run, sample["group"], sample["index"])}
            for sample in answers.sample_details(step, openapi.SLOWEST.of(request))
        ]
        return _json({"run": self._run, "step": step.record.step, "samples": samples})

    async def _trace(self, request: Request) -> Response:
        step = self._find(request)
        most = openapi.TRACED.of(request)
        encoded = self._view.kept.samples(step.record.step)
        # A second of work for a large step: in a thread, so that other requests are answered meanwhile.
        timeline = await asyncio.to_thread(_timeline, step, encoded, most)
        name = f"{self._run}-step-{step.record.step}.json"
        return Response(
            timeline, media_type="application/json", headers={"Content-Disposition": f'attachment; filename="{name}"'}
        )

    async def _openapi(self, _: Request) -> Response:
        return _json(openapi.document(self._run))

    async def _verdict(self, _: Request) -> Response:
        recent = self._view.kept.newest(answers.RECENT_STEPS)
        overlapping = bool(self._view.series.info.max_staleness)
        closed = answers.verdict_detail([step.record for step in recent], together=overlapping)
        return _json({"run": self._run, "open": self._open()} | closed)

    def _open(self) -> dict[str, Any]:
        """Return what the open step waits for."""
        view = self._view
        closed = [step.record for step in view.kept.newest(answers.RECENT_STEPS)]
        ages = answers.Ages(view.age_s, view.unheard_s)
        staleness = view.series.info.max_staleness or 0
        return answers.open_step(view.snapshot, closed, view.series.opened, ages, max_staleness=staleness)

    async def _failures(self, _: Request) -> Response:
        counts = self._view.failures
        failures = counts.failures()
        return _json({"run": self._run, "samples": counts.samples, "unscored": counts.unscored, "failures": failures})

    async def _queues(self, request: Request) -> Response:
        looks = self._view.queues.after(openapi.point_in_time(request, "after"))
        looks = looks[-openapi.LOOKS.of(request) :]
        opened = self._open()
        # While Redis is away nobody knows who lives.
        workers = () if opened["waits_for"] == answers.REDIS_AWAY else self._view.snapshot.worker_records
        ended = await asyncio.to_thread(read_ending, self._folder) if self._folder else None
        content = {"open": opened, "ended": ended, "looks": [_look(seen) for seen in looks], "workers": workers}
        return _json({"run": self._run, "service": self._view.series.info.schedule == SERVICE, **content})

    async def _service(self, _: Request) -> Response:
        view = self._view
        now = view.snapshot.time + view.age_s
        return _json({"run": self._run} | view.service.summary(now) | {"judges": answers.judges(view.snapshot)})

    async def _healthz(self, _: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _readyz(self, _: Request) -> Response:
        if problem := self._problem():
            return Response(f"{problem}\n", status_code=503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    def _find(self, request: Request) -> ClosedStep:
        text = request.path_params["step"]
        number = whole_number(text)
        step = None if number is None else self._view.kept.get(number)
        if step is None:
            raise RefusedQueryError(
                404, f"step {shown(text)} is not available: it has not closed yet, was rolled back, or is too old"
            )
        return step


def _timeline(step: ClosedStep, encoded: EncodedStep | None, most: int) -> bytes:
    samples, groups = (encoded.decode(), encoded.groups) if encoded else (step.slowest, step.groups.values())
    return msgspec.json.encode(answers.step_timeline(step, samples, groups, most))


def _look(seen: RunSnapshot) -> dict[str, Any]:
    workers: dict[str, dict[str, int]] = {}
    for (role, state), number in seen.workers.items():
        workers.setdefault(role, {})[state] = number
    return {
        "time": seen.time,
        "streams": seen.streams,
        "workers": workers,
        "policy_version": seen.policy_version,
        "policy_version_lag": seen.policy_version_lag,
        "redis_memory_bytes": seen.memory_bytes,
        "redis_memory_limit_bytes": seen.memory_limit_bytes,
    }


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedQueryError)
    return JSONResponse({"error": str(error)}, status_code=error.status)


class StoredSamples:
    """Serve the stored samples of one run, page by page and one as its conversation; list those of the open step.

    What auditors say of them has no texts.

    The files are read in a thread, one request at a time, so that the service goes on and its memory stays bounded.
    ``newest_open`` returns at most so many samples of steps that have not closed, the newest first. Unless ``to_all``,
    texts go only to this machine, which includes ``kubectl port-forward``: metrics are open to a whole cluster, prompts
    and responses should not be.
    """

    def __init__(
        self,
        run: str,
        run_folder: Path | None,
        newest_open: Callable[[int], list[SampleRecord]],
        *,
        to_all: bool = False,
    ) -> None:
        self._run = run
        self._to_all = to_all
        self._newest_open = newest_open
        self._folder = run_folder / FOLDER if run_folder else None
        self._audits = AuditHistory(run_folder, TREND_STEPS) if run_folder else None
        self._search = SampleSearch(LISTED_COLUMNS)
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/v1/samples", self._page),
            Route("/api/v1/samples/{step}/{group}/{index}", self._sample),
            Route("/api/v1/audits", self._auditors),
        ]

    async def _page(self, request: Request) -> Response:
        self._check_client(request)
        query, start = _query(request), _place(request)
        first, last = openapi.step_number(request, "first_step"), openapi.step_number(request, "last_step")
        most = openapi.LISTED.of(request)
        opened = self._open(query, first, last)[:most] if start is None else []

        def search() -> dict[str, Any]:
            files = self._files()
            least, greatest = first or 0, math.inf if last is None else last
            chosen = {step: path for step, path in files.items() if least <= step <= greatest}
            page = self._search.page(chosen, query, start, most)
            return {
                "run": self._run,
                "samples": [listed(row) for row in page.rows],
                "open": opened,
                "next": str(page.next) if page.next else None,
                "first_step": min(files, default=None),
                "last_step": max(files, default=None),
                "problem": self._problem(files),
            }

        return await self._answer(search)

    def _open(self, query: SampleQuery, first: int | None, last: int | None) -> list[ListedSample]:
        newest = map(listed_open, self._newest_open(_MOST_OPEN))
        least, most = first or 0, math.inf if last is None else last
        return [sample for sample in newest if least <= sample.step <= most and query.accepts(sample)]

    async def _sample(self, request: Request) -> Response:
        self._check_client(request)
        step, index = whole_number(request.path_params["step"]), whole_number(request.path_params["index"])
        group = request.path_params["group"]
        characters = openapi.CHARACTERS.of(request)
        return await self._answer(lambda: self._read(step, group, index, characters))

    def _check_client(self, request: Request) -> None:
        if self._to_all:
            return
        host = request.client.host if request.client else ""
        if host not in _OWN_MACHINE:
            if not _is_address(host):  # of a proxy on this machine: uvicorn takes the client from X-Forwarded-For
                raise RefusedQueryError(400, f"X-Forwarded-For: {shown(host)} is no address")
            raise RefusedQueryError(403, _FOREIGN)

    async def _answer(self, read: Any) -> Response:
        async with self._one_at_a_time:
            try:
                return _json(await asyncio.to_thread(read))
            except UnreadableFileError as error:
                raise RefusedQueryError(500, str(error)) from error

    async def _auditors(self, _: Request) -> Response:
        return await self._answer(
            lambda: {"run": self._run, "auditors": self._audits.reports(_DISAGREEMENTS) if self._audits else []}
        )

    def _read(self, step: int | None, group: str, index: int | None, characters: int) -> SampleDetail:
        path = None if step is None else self._files().get(step)
        if path is not None:
            for row in samples_of_group(path, group):
                if row["index"] == index:
                    return detail(row, characters, sample_audits(path.parent.parent, path, group, row["index"]))
        raise RefusedQueryError(
            404, f"sample {index} of group {shown(group)} is not stored in step {step}: it was rolled back or deleted"
        )

    def _files(self) -> Mapping[int, Path]:
        return surviving_files(self._folder) if self._folder else {}

    def _problem(self, files: Mapping[int, Path]) -> str:
        """Return why there are no stored samples, with the remedies; empty where there are some."""
        if files:
            return ""
        if self._folder is None or not self._folder.is_dir():
            place = self._folder or "the run's folder"
            return (
                f"The metrics service cannot read {place}. On Kubernetes set spec.storage.claimName to a ReadWriteMany "
                "volume, which trainer and metrics service share; on a Ray cluster use a folder that all nodes share."
            )
        return (
            f"{self._folder} has no samples yet: they are stored when a step closes, unless metrics.keepSamples is "
            "false. On Kubernetes without spec.storage.claimName each pod has its own folder, and they stay invisible."
        )


def _query(request: Request) -> SampleQuery:
    order = openapi.choice(request, "order", openapi.ORDERS) or "stored"
    return SampleQuery(
        outcome=openapi.choice(request, "outcome", openapi.SAMPLE_OUTCOMES),
        lowest=openapi.real_number(request, "lowest"),
        highest=openapi.real_number(request, "highest"),
        data_source=openapi.text(request, "data_source"),
        split=openapi.choice(request, "split", get_args(Split)),
        group=openapi.text(request, "group"),
        prompt_id=openapi.text(request, "prompt_id"),
        order=next(each for each in get_args(SampleOrder) if each == order),
    )


def _place(request: Request) -> Place | None:
    given = openapi.text(request, "start")
    if not given:
        return None
    step, skip = (whole_number(part) for part in given.partition(".")[::2])
    if step is None or skip is None:
        raise RefusedQueryError(400, f"start is {shown(given)!r}; give the next of the page before")
    return Place(step, skip)


class BrowserGuard:
    """Guard the service against other sites in a user's browser, and add ``nosniff`` to every response.

    A page of another site can point its own name at this service's address (DNS rebinding) and then read it as its own
    origin. Its requests carry that name as ``Host``: requests for names that are not this service's are refused.
    Addresses, ``localhost``, names without a dot and Kubernetes' own names (``….svc``, ``….svc.cluster.local``) cannot
    be such a name. ``hosts`` are further names that lead here, such as an ingress's; ``*`` allows all.
    """

    def __init__(self, application: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._application = application
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        if scope["type"] == "http" and scope["path"] not in _PROBES:
            host = Headers(scope=scope).get("host", "")
            if not own_host(host, self._hosts):
                text = f"Host is {host[:200]!r}; add the name to PLAUDIT_METRICS_ALLOWED_HOSTS if it leads here"
                await JSONResponse({"error": text}, _MISDIRECTED)(scope, receive, send_guarded)
                return
        await self._application(scope, receive, send_guarded)


def own_host(header: str, hosts: Collection[str]) -> bool:
    """Return True if a ``Host`` header, with or without a port, names this service or one of ``hosts`` (lower case).

    An empty header (HTTP/1.0) names it, and ``*`` among the hosts allows all.
    """
    name = _without_port(header.strip().lower()).rstrip(".")
    if "*" in hosts or name in hosts or ("." not in name and ":" not in name) or name.endswith(_INTERNAL):
        return True
    return _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
