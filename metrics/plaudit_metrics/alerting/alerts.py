"""All alerts, and the content of their rule files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_metrics.alerting.alert import Alert
from plaudit_metrics.alerting.operator_alerts import OPERATOR_ALERTS
from plaudit_metrics.alerting.run_alerts import RUN_ALERTS
from plaudit_metrics.alerting.thresholds import THRESHOLDS
from plaudit_metrics.alerting.windows import AS_WRITTEN, Windows

ALERTS: tuple[Alert, ...] = (*RUN_ALERTS, *OPERATOR_ALERTS)


def alert_rules(
    where: str, windows: Windows = AS_WRITTEN, values: Mapping[str, float] | None = THRESHOLDS
) -> dict[str, Any]:
    """Return the content of the alert file for ``run`` or ``operator``; thresholds stay ``<name>`` without values."""
    rules = [alert.rule(windows, values) for alert in ALERTS if alert.where == where]
    return {"groups": [{"name": f"plaudit.{where}", "rules": rules}]}
