"""What the OpenAPI document promises is what the service answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from builders import make_group
from plaudit_metrics.service.api import RunApi
from plaudit_metrics.service.openapi import document
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.snapshot import QueueHistory, RunSnapshot, StreamDepth
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.records import WaitRecord, WorkerRecord
from plaudit_workers.stored_samples import store_groups
from stage_records import build_group, build_sample

PATHS: dict[str, Any] = document("demo")["paths"]


@pytest.fixture
def client(tmp_path: Path) -> httpx.AsyncClient:
    """The API over one closed step, whose samples are stored."""
    view = RunView(RunSeries(), KeptSteps())
    samples = [build_sample(index=index, generation=1.0, score=2.0 + index) for index in range(3)]
    record = build_group(samples)
    opened = samples[0].stamps.admitted
    waits = [WaitRecord(opened, opened + 5, [record.group])]
    step = step_record(1, 1, samples, groups=[record], waits=waits, opened=opened, closed=opened + 6)
    view.handle([*samples, record, step], True)
    for number in range(3):
        view.observe(
            RunSnapshot(
                time=100.0 + number,
                streams={"samples": StreamDepth(number, 1, 2.5)},
                workers={("reward", "busy"): 2, ("reward", "idle"): 1},
                worker_records=(WorkerRecord("reward-1", "reward", slots=4, busy=number),),
            )
        )
    (tmp_path / "samples").mkdir()
    store_groups(tmp_path / "samples", 1, 1, [make_group(record, samples)], {record.group: record})
    application = RunApi("demo", view, lambda: "", run_folder=tmp_path).application()
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://metrics")


def filled(path: str, step: str = "1") -> str:
    return path.replace("{step}", step).replace("{group}", "t-0-1.0").replace("{index}", "2")


def schema_of(path: str, status: str) -> dict[str, Any]:
    (content,) = PATHS[path]["get"]["responses"][status]["content"].values()
    return {**content["schema"], "components": document("demo")["components"]}


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_is_as_promised(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(filled(path))
    assert answer.status_code == 200
    content = json.loads(answer.content) if "json" in answer.headers["content-type"] else answer.text
    jsonschema.validate(content, schema_of(path, "200"))


@pytest.mark.parametrize("path", [path for path in PATHS if "404" in PATHS[path]["get"]["responses"] and "{" in path])
async def test_an_unknown_step_gets_the_documented_error(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(filled(path, "99"))
    assert answer.status_code == 404
    jsonschema.validate(answer.json(), schema_of(path, "404"))


def _wrong_queries() -> list[tuple[str, str, str]]:
    """Route, parameter and a value out of its bounds."""
    wrong = []
    for path in PATHS:
        for parameter in PATHS[path]["get"]["parameters"]:
            if parameter["in"] == "query":
                schema = parameter["schema"]
                if schema["type"] == "string":
                    values = ["other"] if "enum" in schema else ["x" * (schema["maxLength"] + 1)]
                else:
                    values = ["many", "9" * 5000, "\u00b2"]
                    values += [str(schema["maximum"] + 1)] if "maximum" in schema else ["inf"]
                    values += [str(schema["minimum"] - 1)] if "minimum" in schema else []
                wrong += [(path, parameter["name"], value) for value in values]
    return wrong


@pytest.mark.alike
@pytest.mark.parametrize(("path", "name", "value"), _wrong_queries())
async def test_a_number_out_of_its_bounds_is_refused_as_promised(
    client: httpx.AsyncClient, path: str, name: str, value: str
) -> None:
    answer = await client.get(filled(path), params={name: value})
    assert answer.status_code == 400
    jsonschema.validate(answer.json(), schema_of(path, "400"))


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2", "-1", "1.0", "none"])
async def test_a_step_that_is_no_number_is_not_known(client: httpx.AsyncClient, number: str) -> None:
    for path in ("", "/samples", "/trace"):
        answer = await client.get(f"/api/v1/steps/{number}{path}")
        assert answer.status_code == 404
        assert len(answer.json()["error"]) < 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("[::1]:9464", 200),
        ("10.1.2.3", 200),
        ("localhost:9464", 200),
        ("gsm8k-metrics", 200),
        ("gsm8k-metrics.team.svc:9464", 200),
        ("gsm8k-metrics.team.svc.cluster.local", 200),
        ("evil.example", 421),
        ("evil.example:9464", 421),
        ("127.0.0.1.evil.example", 421),
        ("svc.evil.example", 421),
    ],
)
async def test_a_page_of_another_site_cannot_read_the_service_under_its_own_name(
    client: httpx.AsyncClient, host: str, status: int
) -> None:
    for path in ("/", "/metrics", "/api/v1/steps", "/api/v1/openapi.json"):
        answer = await client.get(path, headers={"Host": host})
        assert answer.status_code == status, path
        assert answer.headers.get_list("X-Content-Type-Options") == ["nosniff"]


@pytest.mark.parametrize("version", ["\u00ff", "1.x", "2;version=1", ""])
async def test_metrics_are_text_for_a_version_that_is_no_number(client: httpx.AsyncClient, version: str) -> None:
    accept = f"application/openmetrics-text;version={version}".encode("latin-1")
    answer = await client.get("/metrics", headers={b"accept": accept})
    assert answer.status_code == 200
    assert "plaudit_" in answer.text


async def test_health_is_answered_whatever_the_name(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz", headers={"Host": "evil.example"})).status_code == 200


@pytest.mark.parametrize("hosts", [("Plaudit.example",), ("*",)])
async def test_an_ingress_may_be_allowed_by_name(hosts: tuple[str, ...]) -> None:
    application = RunApi("demo", RunView(RunSeries(), KeptSteps()), lambda: "", hosts).application()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://plaudit.example") as client:
        assert (await client.get("/api/v1/steps")).status_code == 200


@pytest.mark.parametrize(
    ("address", "to_all", "status"),
    [
        ("127.0.0.1", False, 200),
        ("::1", False, 200),
        ("10.1.2.3", False, 403),
        ("127.0.0.6", False, 403),  # what a mesh delivers
        ("garbage", False, 400),  # of X-Forwarded-For
        ("10.1.2.3", True, 200),
    ],
)
async def test_prompts_and_responses_go_only_to_this_machine_unless_all_may_see_them(
    tmp_path: Path, address: str, to_all: bool, status: int
) -> None:
    view = RunView(RunSeries(), KeptSteps())
    application = RunApi("demo", view, lambda: "", run_folder=tmp_path, samples_to_all=to_all).application()
    transport = httpx.ASGITransport(application, client=(address, 123))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/api/v1/samples")).status_code == status
        assert (await client.get("/api/v1/samples/1/g/0")).status_code == (404 if status == 200 else status)
        assert (await client.get("/api/v1/steps")).status_code == 200


def test_every_route_is_described() -> None:
    application = RunApi("demo", RunView(RunSeries(), KeptSteps()), lambda: "").application()
    routes = {each.path for each in application.routes if isinstance(each, Route)}
    assert routes == set(PATHS)


def test_the_document_has_no_dangling_reference() -> None:
    text = json.dumps(document("demo"))
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(document("demo")["components"]["schemas"])


async def test_a_timeline_can_be_loaded_as_a_file(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/v1/steps/1/trace", params={"slowest": 2})
    assert 'filename="demo-step-1.json"' in answer.headers["content-disposition"]
    scores = [event for event in answer.json()["traceEvents"] if event["name"] == "score"]
    assert sorted(event["args"]["index"] for event in scores) == [1, 2]


async def test_the_queues_of_the_last_hour_are_returned_from_a_given_time_on(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/api/v1/queues", params={"after": 101.0})).json()
    (look,) = answer["looks"]
    assert (look["time"], look["workers"]) == (102.0, {"reward": {"busy": 2, "idle": 1}})
    assert look["streams"]["samples"] == {
        "undelivered": 2,
        "in_flight": 1,
        "oldest_undelivered_s": 2.5,
        "oldest_in_flight_s": 0.0,
    }
    assert [(each["worker"], each["slots"], each["busy"]) for each in answer["workers"]] == [("reward-1", 4, 2)]


def test_the_history_of_queues_is_bounded() -> None:
    history = QueueHistory(limit=3)
    for time in range(10):
        history.add(RunSnapshot(time=float(time)))
    assert [seen.time for seen in history.after(0.0)] == [7.0, 8.0, 9.0]


async def test_the_newest_look_alone_can_be_asked_for(client: httpx.AsyncClient) -> None:
    every = (await client.get("/api/v1/queues")).json()["looks"]
    newest = (await client.get("/api/v1/queues", params={"newest": 1})).json()["looks"]
    assert len(every) > 1
    assert newest == every[-1:]
    assert (await client.get("/api/v1/queues", params={"newest": 0})).status_code == 400
