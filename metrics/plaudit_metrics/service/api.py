"""The HTTP interface: Prometheus, JSON, health. The routes are described by ``openapi.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plaudit_metrics.service import page
from plaudit_metrics.service.answers import (
    RECENT_STEPS,
    sample_details,
    step_detail,
    step_summary,
    step_timeline,
    verdict_detail,
)
from plaudit_metrics.service.guard import BrowserGuard
from plaudit_metrics.service.openapi import MOST_SAMPLES, MOST_STEPS, MOST_TRACED, document
from plaudit_metrics.service.parameters import RefusedQueryError, count, point_in_time, shown, whole_number
from plaudit_metrics.service.stored_samples import StoredSamples
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.kept_steps import ClosedStep
from plaudit_metrics.sources.queue_history import MOST_LOOKS
from plaudit_metrics.sources.run_snapshot import RunSnapshot
from plaudit_metrics.sources.step_samples import EncodedStep
from plaudit_wire.trace_context import traceparent


class RunApi:
    """Respond to requests about one run.

    Args:
        problem: returns why the service is not ready; empty when it is.
        hosts: names by which clients may address it, besides its own (``BrowserGuard``).
        run_folder: holds the stored samples; None: the service has none.
        samples_to_all: serve stored samples to other machines and pods too.
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
                Route("/api/v1/openapi.json", self._openapi),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
            ],
            exception_handlers={RefusedQueryError: _refuse},
            middleware=[Middleware(BrowserGuard, hosts=self._hosts)],
        )

    async def _metrics(self, request: Request) -> Response:
        """Respond in OpenMetrics, which has exemplars, to clients that accept it; else in Prometheus's text."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(self._view.series.registry), headers={"Content-Type": content_type})

    async def _steps(self, request: Request) -> Response:
        steps = self._view.kept.newest(count(request, "newest", MOST_STEPS, MOST_STEPS))
        return _json({"run": self._run, "steps": [step_summary(step) for step in steps]})

    async def _step(self, request: Request) -> Response:
        return _json(step_detail(self._find(request)))

    async def _samples(self, request: Request) -> Response:
        step = self._find(request)
        samples = [
            sample | {"traceparent": traceparent(self._run, sample["group"], sample["index"])}
            for sample in sample_details(step, count(request, "slowest", 20, MOST_SAMPLES))
        ]
        return _json({"run": self._run, "step": step.record.step, "samples": samples})

    async def _trace(self, request: Request) -> Response:
        step = self._find(request)
        most = count(request, "slowest", MOST_TRACED, MOST_TRACED)
        encoded = self._view.kept.samples(step.record.step)
        # A second of work for a large step: in a thread, so that other requests are answered meanwhile.
        timeline = await asyncio.to_thread(_timeline, step, encoded, most)
        name = f"{self._run}-step-{step.record.step}.json"
        return Response(
            timeline,
            media_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    async def _openapi(self, _: Request) -> Response:
        return _json(document(self._run))

    async def _verdict(self, _: Request) -> Response:
        recent = self._view.kept.newest(RECENT_STEPS)
        if not recent:
            raise RefusedQueryError(404, "no step has closed yet")
        return _json({"run": self._run} | verdict_detail([step.record for step in recent]))

    async def _failures(self, _: Request) -> Response:
        counts = self._view.failures
        failures = counts.failures()
        return _json({"run": self._run, "samples": counts.samples, "unscored": counts.unscored, "failures": failures})

    async def _queues(self, request: Request) -> Response:
        looks = self._view.queues.after(point_in_time(request, "after"))
        looks = looks[-count(request, "newest", MOST_LOOKS, MOST_LOOKS) :]
        workers = self._view.snapshot.worker_records
        return _json({"run": self._run, "looks": [_look(seen) for seen in looks], "workers": workers})

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
    return msgspec.json.encode(step_timeline(step, samples, groups, most))


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


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedQueryError)
    return JSONResponse({"error": str(error)}, status_code=error.status)
