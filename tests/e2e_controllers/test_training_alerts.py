"""Faults of jobs that train on the cluster, in a real Prometheus: a lost trainer, lost rollouts, and a job without any.

The jobs train a real policy on samples of a scripted engine. Needs ``PLAUDIT_ALERT_CELLS``, as ``test_alert_cells``.
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
from alert_history import ALERTS, MONITORING, AlertHistory, wait
from paced_job import PacedJob
from real_cluster import Cluster
from scoring_job import NAMESPACE, Measured

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PLAUDIT_ALERT_CELLS"), reason="takes ten minutes: make e2e-alerts"),
    pytest.mark.timeout(2400),
]

MUST = {
    "no-trainer": {"NoTrainer", "RLJobDegraded", "StepStalled"},
    "no-rollout": {"NoReadyRollout", "RLJobDegraded", "StepStalled"},
    "finished": set[str](),
}
"""By job, the alerts that its fault raises; any other is a failure of the test."""
_LOSES = {"no-trainer": "trainer", "no-rollout": "rollout"}
_STEPS = {"no-trainer": 100_000, "no-rollout": 100_000, "finished": 40}
_STEP_S = 3.0
_STALLED_S = 60
_FIRES_WITHIN_S = 300
_ENDS_WITHIN_S = 300
_SILENT_S = 90
_REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(int(token) < 8 for token in solution_str.split()) / 6
"""


@dataclass
class Outcome:
    """What was seen of all jobs.

    Attributes:
        before: alerts that fired before the faults.
        after_s: by job and alert, the seconds from the fault to the alert.
        left: alerts that still fire a while after the repair.
        shown: by job and alert, what the runbook's first command printed while it fired.
    """

    before: set[tuple[str, str]] = field(default_factory=set)
    after_s: dict[str, dict[str, float]] = field(default_factory=dict)
    left: set[tuple[str, str]] = field(default_factory=set)
    shown: dict[tuple[str, str], str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def outcome(monitored: Cluster, shared: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    chart.install(
        monitored, monitoring=MONITORING | {"alerts": ALERTS | {"thresholds": {"stalledSeconds": _STALLED_S}}}
    )
    jobs = {name: PacedJob(shared, name, steps, _REWARD) for name, steps in _STEPS.items()}
    with contextlib.ExitStack() as stack:
        history = stack.enter_context(AlertHistory(monitored))
        for job in jobs.values():
            stack.callback(job.delete)
            job.start(_manifest(job))
        yield _observed(monitored, jobs, history, tmp_path_factory.mktemp("runbook"))
    chart.install(monitored, monitoring=MONITORING)


def _manifest(job: PacedJob) -> dict[str, object]:
    manifest = job.manifest()
    manifest["spec"]["rollout"]["engine"]["arguments"]["latencySeconds"] = {"kind": "constant", "value": _STEP_S}
    return manifest


def _observed(cluster: Cluster, jobs: dict[str, PacedJob], history: AlertHistory, folder: Path) -> Outcome:
    found = Outcome()
    wait(_ENDS_WITHIN_S, lambda: not _of_jobs(history))  # jobs that start slowly have no trainer for longer than HOLD
    found.before = _of_jobs(history)
    history.clear()
    nodes = [node["metadata"]["name"] for node in cluster.get("nodes")["items"]]
    try:
        cluster.kubectl("cordon", *nodes)
        began = time.monotonic()
        for name, role in _LOSES.items():
            labels = f"plaudit.dev/job={name},plaudit.dev/role={role}"
            cluster.kubectl("--namespace", NAMESPACE, "delete", "pods", "-l", labels, "--wait=false")
        wait(_FIRES_WITHIN_S, lambda: all(must <= history.of(name).keys() for name, must in MUST.items()))
        for name, must in MUST.items():
            for alert in sorted(must & history.of(name).keys()):
                found.shown[name, alert] = cell_walk.shown(cluster, name, alert, folder)
        wait(_FIRES_WITHIN_S, lambda: jobs["finished"].phase == "Complete")
        time.sleep(_SILENT_S)
    finally:
        cluster.kubectl("uncordon", *nodes)
    found.after_s = {name: {alert: at - began for alert, at in history.of(name).items()} for name in MUST}
    wait(_ENDS_WITHIN_S, lambda: not _of_jobs(history))
    found.left = _of_jobs(history)
    return found


def _of_jobs(history: AlertHistory) -> set[tuple[str, str]]:
    """Return what fires for these jobs; tests before these leave alerts of the operator, which end later."""
    return {(job, alert) for job, alert in history.firing if job in MUST}


def test_no_alert_fires_before_the_faults(outcome: Outcome) -> None:
    assert outcome.before == set()


@pytest.mark.parametrize("name", MUST)
def test_a_fault_raises_its_alerts_and_no_others(outcome: Outcome, name: str, measured: Measured) -> None:
    for alert, seconds in sorted(outcome.after_s[name].items()):
        measured(f"{name}: {alert} fires after", seconds)
    assert outcome.after_s[name].keys() == MUST[name]


@pytest.mark.parametrize(("name", "alert"), [(name, alert) for name, must in MUST.items() for alert in sorted(must)])
def test_the_runbooks_first_command_shows_the_cause(outcome: Outcome, name: str, alert: str) -> None:
    text = outcome.shown[name, alert]
    assert cell_walk.gives_the_cause(alert, text), text


def test_alerts_end_once_the_pods_are_back(outcome: Outcome) -> None:
    assert outcome.left == set()
