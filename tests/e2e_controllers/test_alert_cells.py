"""Faults in real runs on the cluster raise their alerts in a real Prometheus, and no others: ``make e2e-alerts``.

All jobs run side by side and share one Prometheus; all faults are injected together, repaired together, and then the
operator is kept from its work, and stopped. Needs ``PLAUDIT_ALERT_CELLS=1``, because it takes half an hour, or the
names of some cells (``redis-dead,hung``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cell_walk
import chart
import pytest
import scoring_job
from alert_cells import CELLS, FAULTY_FROM_THE_START, FILES, Feed, create_files
from alert_history import ALERTS, MONITORING, AlertHistory, wait
from operator_faults import hindered_operator
from real_cluster import Cluster
from scoring_job import Measured, ScoringJob

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PLAUDIT_ALERT_CELLS"), reason="takes half an hour: make e2e-alerts"),
    pytest.mark.timeout(3600),
]

_FIRES_WITHIN_S = 480
_ENDS_WITHIN_S = 300
_SETTLES_S = 20
_FORGOTTEN_AFTER_S = 960  # rules of the operator look back over a quarter of an hour
_OF_HINDERED = {"OperatorStuck", "OperatorErrors"}
_ENDING = {name: cell for name, cell in CELLS.items() if cell.ends}


@dataclass
class Cells:
    """The outcome of all cells.

    Attributes:
        before: alerts that fired before the faults.
        after_s: by cell and alert, the seconds from the fault to the alert.
        ended_s: by cell, the seconds from the repair to the end of its alerts; missing if they did not end.
        hindered_s: by alert that began while the operator was kept from its work, the seconds until then.
        operator_s: by alert that began after the operator was stopped, the seconds until then.
        shown: by cell (empty for the operator) and alert, what the runbook's first command printed while it fired.
    """

    before: set[tuple[str, str]] = field(default_factory=set)
    after_s: dict[str, dict[str, float]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    hindered_s: dict[tuple[str, str], float] = field(default_factory=dict)
    operator_s: dict[tuple[str, str], float] = field(default_factory=dict)
    shown: dict[tuple[str, str], str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def cells(monitored: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    chart.install(monitored, monitoring=MONITORING | {"alerts": ALERTS})
    scoring_job.start_judge(monitored)
    create_files(monitored)
    jobs = {name: ScoringJob(monitored, name, files={"configMap": FILES}, **cell.spec) for name, cell in CELLS.items()}
    for job in jobs.values():
        job.apply()
    with contextlib.ExitStack() as stack:
        for job in jobs.values():
            stack.enter_context(job)
        history = stack.enter_context(AlertHistory(monitored))
        feeds = {
            name: Feed(jobs[name], cell.fed_s, cell.batch) for name, cell in CELLS.items() if cell.fed_s is not None
        }
        for feed in feeds.values():
            stack.callback(feed.end)
        yield _observed(monitored, jobs, feeds, history, tmp_path_factory.mktemp("runbook"))
    chart.install(monitored, monitoring=MONITORING)


def _observed(
    cluster: Cluster, jobs: dict[str, ScoringJob], feeds: dict[str, Feed], history: AlertHistory, folder: Path
) -> Cells:
    """Inject all faults, walk through the runbook, repair the faults, hinder the operator, stop it."""
    found = Cells()
    for name in feeds.keys() - FAULTY_FROM_THE_START:
        feeds[name].start()
    time.sleep(_SETTLES_S)
    wait(_ENDS_WITHIN_S, lambda: not history.firing)  # jobs that start slowly are degraded for longer than HOLD
    found.before = set(history.firing)
    history.clear()
    nodes = [node["metadata"]["name"] for node in cluster.get("nodes")["items"]]
    began: dict[str, float] = {}
    try:
        cluster.kubectl("cordon", *nodes)
        for name, cell in CELLS.items():
            began[name] = time.monotonic()
            cell.fault(jobs[name])
            if name in FAULTY_FROM_THE_START:
                feeds[name].start()
        wait(_FIRES_WITHIN_S, lambda: all(cell.must <= history.of(name).keys() for name, cell in CELLS.items()))
        time.sleep(_SETTLES_S)
        for name, cell in CELLS.items():
            for alert in sorted(cell.must & history.of(name).keys()):
                found.shown[name, alert] = cell_walk.shown(cluster, name, alert, folder)
    finally:
        cluster.kubectl("uncordon", *nodes)
    found.after_s = {name: {alert: at - began[name] for alert, at in history.of(name).items()} for name in CELLS}
    for name in FAULTY_FROM_THE_START & _ENDING.keys():
        feeds[name].end()
    _repair(jobs, history, found)
    _hinder_operator(cluster, history, found)
    _stop_operator(cluster, history, found)
    return found


def _repair(jobs: dict[str, ScoringJob], history: AlertHistory, found: Cells) -> None:
    repaired = time.monotonic()
    for name, cell in _ENDING.items():
        cell.repair(jobs[name])

    def all_ended() -> bool:
        firing = {job for job, _ in history.firing}
        for name in _ENDING.keys() - firing - found.ended_s.keys():
            found.ended_s[name] = time.monotonic() - repaired
        return found.ended_s.keys() == _ENDING.keys()

    wait(_ENDS_WITHIN_S, all_ended)


def _hinder_operator(cluster: Cluster, history: AlertHistory, found: Cells) -> None:
    hindered = {("", alert) for alert in _OF_HINDERED}
    wait(_FORGOTTEN_AFTER_S, lambda: not hindered & history.firing)  # on a cluster kept from the last time
    known = set(history.firing)
    history.clear()
    with hindered_operator(cluster):
        began = time.monotonic()
        wait(_FIRES_WITHIN_S, lambda: history.began.keys() >= hindered)
        time.sleep(_SETTLES_S)
        for alert in _OF_HINDERED:
            found.shown["", alert] = cell_walk.shown_of_operator(cluster, alert)
        found.hindered_s = {alert: at - began for alert, at in history.began.items() if alert not in known}


def _stop_operator(cluster: Cluster, history: AlertHistory, found: Cells) -> None:
    known = set(history.firing)
    history.clear()
    scale = ("--namespace", "plaudit", "scale", "deployment/plaudit-operator")
    stopped = time.monotonic()
    cluster.kubectl(*scale, "--replicas=0")
    try:
        wait(_FIRES_WITHIN_S, lambda: ("", "OperatorDown") in history.began)
        time.sleep(_SETTLES_S)
        found.shown["", "OperatorDown"] = cell_walk.shown_of_operator(cluster, "OperatorDown")
        found.operator_s = {alert: at - stopped for alert, at in history.began.items() if alert not in known}
    finally:
        cluster.kubectl(*scale, "--replicas=2")


def test_no_alert_fires_before_the_faults(cells: Cells) -> None:
    assert cells.before == set()


@pytest.mark.parametrize("name", CELLS)
def test_a_fault_raises_its_alerts_and_no_others(cells: Cells, name: str, measured: Measured) -> None:
    for alert, seconds in sorted(cells.after_s[name].items()):
        measured(f"{name}: {alert} fires after", seconds)
    assert cells.after_s[name].keys() == CELLS[name].must


@pytest.mark.parametrize(("name", "alert"), [(name, alert) for name in CELLS for alert in sorted(CELLS[name].must)])
def test_the_runbooks_first_command_shows_the_cause(cells: Cells, name: str, alert: str) -> None:
    text = cells.shown[name, alert]
    assert cell_walk.gives_the_cause(alert, text), text


@pytest.mark.parametrize("name", _ENDING)
def test_alerts_end_after_the_repair(cells: Cells, name: str, measured: Measured) -> None:
    assert name in cells.ended_s
    measured(f"{name}: no alert fires after the repair, after", cells.ended_s[name])


def test_a_hindered_operator_raises_its_alerts_alone(cells: Cells, measured: Measured) -> None:
    for (_, alert), seconds in cells.hindered_s.items():
        measured(f"operator hindered: {alert} fires after", seconds)
    assert cells.hindered_s.keys() == {("", alert) for alert in _OF_HINDERED}


@pytest.mark.parametrize("alert", [*sorted(_OF_HINDERED), "OperatorDown"])
def test_the_runbooks_first_command_shows_what_is_wrong_with_the_operator(cells: Cells, alert: str) -> None:
    text = cells.shown["", alert]
    assert cell_walk.gives_the_cause(alert, text), text[-2000:]


def test_a_stopped_operator_raises_its_own_alert_alone(cells: Cells, measured: Measured) -> None:
    assert cells.operator_s.keys() == {("", "OperatorDown")}
    measured("operator stopped: OperatorDown fires after", cells.operator_s["", "OperatorDown"])
