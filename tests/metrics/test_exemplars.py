"""Exemplars of latency histograms name the sample behind a bucket, to OpenMetrics' parser and to a real Prometheus."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from plaudit_metrics.service.series.collectors import Naming
from plaudit_metrics.service.series.run import RunSeries
from plaudit_wire.logs import drawn, sample_ids
from plaudit_wire.records import ScorerRecord, StepRecord
from stage_records import build_sample

ADMITTED = 1_000_000.0
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def exemplars(series: RunSeries, name: str, **labels: str) -> dict[str, Exemplar]:
    """Upper bound of a bucket → its exemplar, as a parser of OpenMetrics reads them."""
    families = text_string_to_metric_families(generate_latest(series.registry).decode())
    return {
        found.labels["le"]: found.exemplar
        for family in families
        for found in family.samples
        if found.name == f"{name}_bucket" and found.labels.items() >= labels.items() and found.exemplar
    }


def test_a_bucket_names_its_slowest_sample() -> None:
    series = RunSeries()
    series.count_samples([build_sample(index=index, score=seconds) for index, seconds in enumerate((4.0, 3.0, 0.2))])
    found = exemplars(series, "plaudit_stage_seconds", stage="score")
    assert {bound: each.labels["index"] for bound, each in found.items()} == {"5.0": "0", "0.25": "2"}
    assert found["5.0"].value == pytest.approx(4.0)
    assert float(found["5.0"].timestamp or 0) == pytest.approx(ADMITTED + 4.0)


def test_an_older_sample_does_not_replace_a_newer_one() -> None:
    series = RunSeries()
    for index, admitted in enumerate((100.0, 300.0, 200.0)):
        series.count_samples([build_sample(index=index, score=1.0, admitted=admitted)])
    assert exemplars(series, "plaudit_stage_seconds", stage="score")["1.0"].labels["index"] == "1"


def test_a_scorers_histogram_names_samples_that_it_was_asked_about() -> None:
    judged = {"judge": ScorerRecord("timeout", call_s=20.0, limiter_s=2.0)}
    series = RunSeries()
    series.count_samples([build_sample(index=0), build_sample(index=1, scorers=judged), build_sample(index=2)])
    for name in ("plaudit_score_seconds", "plaudit_limiter_wait_seconds"):
        (found,) = exemplars(series, name).values()
        assert found.labels["index"] == "1"


def test_where_traces_are_sent_only_traced_samples_are_named() -> None:
    run, share = "demo", 0.1
    samples = [build_sample(index=index, score=1.0 + index / 1000) for index in range(100)]
    series = RunSeries(naming=Naming(run, share))
    series.count_samples(samples)
    (found,) = exemplars(series, "plaudit_stage_seconds", stage="score").values()
    slowest = max(index for index in range(100) if drawn(run, samples[0].group, index, share))
    assert slowest < 99
    assert found.labels["index"] == str(slowest)
    assert found.labels["trace_id"] == f"{sample_ids(run, samples[0].group, slowest)[0]:032x}"


def test_a_sample_of_a_validation_has_no_trace_and_is_not_named() -> None:
    series = RunSeries(naming=Naming("demo", 1.0))
    series.count_samples([build_sample(score=1.0, split="validation")])
    assert not exemplars(series, "plaudit_stage_seconds")


def test_the_slowest_sample_of_a_step_is_named_when_the_step_closes() -> None:
    series = RunSeries(naming=Naming("demo", 0.0))
    slow = build_sample(index=7, score=8.0, scorers={"mine": ScorerRecord("scored", 1.0, call_s=8.0)})
    series.count_samples([slow])
    assert not exemplars(series, "plaudit_score_seconds")
    series.count_step(StepRecord(1, 1, ADMITTED, ADMITTED + 60, 1, 1, {}), records_missing=0, slowest=slow)
    for name in ("plaudit_score_seconds", "plaudit_stage_seconds"):
        assert exemplars(series, name)["10.0"].labels["trace_id"] == f"{sample_ids('demo', slow.group, 7)[0]:032x}"
    assert series.registry.get_sample_value("plaudit_stage_seconds_count", {"stage": "score"}) == 1


def test_a_long_group_id_is_left_out_since_prometheus_would_refuse_the_exemplar() -> None:
    series = RunSeries(naming=Naming("demo", 1.0))
    series.count_samples([build_sample("g" * 100, score=1.0)])
    assert exemplars(series, "plaudit_stage_seconds", stage="score")["1.0"].labels.keys() == {"trace_id"}


def test_prometheus_text_is_the_default_and_openmetrics_is_served_on_request(observed_run: Any) -> None:
    for accepted, kind in ((None, "text/plain"), ("text/html", "text/plain"), (OPENMETRICS, "openmetrics-text")):
        headers = {} if accepted is None else {"Accept": accepted}
        response = httpx.get(f"{observed_run.metrics}/metrics", headers=headers, timeout=60.0)
        assert kind in response.headers["Content-Type"]
        assert (kind == "text/plain") == ("# EOF" not in response.text) == (" # {" not in response.text)
    assert list(text_string_to_metric_families(response.text))


def test_prometheus_keeps_exemplars_whose_traces_a_collector_has(observed_run: Any, prometheus: Any) -> None:
    asked = {"query": 'plaudit_stage_seconds_bucket{run="observed"}', "start": "0", "end": str(time.time() + 3600)}
    found = httpx.get(f"{prometheus.address}/api/v1/query_exemplars", params=asked, timeout=60.0).json()["data"]
    labels = [exemplar["labels"] for series in found for exemplar in series["exemplars"]]
    assert labels
    for each in labels:
        trace_id, _ = sample_ids("observed", each["group"], int(each["index"]))
        assert each["trace_id"] == f"{trace_id:032x}"
    for _ in range(100):  # the spans of the last step are sent after it has closed
        sent = {span.trace_id.hex() for span in observed_run.spans}
        if {each["trace_id"] for each in labels} <= sent:
            return
        time.sleep(0.1)
    assert {each["trace_id"] for each in labels} <= sent
