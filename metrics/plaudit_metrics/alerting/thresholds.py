"""Every threshold and time window of the rules and alerts."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit_wire.limits import ADMISSION_MEMORY_SHARE


@dataclass(frozen=True)
class Burn:
    """One row of the burn-rate table (multi-window, multi-burn-rate: Google's SRE workbook, chapter 5)."""

    severity: str
    factor: float
    """Times the rate that would use up the error budget in 30 days."""
    long: str
    short: str
    """The short window lets the alert clear soon after recovery."""


BURNS = (Burn("page", 14.4, "1h", "5m"), Burn("ticket", 6.0, "6h", "30m"))
BURN_LEAST_SAMPLES = 100
"""Fewer samples in the long window say nothing."""

EXPOSED_REWARD_SHARE = 0.2
"""Of step time; the verdict's own threshold for "the trainer waits"."""
EXPOSED_REWARD_STEPS = 3

EXPOSED_LONG_STEP_S = 600
"""A step of this length or more is judged alone: too few of them close in half an hour."""

STALLED_AFTER_STEPS = 4
"""Times the mean step, and times the last one."""
STALLED_AFTER_S = 900
STALLED_FOR_CERTAIN_S = 7200
"""Where no step was seen yet, so that there is no mean."""

QUEUE_AGE_S = 120
BACKLOG_LEAST = 200
"""Entries; a smaller backlog may grow."""

FAILED_SHARE = 0.05
FAILED_LEAST_SAMPLES = 50

LIMITER_WAIT_S = 10
"""Mean wait of a scored sample for its judge's limits."""

REDELIVERIES = 10
REDIS_MEMORY_SHARE = ADMISSION_MEMORY_SHARE
"""Above it nothing is admitted any more."""
VERSIONS_BEHIND = 1
LOGPROB_DIFFERENCE = "0.1"
"""A bucket's upper bound."""
LOGPROB_SHARE = 0.01
OPERATOR_EVENT_AGE_S = 600
OPERATOR_QUEUE_DEPTH = 50
