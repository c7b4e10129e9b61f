"""The Grafana dashboards, built with Grafana's own builders and committed in ``metrics/dashboards``."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from plaudit_metrics.dashboards import fleet, job, operator

DASHBOARDS: dict[str, Dashboard] = {
    "job": job.dashboard(),
    "fleet": fleet.dashboard(),
    "operator": operator.dashboard(),
}
"""File name without ending → dashboard."""
