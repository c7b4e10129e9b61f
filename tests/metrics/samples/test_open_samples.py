"""Samples of a step that has not closed are listed from their records, and leave the list when it closes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_metrics.service.api import RunApi
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_metrics.statistics.steps import step_record
from stage_records import build_group, build_sample


@pytest.fixture
def view() -> RunView:
    return RunView(RunSeries(), KeptSteps())


@pytest.fixture
def ask(view: RunView, tmp_path: Path) -> Callable[..., Any]:
    application = RunApi("demo", view, lambda: "", run_folder=tmp_path).application()

    async def asked(**query: object) -> dict[str, Any]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            page = await client.get("/api/v1/samples", params=query)
            assert page.status_code == 200
            return dict(page.json())

    return asked


async def test_a_scored_sample_of_the_open_step_is_listed_until_the_step_closes(view, ask) -> None:
    samples = [build_sample(index=index, generation=1.0, score=2.0, value=0.25 * index) for index in range(3)]
    view.handle(samples, True)
    listed = (await ask())["open"]
    assert [(each["group"], each["index"], each["score"], each["open"]) for each in listed] == [
        ("t-0-1.0", index, 0.25 * index, True) for index in range(3)
    ]
    record, opened = build_group(samples), samples[0].stamps.admitted
    view.handle([record, step_record(1, 1, samples, groups=[record], opened=opened, closed=opened + 6)], True)
    assert (await ask())["open"] == []


async def test_the_conditions_of_the_list_hold_for_open_samples(view, ask) -> None:
    view.handle(
        [
            build_sample(index=0, value=0.25),
            build_sample(index=1, outcome="timeout"),
            build_sample(index=2, value=0.75),
        ],
        True,
    )

    async def indices(**query: object) -> list[int]:
        return [each["index"] for each in (await ask(**query))["open"]]

    assert await indices(outcome="failed") == [1]
    assert await indices(outcome="scored") == [0, 2]
    assert await indices(lowest=0.5) == [2]
    assert await indices(highest=0.5) == [0]
    assert await indices(most=2) == [0, 1]
    assert await indices(group="other") == []
    assert await indices(prompt_id="p1") == []
    assert await indices(first_step=2) == []
    assert await indices(start="1.0") == []


async def test_only_the_newest_open_samples_are_looked_through(view, ask) -> None:
    view.handle([build_sample(group=f"t-{number}-1.0", index=0) for number in range(600)], True)
    assert [each["group"] for each in (await ask(most=2))["open"]] == ["t-599-1.0", "t-598-1.0"]
    assert (await ask(group="t-0-1.0"))["open"] == []
