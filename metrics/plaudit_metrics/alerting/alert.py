"""One alert rule, and its form in a rule file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plaudit_metrics.alerting.thresholds import THRESHOLDS, filled
from plaudit_metrics.alerting.windows import Windows

RUNBOOK = "metrics/runbook.md"

_NOT_RUNNING = "run:plaudit_not_running:last1h"
"""A suspended, queued or ended job waits for nothing. Without an operator there is no such series."""


@dataclass(frozen=True)
class Alert:
    """Hold one alert rule. Texts hold thresholds as ``<name>``."""

    name: str
    severity: Literal["critical", "warning"]
    """``critical``: a person must act now; ``warning``: on the next working day."""
    summary: str
    """One sentence that names the run, with Prometheus's template language."""
    description: str
    """What it means for the run, and where to look first."""
    expression: str
    held: str = "0m"
    """How long the expression must hold before the alert fires."""
    kept: str = "10m"
    """How long it keeps firing after the expression no longer holds."""
    where: Literal["run", "operator"] = "run"
    """The file that holds it. Alerts of a run fire only while its job is running, if an operator reports that."""
    panel: str = ""
    """Title of the panel of ``Plaudit / Job`` that shows its series."""

    @property
    def full_expression(self) -> str:
        """Return the expression with the condition that the job is running, thresholds as ``<name>``."""
        if self.where == "operator":
            return self.expression
        return f"({self.expression})\nunless on (run) {_NOT_RUNNING}"

    def rule(self, windows: Windows, values: Mapping[str, float] | None = THRESHOLDS) -> dict[str, Any]:
        """Return the rule as Prometheus reads it; with ``values`` None thresholds stay ``<name>``."""

        def text(template: str) -> str:
            return template if values is None else filled(template, values)

        kept = {"keep_firing_for": windows.duration(self.kept)} if self.kept != "0m" else {}
        return {
            "alert": self.name,
            "expr": windows.expression(text(self.full_expression)),
            "for": windows.duration(self.held),
            **kept,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": text(self.summary),
                "description": text(self.description),
                "runbook_url": f"{RUNBOOK}#{self.name.lower()}",
            },
        }
