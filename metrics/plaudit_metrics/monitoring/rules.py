"""The form of one alert rule, the thresholds of all alerts, and their time windows.

Expressions and summaries hold a threshold as ``<name>``: its name in the chart's values
(``monitoring.alerts.thresholds``). ``filled`` replaces it by the value below; the chart by the value of the
installation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from plaudit_wire.records import ADMISSION_MEMORY_SHARE

THRESHOLDS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "burnCritical": 14.4,  # times the rate that uses up a month's error budget in a month: the budget lasts 2 days
        "burnWarning": 6,  # the budget lasts 5 days
        "exposedShare": 0.2,  # of the step; the verdict's threshold for a waiting trainer
        "hangingSeconds": 120,  # a scorer call is hanging from this age on, and ...
        "hangingFactor": 5,  # ... from this many times the job's latency threshold
        "slowFactor": 2,  # a scorer is slow if its p99 is this many times the job's latency threshold
        "stalledSteps": 3,  # times the longest of the newest steps
        "stalledSeconds": 900,  # no step is called stalled earlier
        "firstStepSeconds": 2700,  # the first step is stalled after so long without a sample, and after four times that
        "trainerStarts": 3,  # of a trainer within an hour
        "queueAgeSeconds": 120,  # of the oldest unread sample, and ...
        "queueAgeSteps": 0.1,  # ... as a share of the newest step
        "backlogEntries": 200,  # a smaller backlog may grow
        "failedShare": 0.05,  # of all samples
        "scorerFailedShare": 0.2,  # of one scorer's calls
        "judgeFailedShare": 0.2,  # of the requests to one judge
        "limiterWaitSeconds": 10,  # mean over a judge's newest requests
        "toolFailedShare": 0.2,  # of the calls of one tool
        "toolSlowSeconds": 60,  # p99 of one tool's calls in the newest step
        "sandboxSlowSeconds": 30,  # p99 of starting, or of removing, a machine in the newest step
        "sandboxFailedShare": 0.05,  # of the newest machines of samples
        "sandboxWaitSeconds": 60,  # of the oldest sample that waits for a place for its machine
        "rewardDrop": 1,  # below the best mean of the last day, in standard deviations of the samples of a step
        "rewardSpread": 0.01,  # standard deviation of the rewards of a step; below it nearly all are equal
        "uniformShare": 0.9,  # of the groups: all their samples have the same reward
        "divergenceProbability": 0.01,  # of a reward that rises and an auditor that falls as seen, by chance alone
        "scorerDrift": 0.2,  # of a scorer, in standard deviations of the rewards of a step
        "lengthPaysShare": 0.9,  # of the 20 newest steps: the reward follows length within groups, and ...
        "lengthGrowth": 1.5,  # ... responses have become longer, times their shortest half hour of the last day
        "escapeProbability": 0.001,  # of long responses that lack a score so often, by chance alone
        "truncatedShare": 0.3,  # of the responses that end at the token limit, and ...
        "truncatedFactor": 2,  # ... times the usual share of the last day
        "eventsLostShare": 0.01,  # of the newest step's samples
        "redeliveryPeriods": 3,  # of the six periods of five minutes in half an hour, with work of lost workers
        "redisMemoryShare": ADMISSION_MEMORY_SHARE,  # above it no groups are admitted
        "versionsBehind": 1,  # if the job allows less staleness than that
        "mismatchFactor": 1,  # times the largest difference that the precision of the model explains
        "discardedUpdates": 0,  # of a step: more than so many without a finite gradient
        "operatorEventAgeSeconds": 270,  # the API server ends a watch without events after 240 s
        "operatorQueueDepth": 50,
        "operatorErrorShare": 0.2,  # of the reconciliations
    }
)


@dataclass(frozen=True)
class Burn:
    """Hold one row of the burn-rate table (multi-window, multi-burn-rate: Google's SRE workbook, chapter 5)."""

    severity: str
    factor: str
    """Name of the threshold."""
    long: str
    short: str
    """The short window clears the alert soon after recovery."""


BURNS = (Burn("critical", "burnCritical", "1h", "5m"), Burn("warning", "burnWarning", "6h", "30m"))
FEW_SAMPLES = 32
"""Shares are over whole steps, of small ones over as many as have so many samples."""
MOST_SAMPLES = 4096
"""Without steps, shares are over at most so many of the newest samples, ..."""
RECENT_S = 900.0
"""... in so many seconds before the newest ..."""
IDLE_S = 1800.0
"""... and absent when none has ended for so long."""
LEAST_SAMPLES = 20
"""Fewer samples than this say nothing."""
EVIDENCE_STEPS = 32
"""At most so many of the newest steps, or ``RECENT_S``, tell whether a share of failures is chance, ..."""
DOUBT = 4.9
"""... with a probability of at most exp(-4.9) a look that it is (docs/metrics.md has the false alarms of it), ..."""
DOUBT_OF_A_LOOK = 0.15
"""... and so much less for each further look at twice as many steps, ..."""
DOUBT_OF_FEW = 0.6
"""... and for fewer samples than ``ENOUGH_SAMPLES``, of which one more is a large share."""
ENOUGH_SAMPLES = 64
RECENT_STEPS = 10
"""The longest of so many steps is how long a step may take."""


def filled(text: str, values: Mapping[str, float] = THRESHOLDS) -> str:
    """Replace every ``<name>`` by its value; raise ``KeyError`` for an unknown name."""
    return re.sub(r"<([a-zA-Z]+)>", lambda found: f"{values[found[1]]:g}", text)


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Windows:
    """Scale all time windows together, so that a test sees in seconds what takes hours."""

    scale: float = 1.0
    least_s: float = 1.0
    """The shortest window (it must hold two scrapes)."""

    def duration(self, text: str) -> str:
        """Scale one duration, such as ``5m``."""
        if self.scale == 1.0 or text == "0m":
            return text
        return f"{max(self.seconds(text), self.least_s):.0f}s"

    def seconds(self, text: str) -> float:
        """Return a duration in scaled seconds."""
        number, unit = text[:-1], text[-1]
        return float(number) * _UNITS_S[unit] * self.scale

    def expression(self, text: str) -> str:
        """Scale every ``[window]``, ``[window:step]`` and ``offset`` of an expression."""
        scaled = re.sub(r"(?<=[\[:])(\d+[smhd])(?=[:\]])", lambda found: self.duration(found[1]), text)
        return re.sub(r"offset (\w+)", lambda found: f"offset {self.duration(found[1])}", scaled)


AS_WRITTEN = Windows()
"""Leaves all windows as they are."""
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
    held: str = "5m"
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
