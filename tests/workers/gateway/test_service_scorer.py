"""``kind: service``: jobs that score by one shared service, over its real gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from plaudit_job.load import parse_job
from plaudit_job.problem import JobError
from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.sample_schema import COLUMNS
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import Sample
from plaudit_workers.cli import main
from plaudit_workers.service.build import BuildContext, build_pipeline

TOKEN = "token-of-one-caller"
SECRET = {"name": "shared", "key": "client"}


def job_with(**service: Any) -> RLJob:
    scorer = {"name": "shared", "kind": "service", "service": service}
    head = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "user"}}
    return parse_job({**head, "spec": {"reward": {"scorers": [scorer]}}})


async def test_two_runs_score_the_same_ids_by_one_service(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_SHARED_CLIENT", TOKEN)
    async with start_service() as service, start_gateway(service) as gateway:
        reward = job_with(url=gateway.url, tokenSecret=SECRET).spec.reward
        pipelines = [await build_pipeline(reward, run, BuildContext(reward, run, run=run)) for run in ("a", "b")]
        responses = ["4", "5", "broken"]
        samples = [Sample("g", i, "d", "2 + 2", text, ground_truth="4") for i, text in enumerate(responses)]
        scored = await asyncio.gather(*(pipeline.score(sample) for pipeline in pipelines for sample in samples))
        assert [scoring.value for scoring in scored] == [1.0, 0.0, None] * 2
        assert {scoring.outcome for scoring in scored[2::3]} == {"data_error"}
        again = Sample("g", 0, "d", "2 + 2", "5", ground_truth="4")  # generated a second time
        assert (await pipelines[0].score(again)).value == 0.0
        for pipeline in pipelines:
            await pipeline.close()


async def test_stored_samples_are_scored_again_by_a_service(
    start_service: Any,
    start_gateway: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_SHARED_CLIENT", TOKEN)
    about = {"split": "train", "data_source": "d", "prompt": "?", "extra_info_json": "{}", "step": 1, "group": "g"}
    rows = [
        {**about, "index": index, "response": text, "ground_truth_json": '"4"', "outcome": "scored", "score": 1.0}
        for index, text in enumerate("45")
    ]
    file = tmp_path / "step-000001-i1.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(COLUMNS)), file)
    async with start_service() as service, start_gateway(service) as gateway:
        scorer = {"name": "shared", "kind": "service", "service": {"url": gateway.url, "tokenSecret": SECRET}}
        head = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "again"}}
        (tmp_path / "again.yaml").write_text(yaml.safe_dump({**head, "spec": {"reward": {"scorers": [scorer]}}}))
        command = ["rescore", str(file), "--job", str(tmp_path / "again.yaml"), "--json"]
        assert await asyncio.to_thread(main, command) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["samples"], summary["mean_before"], summary["mean_after"]) == (2, 1.0, 0.5)


@pytest.mark.long
async def test_a_job_with_many_samples_leaves_another_its_share(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_SHARED_CLIENT", TOKEN)
    room, num_many, num_few = 4, 480, 16
    async with start_service(slots=2) as service, start_gateway(service, room=room) as gateway:
        reward = job_with(url=gateway.url, tokenSecret=SECRET).spec.reward
        many, few = [await build_pipeline(reward, run, BuildContext(reward, run, run=run)) for run in ("many", "few")]
        scoring = [
            asyncio.create_task(many.score(Sample("g", i, "d", "2 + 2", "4", ground_truth="4")))
            for i in range(num_many)
        ]
        await scoring[0]
        num_before = sum(task.done() for task in scoring)
        scored = await asyncio.gather(
            *(few.score(Sample("g", i, "d", "2 + 2", "5", ground_truth="4")) for i in range(num_few))
        )
        num_meanwhile = sum(task.done() for task in scoring) - num_before
        assert {scoring.value for scoring in scored} == {0.0}
        assert {record.value for record in await asyncio.gather(*scoring)} == {1.0}
        assert num_meanwhile <= num_many / 2  # nearly all, if it had to wait for the other job's queue
        for pipeline in (many, few):
            await pipeline.close()


@pytest.mark.parametrize(
    ("token", "route", "remedy"),
    [("not-its-token", "", "service.tokenSecret must hold a token"), (TOKEN, "/v1/score", "without a route")],
)
async def test_a_refusal_of_the_service_names_the_field_to_correct(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch, token: str, route: str, remedy: str
) -> None:
    monkeypatch.setenv("PLAUDIT_SECRET_SHARED_CLIENT", token)
    async with start_service() as service, start_gateway(service) as gateway:
        reward = job_with(url=gateway.url + route, tokenSecret=SECRET).spec.reward.model_copy(update={"retries": 0})
        pipeline = await build_pipeline(reward, "a", BuildContext(reward, "a", run="a"))
        refused = await pipeline.score(Sample("g", 0, "d", "2 + 2", "4", ground_truth="4"))
        await pipeline.close()
    assert refused.outcome == "infra_error"
    assert remedy in (refused.reason or "")
    assert "apiKeySecret" not in (refused.reason or "")


@pytest.mark.parametrize(
    ("service", "message"),
    [
        ({}, "needs exactly one of name and url"),
        ({"name": "a", "url": "http://a"}, "needs exactly one of name and url"),
        ({"url": "http://a"}, "tokenSecret: is missing"),
        ({"url": "http://rewards.example", "tokenSecret": SECRET}, "unencrypted"),
    ],
)
def test_an_unclear_reference_is_refused(service: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job_with(**service)


async def test_a_name_is_refused_where_no_operator_resolves_it() -> None:
    with pytest.raises(RefusedError, match="'math' is a name on Kubernetes only"):
        await build_pipeline(job_with(name="math").spec.reward, "reward-0")
