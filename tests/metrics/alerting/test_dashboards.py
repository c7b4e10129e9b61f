"""Every query of the dashboards finds something in a real Prometheus that scraped a real run; so does every series."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from audit_stories import AUDITOR, STORIES, audited_groups
from plaudit_metrics.monitoring.alerts import ALERTS, recording_rules
from plaudit_metrics.monitoring.panels import PAGE, panel_id
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.statistics.audits import Rescored, drift_figures, step_figures
from plaudit_metrics.statistics.integrity import CORRELATION, LONGEST, OTHERS, WINDOW_STEPS
from plaudit_model_server.batcher import ModelServerSeries
from plaudit_operator.cache import Cache
from plaudit_operator.operator import OperatorSeries
from plaudit_operator.runtime.kinds import RLJOB
from plaudit_wire.records import StepRecord

REPOSITORY = Path(__file__).parents[3]
DASHBOARDS = {
    name: json.loads((REPOSITORY / "metrics" / "dashboards" / f"{name}.json").read_text())
    for name in ("job", "fleet", "operator")
}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


QUERIES = [
    pytest.param(target["expr"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in panels(dashboard)
    for target in panel["targets"]
]


@pytest.fixture(scope="session")
def observed_operator(prometheus: Any) -> Iterator[None]:
    """The operator's own series over one job, served and scraped."""
    cache = Cache()
    metadata = {"name": "demo", "namespace": "team", "uid": "0c5c2a5e", "labels": {}}
    conditions = [{"type": "Ready", "status": "True"}, {"type": "Degraded", "status": "False"}]
    roles = [{"name": "trainer", "gpus": 8, "gpuSeconds": 100}]
    cost = {"roles": roles, "exposedRewardGpuSeconds": 10, "countedTime": "2026-01-01T00:00:00Z"}
    status = {"run": "demo-0c5c2", "phase": "Running", "conditions": conditions, "cost": cost}
    cache.replace(RLJOB, [{"metadata": metadata, "spec": {}, "status": status}])
    series = OperatorSeries(cache, lambda: 2, lambda: True, lambda: {"RLJob": 3.0})
    with prometheus.scraping(series.registry):
        series.reconcile_seconds.labels("ok").observe(0.02)
        asked = "rate(plaudit_operator_reconcile_seconds_count[1m]) > 0"
        for _ in range(200):
            if prometheus.query(asked):
                break
            series.reconcile_seconds.labels("ok").observe(0.02)
            time.sleep(0.1)
        yield


@pytest.fixture(scope="session")
def observed_model(prometheus: Any) -> Iterator[None]:
    """The series of a reward model's server that has computed and responded, scraped as the chart does."""
    series = ModelServerSeries()
    series.count_queue(lambda: 3)
    with prometheus.scraping(series.registry, run="modelled", scorer="reward-model"):
        for _ in range(200):
            series.computed([100, 80], 20, [0.01, 0.02], time.perf_counter() - 0.05)
            series.answered(200)
            if prometheus.query("rate(plaudit_model_server_requests_total[1m]) > 0"):
                break
            time.sleep(0.1)
        yield


@pytest.fixture(scope="session")
def observed_audits(prometheus: Any) -> Iterator[None]:
    """The series of a run whose reward is audited, whose judge is watched, and whose responses differ in length."""
    figures = step_figures(audited_groups(STORIES["healthy"], 60), [AUDITOR], {}, 60)
    drift = drift_figures([Rescored("judge", 50, [(0.5, 0.6), (0.4, 0.6)], 0)], 60)
    series = RunSeries()
    lengths = {CORRELATION: 0.1, LONGEST: 0.1, OTHERS: 0.1}
    for number in range(61 - WINDOW_STEPS, 61):
        series.count_step(StepRecord(number, 1, 1.0, 2.0, 8, 1, figures | drift | lengths), records_missing=0)
    with prometheus.scraping(series.registry, run="modelled"):
        for _ in range(200):
            if prometheus.query("plaudit_scorer_drift"):
                break
            time.sleep(0.1)
        yield


