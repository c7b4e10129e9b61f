"""The HTTP interface: Prometheus, JSON, health. The routes are described by ``openapi.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plaudit_metrics.history import flat_step
from plaudit_metrics.kept_steps import ClosedStep
from plaudit_metrics.openapi import MOST_SAMPLES, MOST_STEPS, MOST_TRACED, document
from plaudit_metrics.records import SampleRecord, StepRecord
from plaudit_metrics.stages import stages_of
from plaudit_metrics.steps import slowest_samples, wall_seconds
from plaudit_metrics.surroundings import Surroundings
from plaudit_metrics.trace import chrome_trace
from plaudit_metrics.verdict import explain, verdict_over
from plaudit_metrics.view import RunView

_RECENT_STEPS = 10


class _RefusedRequestError(Exception):
    """The request cannot be answered: status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The routes over one run.

    Args:
        run: id of the run.
        view: what is known of it.
        problem: why the service is not ready; empty when it is.
    """

    def __init__(self, run: str, view: RunView, problem: Callable[[], str]) -> None:
        self._run = run
        self._view = view
        self._problem = problem

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/api/v1/steps", self._steps),
                Route("/api/v1/steps/{step:int}", self._step),
                Route("/api/v1/steps/{step:int}/samples", self._samples),
                Route("/api/v1/steps/{step:int}/trace", self._trace),
                Route("/api/v1/verdict", self._verdict),
                Route("/api/v1/queues", self._queues),
                Route("/api/v1/openapi.json", self._openapi),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
            ],
            exception_handlers={_RefusedRequestError: _refuse},
        )

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._view.series.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _steps(self, request: Request) -> Response:
        steps = self._view.kept.newest(_count(request, "newest", MOST_STEPS, MOST_STEPS))
        return _json({"run": self._run, "steps": [_summary(step) for step in steps]})

    async def _step(self, request: Request) -> Response:
        step = self._find(request)
        return _json(_summary(step) | {"explanation": explain(step.record.verdict), "waits": step.record.waits})

    async def _samples(self, request: Request) -> Response:
        step = self._find(request)
        count = _count(request, "slowest", 20, MOST_SAMPLES)
        samples = [_sample(sample, step) for sample in step.slowest[:count]]
        return _json({"run": self._run, "step": step.record.step, "samples": samples})

    async def _trace(self, request: Request) -> Response:
        step = self._find(request)
        whole = self._view.kept.samples(step.record.step)
        count = _count(request, "slowest", MOST_TRACED, MOST_TRACED)
        samples = slowest_samples(whole.samples if whole else step.slowest, count)
        drawn = {sample.group for sample in samples}
        groups = [group for group in (whole.groups if whole else step.groups.values()) if group.group in drawn]
        name = f"{self._run}-step-{step.record.step}.json"
        return Response(
            msgspec.json.encode(chrome_trace(step.record, samples, groups)),
            media_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    async def _openapi(self, _: Request) -> Response:
        return _json(document(self._run))

    async def _verdict(self, _: Request) -> Response:
        recent = self._view.kept.newest(_RECENT_STEPS)
        if not recent:
            raise _RefusedRequestError(404, "no step is closed yet")
        newest = recent[-1].record
        return _json(
            {
                "run": self._run,
                "step": newest.step,
                "verdict": newest.verdict,
                "explanation": explain(newest.verdict),
                "seconds": _seconds(newest),
                "recent_verdict": verdict_over(_own_figures(step.record) for step in recent),
                "recent": Counter(step.record.verdict for step in recent),
            }
        )

    async def _queues(self, request: Request) -> Response:
        looks = self._view.queues.after(_point_in_time(request, "after"))
        workers = self._view.surroundings.worker_records
        return _json({"run": self._run, "looks": [_look(seen) for seen in looks], "workers": workers})

    async def _healthz(self, _: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _readyz(self, _: Request) -> Response:
        if problem := self._problem():
            return Response(f"{problem}\n", status_code=503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    def _find(self, request: Request) -> ClosedStep:
        number = request.path_params["step"]
        step = self._view.kept.get(number)
        if step is None:
            raise _RefusedRequestError(404, f"step {number} is not known: not closed yet, rolled back, or too long ago")
        return step


def _summary(step: ClosedStep) -> dict[str, Any]:
    flat = flat_step(step.record)
    del flat["waits"]
    return flat | {"records_missing": step.records_missing}


def _look(seen: Surroundings) -> dict[str, Any]:
    workers: dict[str, dict[str, int]] = {}
    for (role, state), count in seen.workers.items():
        workers.setdefault(role, {})[state] = count
    return {
        "time": seen.time,
        "streams": seen.streams,
        "workers": workers,
        "policy_version": seen.policy_version,
        "policy_version_lag": seen.policy_version_lag,
        "redis_memory_bytes": seen.memory_bytes,
        "redis_memory_limit_bytes": seen.memory_limit_bytes,
    }


def _sample(sample: SampleRecord, step: ClosedStep) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(sample)
    group = step.groups.get(sample.group)
    return record | {"wall_s": wall_seconds(sample), "stages_s": stages_of(sample, group)}


def _seconds(record: StepRecord) -> dict[str, float]:
    """Where the step's time went: the trainer's own part and each cause of waiting."""
    waits = {key: value for key, value in record.statistics.items() if key.startswith("wait/")}
    own_s = record.closed - record.opened - sum(waits.values())
    return {"trainer_s": own_s, **{key.removeprefix("wait/"): value for key, value in sorted(waits.items())}}


def _own_figures(record: StepRecord) -> dict[str, float]:
    return {"step_s": record.closed - record.opened} | record.statistics


def _count(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise _RefusedRequestError(400, f"{name} is {text!r}; give a whole number from 1 to {most}")
    return int(text)


def _point_in_time(request: Request, name: str) -> float:
    text = request.query_params.get(name, "0")
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not 0 <= time < float("inf"):
        raise _RefusedRequestError(400, f"{name} is {text!r}; give seconds since the epoch, at least 0")
    return time


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, _RefusedRequestError)
    return JSONResponse({"error": str(error)}, status_code=error.status)
