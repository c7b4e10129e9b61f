"""Obtain the state of a run for ``plaudit top``, from its metrics service or from its folder.

If the folder's log names a service that still responds, the service is used: only it knows the queues.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from plaudit_metrics.service.answers import RECENT_STEPS, REDIS_AWAY, sample_details, step_summary, verdict_detail
from plaudit_metrics.sources.steps import (
    FILE_NAME,
    ClosedStep,
    KeptSteps,
    RunEnding,
    encode_sample,
    read_ending,
    read_steps,
)
from plaudit_wire.errors import described

_WITHIN_S = 5.0
_WHOLE_WITHIN_S = 30.0
"""All requests of an overview: a socket's limit is for each packet, of headers too."""
_MOST_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_SCHEMES = ("http://", "https://")
_STEPS = 20
_SAMPLES = 10


Read = TypeVar("Read")


class UnknownRunError(Exception):
    """The run does not exist, or its service does not respond; the message names what was tried."""


@dataclass(frozen=True)
class RunOverview:
    """Hold the state of a run at one moment; the parts are as the API returns them."""

    run: str
    verdict: Mapping[str, Any] | None = None
    """None until a step has closed."""
    steps: Sequence[Mapping[str, Any]] = ()
    """Oldest first."""
    samples: Sequence[Mapping[str, Any]] = ()
    """The newest step's slowest."""
    streams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Depth by stream; empty without a service."""
    workers: Sequence[Mapping[str, Any]] = ()
    failures: Mapping[str, Any] = field(default_factory=dict)
    """Of the samples that ended since the newest step closed; empty without a service."""
    open: Mapping[str, Any] = field(default_factory=dict)
    """What the open step waits for; empty without a service."""
    service: Mapping[str, Any] = field(default_factory=dict)
    """What a scoring service does; empty for a run that trains."""
    ended: str = ""
    """How the run ended, as a sentence; empty while it goes on."""


def begun(read: Callable[[], Read]) -> Future[Read]:
    """Read something in a thread of its own, which does not keep the process alive."""
    reading: Future[Read] = Future()

    def run() -> None:
        try:
            reading.set_result(read())
        except BaseException as error:  # whoever waits for the result raises it
            reading.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return reading


class OverviewSource(Protocol):
    """Provide overviews."""

    def read(self) -> RunOverview:
        """Return the current overview; raise ``UnknownRunError`` if there is none."""


class MetricsService:
    """Provide overviews from the run's metrics service."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def read(self) -> RunOverview:
        """See ``OverviewSource.read``."""
        try:
            return begun(self._read).result(_WHOLE_WITHIN_S)
        except TimeoutError as error:
            raise UnknownRunError(
                f"the metrics service at {self._url} has not responded within {_WHOLE_WITHIN_S:g} s"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # whatever is served at the URL
            raise UnknownRunError(
                f"what answers at {self._url} is no metrics service of this version ({described(error)}). Give the "
                "address that 'plaudit run' prints"
            ) from error

    def _read(self) -> RunOverview:
        steps = self._get(f"steps?newest={_STEPS}")
        looks = self._get("queues")
        away = looks["open"]["waits_for"] == REDIS_AWAY
        streams = looks["looks"][-1]["streams"] if looks["looks"] and not away else {}
        now = RunOverview(
            steps["run"],
            streams=streams,
            workers=looks["workers"],
            failures=self._get("failures"),
            service=self._get("service") if looks["service"] else {},
            open={} if looks["ended"] else looks["open"],
            ended=_sentence(msgspec.convert(looks["ended"], RunEnding | None)),
        )
        if not steps["steps"]:
            return now
        newest = steps["steps"][-1]["step"]
        samples = self._get(f"steps/{newest}/samples?slowest={_SAMPLES}")["samples"]
        return replace(now, verdict=self._get("verdict"), steps=steps["steps"], samples=samples)

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=_WITHIN_S) as answer:  # noqa: S310 - http(s) alone is let in
                return json.loads(_body(answer))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise UnknownRunError(f"the metrics service at {self._url} does not respond: {error}") from error


def _body(answer: http.client.HTTPResponse) -> bytes:
    """Read a response's body, bounded as a whole: a socket's limit is for each of its parts."""
    until = time.monotonic() + _WITHIN_S
    parts, size = [], 0
    while part := answer.read1(_READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise ValueError(f"its answer has more than {_MOST_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError(f"its answer has not come within {_WITHIN_S:g} s")
    return b"".join(parts)


class RunFolder:
    """Provide overviews from ``runs/<run>``, without a service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> RunOverview:
        """See ``OverviewSource.read``."""
        records = read_steps(self._folder / FILE_NAME)[-_STEPS:]
        run = self._folder.resolve().name
        ended = _sentence(read_ending(self._folder))
        if not records:
            return RunOverview(run, ended=ended)
        newest = self._with_samples(ClosedStep(records[-1]))
        return RunOverview(
            run,
            verdict_detail(records[-RECENT_STEPS:]),
            [step_summary(ClosedStep(record)) for record in records],
            sample_details(newest, _SAMPLES),
            ended=ended,
        )

    def _with_samples(self, step: ClosedStep) -> ClosedStep:
        from plaudit_metrics.sources.samples import read_step_samples

        try:
            stored = read_step_samples(self._folder, step.record.step, step.record.incarnation, slowest=_SAMPLES)
        except (OSError, ValueError):  # not stored (metrics.keepSamples), or being written
            return step
        return KeptSteps().put(step.record, [encode_sample(sample) for sample in stored.samples], stored.groups)


def _sentence(ending: RunEnding | None) -> str:
    """Return how a run ended; empty while it goes on."""
    if ending is None:
        return ""
    return f"{ending.words} ({ending.code}): {ending.message}" if ending.code else ending.words


def source_of(run: str | None, url: str | None, runs_folder: str) -> OverviewSource:
    """Return the source of overviews of ``url``, else of ``run``, an id or a folder; raise ``UnknownRunError``."""
    if url is not None:
        if not url.startswith(_SCHEMES):
            raise UnknownRunError(f"--url is {url!r}; give the address of a metrics service: http://host:port")
        return MetricsService(url)
    if run is None:
        raise UnknownRunError("give a run's id, its folder, or the address of its metrics service (--url)")
    folder = next((path for path in (Path(runs_folder) / run, Path(run)) if path.is_dir()), None)
    if folder is None:
        raise UnknownRunError(f"no run {run!r}: neither {runs_folder}/{run} nor {run} is a folder")
    return _service_of(folder) or RunFolder(folder)


def _service_of(folder: Path) -> MetricsService | None:
    """Return the service that the run's log names, if it responds and serves this run."""
    for log in sorted((folder / "logs").glob("metrics-*.log")):
        addresses = [line.get("address") for line in _json_lines(log) if line.get("message") == "serving"]
        if addresses and isinstance(url := addresses[-1], str) and url.startswith(_SCHEMES):
            service = MetricsService(url)
            try:
                if service.read().run == folder.resolve().name:
                    return service
            except UnknownRunError:
                continue
    return None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            lines.append(content)
    return lines