@pytest.mark.alike
@pytest.mark.parametrize("expression", QUERIES)
def test_a_query_of_a_dashboard_finds_something(
    observed_run: Any,
    observed_operator: None,
    observed_model: None,
    observed_audits: None,
    prometheus: Any,
    expression: str,
) -> None:
    given = {
        "$run": "observed|demo-0c5c2|modelled",
        "$namespace": ".*",
        "$cluster": ".*",
        "$__rate_interval": "1m",
        "$__range": "1m",
    }
    for variable, value in given.items():
        expression = expression.replace(variable, value)
    for _ in range(100):  # the last figures of a run come with the next scrapes
        series = prometheus.query(f"max_over_time(({expression})[30m:2s])")  # as a panel: all points of the run's life
        if any(not math.isnan(float(found["value"][1])) for found in series):
            return
        time.sleep(0.2)
    pytest.fail(f"nothing was ever found by {expression}")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_can_be_linked_to_and_pointed_at_any_data_source(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == f"plaudit-{name}"
    assert dashboard["title"] == f"Plaudit / {name.title()}"
    assert "datasource" in [variable["name"] for variable in dashboard["templating"]["list"]]
    for panel in panels(dashboard):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_the_annotations_of_a_dashboard_are_queries_that_prometheus_accepts(prometheus: Any) -> None:
    for annotation in DASHBOARDS["job"]["annotations"]["list"]:
        expression = re.sub(r"\$(cluster|namespace|run)", ".*", annotation["expr"]).replace("$__interval", "1m")
        prometheus.query(expression)  # fails if Prometheus refuses it


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_ids_that_follow_from_their_titles(name: str) -> None:
    ids = {panel["title"]: panel["id"] for panel in panels(DASHBOARDS[name])}
    assert len(set(ids.values())) == len(list(panels(DASHBOARDS[name])))
    assert ids == {title: panel_id(title) for title in ids}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_has_a_description(name: str) -> None:
    assert [panel["title"] for panel in panels(DASHBOARDS[name]) if not panel.get("description")] == []


def test_every_panel_of_a_job_links_to_a_view_of_the_runs_page(observed_run: Any) -> None:
    (page,) = [each for each in DASHBOARDS["job"]["templating"]["list"] if each["name"] == "page"]
    assert page["query"] == PAGE
    views = {link["url"].removeprefix("${page:raw}/") for panel in panels(DASHBOARDS["job"]) for link in panel["links"]}
    assert all(panel["links"] for panel in panels(DASHBOARDS["job"]))
    assert views == {"#/", "#/samples?outcome=failed"}
    for outcome, status in (("failed", 200), ("unheard-of", 400)):  # the page's view passes its conditions on
        asked = f"{observed_run.metrics}/api/v1/samples?outcome={outcome}"
        assert httpx.get(asked, timeout=60).status_code == status


def test_a_series_of_the_fleet_links_to_the_dashboard_of_its_run() -> None:
    charts = [panel for panel in panels(DASHBOARDS["fleet"]) if panel["type"] != "stat"]
    by_run = [panel for panel in charts if "{{run}}" in {target["legendFormat"] for target in panel["targets"]}]
    assert {panel["title"] for panel in charts} - {panel["title"] for panel in by_run} == {"GPU-hours by namespace"}
    for panel in by_run:
        (link,) = panel["fieldConfig"]["defaults"]["links"]
        assert link["url"].startswith(f"/d/{DASHBOARDS['job']['uid']}?")
        assert "var-run=${__field.labels.run}" in link["url"]


def test_a_panel_of_the_recent_calls_says_which_they_are() -> None:
    shares = re.compile(r"plaudit_\w*recent_(failed|late|wait)_\w+")
    shown = [panel for panel in panels(DASHBOARDS["job"]) if shares.search(json.dumps(panel["targets"]))]
    assert len(shown) == 4
    assert [each["title"] for each in shown if "of a whole step" not in json.dumps(each)] == []


def test_queries_of_buckets_ask_for_exemplars() -> None:
    targets = [target for panel in panels(DASHBOARDS["job"]) for target in panel["targets"]]
    assert {bool(target.get("exemplar")) == ("_bucket{" in target["expr"]) for target in targets} == {True}


def test_every_alert_of_a_run_leads_to_a_panel_of_the_job() -> None:
    titles = {panel["title"] for panel in panels(DASHBOARDS["job"])}
    assert {alert.panel for alert in ALERTS if alert.where == "run"} <= titles


@pytest.mark.parametrize("title", ["Reward", "Values of the scorers"])
def test_negative_rewards_are_drawn(title: str) -> None:
    (found,) = [panel for panel in panels(DASHBOARDS["job"]) if panel["title"] == title]
    assert "min" not in found["fieldConfig"]["defaults"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_types_round_trip(name: str) -> None:
    assert json.loads(json.dumps(Dashboard.from_json(DASHBOARDS[name]), cls=JSONEncoder)) == DASHBOARDS[name]


def test_the_first_screen_of_a_job_answers_the_four_questions() -> None:
    first = [panel["title"] for panel in panels(DASHBOARDS["job"]) if panel["gridPos"]["y"] < 20]
    for answer in ("Bottleneck", "Scorers", "Age of the oldest unread entry", "Failed scores"):
        assert any(answer in title for title in first)


def test_a_real_run_holds_every_series(observed_run: Any, prometheus: Any) -> None:
    names = prometheus.query('group by (__name__) (last_over_time({run="observed", __name__=~"plaudit_.*"}[30m]))')
    scraped = {re.sub("_(bucket|sum|count|total)$", "", found["metric"]["__name__"]) for found in names}
    # No scorer of this run audits or is watched, and its responses have one length: tests/metrics/test_series.py and
    # tests/metrics/test_step_integrity.py show these gauges.
    without = ("plaudit_audit_", "plaudit_scorer_drift", "plaudit_length_", "plaudit_last_step_length_")
    without += ("plaudit_last_step_masked_longest_", "plaudit_last_step_masked_others_")
    expected = {name for name in documented() if not name.startswith(without)}
    assert scraped == {name.removesuffix("_total") for name in expected}


def test_the_documented_series_are_the_declared_ones_with_their_types_and_labels() -> None:
    assert {name.removesuffix("_total"): series for name, series in documented().items()} == declared(
        RunSeries().registry
    )


OF_A_SCRAPE = {"run", "cluster", "namespace", "instance", "pod", "container", "endpoint", "le", "__name__"}


def test_alerts_and_dashboards_query_declared_series_by_labels_that_these_have() -> None:
    models = declared(ModelServerSeries().registry)
    series = declared(RunSeries().registry, OperatorSeries(Cache(), int, bool, dict).registry)
    series |= {
        name: (kind, (*labels, "scorer")) for name, (kind, labels) in models.items()
    }  # by the chart's PodMonitor
    endings = {"gauge": ("",), "counter": ("_total",), "summary": ("_sum", "_count")}
    endings["histogram"] = ("_sum", "_count", "_bucket")
    labels = {f"{name}{ending}": of for name, (kind, of) in series.items() for ending in endings[kind]}
    seen: set[str] = set()
    for query in queries():
        names = set(re.findall(r"(?<![\w:])plaudit_\w+", re.sub(r'__name__=~"[^"]+"', "", query)))
        for pattern in re.findall(r'__name__=~"([^"]+)"', query):
            names |= {name for name in labels if re.fullmatch(pattern, name)}
        assert names <= labels.keys(), query
        grouped = re.findall(r"\b(?:by|without|on|ignoring) ?\(([\w, ]+)\)", query)
        used = {label for listed in grouped for label in re.findall(r"\w+", listed)}
        used |= set(re.findall(r'(\w+) *(?:=|!=|=~|!~) *"', query))
        if names:  # else of recorded series alone
            assert used - OF_A_SCRAPE <= {label for name in names for label in labels[name]}, query
        seen |= names
    assert len(seen) > 80


def queries() -> Iterator[str]:
    """Every expression of alerts, rules and dashboards, with those of annotations and variables."""
    yield from (alert.full_expression for alert in ALERTS)
    yield from (rule["expr"] for rule in recording_rules()["groups"][0]["rules"] if "plaudit_" in rule["expr"])
    yield from (text for dashboard in DASHBOARDS.values() for text in texts(dashboard) if "plaudit_" in text)


def texts(part: Any) -> Iterator[str]:
    """Every text in JSON."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from texts(each)


def declared(*registries: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of the series of registries, by name."""
    found = {}
    for collector in (collector for registry in registries for collector in registry._collector_to_names):
        for family in getattr(collector, "describe", collector.collect)():
            labels = getattr(family, "_labelnames", None) or getattr(collector, "_labelnames", ())
            found[family.name] = family.type, tuple(labels)
    return found


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of the series of the table in docs/metrics.md, by name; one type may stand for a whole row."""
    section = (REPOSITORY / "docs" / "metrics.md").read_text().partition("\n## Prometheus\n")[2].partition("\n## ")[0]
    found = {}
    for cells in (line.split("|") for line in section.splitlines() if line.startswith("| `")):
        series = re.findall(r"`(\w+)(?:{([\w,]+)})?`", cells[1])
        types = cells[2].strip().split(", ")
        for (name, labels), kind in zip(series, types * (len(series) if len(types) == 1 else 1), strict=True):
            found[f"plaudit_{name}"] = kind, tuple(re.findall(r"\w+", labels))
    return found
