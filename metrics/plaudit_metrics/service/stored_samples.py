"""The routes over stored samples: search them page by page, and read one as its conversation.

The files are read in a thread, one request at a time, so that the service goes on and its memory stays bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plaudit_metrics.service.openapi import CHARACTERS, MOST_LISTED, ORDERS, SAMPLE_OUTCOMES
from plaudit_metrics.service.parameters import (
    RefusedQueryError,
    choice,
    count,
    real_number,
    shown,
    step_number,
    text,
    whole_number,
)
from plaudit_metrics.sources.samples.detail import (
    LISTED_COLUMNS,
    ListedSample,
    SampleDetail,
    detail,
    listed,
    listed_open,
)
from plaudit_metrics.sources.samples.files import FOLDER, UnreadableFileError, surviving_files
from plaudit_metrics.sources.samples.query import SampleOrder, SampleQuery
from plaudit_metrics.sources.samples.sample_file import SampleFile
from plaudit_metrics.sources.samples.search import Place, SampleSearch
from plaudit_metrics.sources.samples.texts import MOST_CHARACTERS
from plaudit_wire.records import SampleRecord, Split

_MOST_OPEN = 500
"""Only so many of the newest samples are looked through: they are read on the event loop."""


class StoredSamples:
    """Serve the stored samples of one run, and list those of the open step.

    Args:
        run_folder: None: the service has none.
        newest_open: returns at most so many samples of steps that have not closed, the newest first.
        to_all: serve clients of other machines and pods too. Otherwise texts go only to this machine, which includes
            ``kubectl port-forward``: metrics are open to a whole cluster, prompts and responses should not be.
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
        self._search = SampleSearch(LISTED_COLUMNS)
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/v1/samples", self._page),
            Route("/api/v1/samples/{step}/{group}/{index}", self._sample),
        ]

    async def _page(self, request: Request) -> Response:
        self._check_client(request)
        query, start = _query(request), _place(request)
        first, last = step_number(request, "first_step"), step_number(request, "last_step")
        most = count(request, "most", 50, MOST_LISTED)
        opened = self._open(query, first, last)[:most] if start is None else []

        def search() -> dict[str, Any]:
            files = self._files()
            chosen = {
                step: path
                for step, path in files.items()
                if (first is None or step >= first) and (last is None or step <= last)
            }
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
        characters = count(request, "characters", CHARACTERS, MOST_CHARACTERS)
        return await self._answer(lambda: self._read(step, group, index, characters))

    def _check_client(self, request: Request) -> None:
        if not self._to_all and not (request.client and ip_address(request.client.host).is_loopback):
            raise RefusedQueryError(403, _FOREIGN)

    async def _answer(self, read: Any) -> Response:
        async with self._one_at_a_time:
            try:
                content = await asyncio.to_thread(read)
            except UnreadableFileError as error:
                raise RefusedQueryError(500, str(error)) from error
        return Response(msgspec.json.encode(content), media_type="application/json")

    def _read(self, step: int | None, group: str, index: int | None, characters: int) -> SampleDetail:
        path = None if step is None else self._files().get(step)
        if path is not None:
            with SampleFile(path) as file:
                for row in map(file.read, file.find(SampleQuery(group=group)).tolist()):
                    if row["index"] == index:
                        return detail(row, characters)
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


_FOREIGN = (
    "The metrics service shows prompts and responses only on its own machine. In a cluster use kubectl plaudit open, "
    "on another machine an SSH tunnel, or set PLAUDIT_METRICS_SAMPLES=all in its environment (spec.metrics.pod.env)"
)


def _query(request: Request) -> SampleQuery:
    order = choice(request, "order", ORDERS) or "stored"
    return SampleQuery(
        outcome=choice(request, "outcome", SAMPLE_OUTCOMES),
        lowest=real_number(request, "lowest"),
        highest=real_number(request, "highest"),
        data_source=text(request, "data_source"),
        split=choice(request, "split", get_args(Split)),
        group=text(request, "group"),
        prompt_id=text(request, "prompt_id"),
        order=next(each for each in get_args(SampleOrder) if each == order),
    )


def _place(request: Request) -> Place | None:
    given = text(request, "start")
    if not given:
        return None
    step, skip = (whole_number(part) for part in given.partition(".")[::2])
    if step is None or skip is None:
        raise RefusedQueryError(400, f"start is {shown(given)!r}; give the next of the page before")
    return Place(step, skip)
