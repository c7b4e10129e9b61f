"""The alerts that a Prometheus on the cluster fires: when each began and whether it still fires.

The rules of the tests are the chart's, with values that a user would set to be alerted sooner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import httpx
from real_cluster import Cluster
from scoring_job import PortForward

MONITORING: dict[str, Any] = dict.fromkeys(("monitors", "rules", "grafanaAlerts", "dashboards"), True)
"""Chart values that switch on everything for Prometheus and Grafana."""

HOLD = "30s"
"""Conditions hold for this long, not for one to ten minutes, and alerts outlast them by as much."""
_SOON = dict.fromkeys(("critical", "warning"), HOLD)
ALERTS: dict[str, Any] = {"for": _SOON, "keepFiringFor": _SOON}
"""Chart values of ``monitoring.alerts``; a test may add ``thresholds``."""

_EVERY_S = 1.0
_FIRING = 'ALERTS{alertstate="firing"}'


class AlertHistory(threading.Thread):
    """Reads the firing alerts every second while the context lasts.

    An alert is named by its job and its own name, such as ``("late", "RewardLatencyBurn")``; the job of an alert of the
    operator itself is empty.

    Attributes:
        began: seconds (monotonic) at which each alert was first seen firing since the last ``clear``.
        firing: the alerts that fire now.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._forward = PortForward(cluster, "monitoring", "service/prometheus-operated", 9090)
        self._ended = threading.Event()
        self.began: dict[tuple[str, str], float] = {}
        self.firing: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        self._forward.close()

    def run(self) -> None:
        """Read until the context ends; a read that fails is repeated."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self._forward.port}", timeout=10) as client:
            while not self._ended.wait(_EVERY_S):
                try:
                    response = client.get("/api/v1/query", params={"query": _FIRING})
                except httpx.TransportError:
                    continue
                self._record(response.json()["data"]["result"])

    def _record(self, series: list[dict[str, Any]]) -> None:
        labels = [each["metric"] for each in series]
        self.firing = {(each.get("job_name") or each.get("name", ""), each["alertname"]) for each in labels}
        for alert in self.firing:
            self.began.setdefault(alert, time.monotonic())

    def clear(self) -> None:
        """Forget which alerts have fired; those that still fire are recorded again."""
        self.began = {}

    def of(self, job: str) -> dict[str, float]:
        """Return the alerts of a job since the last ``clear``, with the seconds at which each began."""
        return {name: began for (of_job, name), began in self.began.items() if of_job == job}


def wait(seconds: float, holds: Callable[[], bool]) -> None:
    """Wait until the condition holds or the time is over; the tests report what is missing then."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(1)
