"""Every threshold and time window of the rules and alerts."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit_wire.limits import ADMISSION_MEMORY_SHARE


@dataclass(frozen=True)
class Burn:
    """One row of the burn-rate table (multi-window, multi-burn-rate: Google's SRE workbook, chapter 5)."""

    severity: str
    factor: float
    """Multiple of the rate that uses up the error budget in 30 days."""
    long: str
    short: str
    """The short window clears the alert soon after recovery."""


BURNS = (Burn("page", 14.4, "1h", "5m"), Burn("ticket", 6.0, "6h", "30m"))
BURN_LEAST_SAMPLES = 100
"""With fewer samples in the long window the alert does not fire."""

EXPOSED_REWARD_SHARE = 0.2
"""Of step time; the verdict's threshold for a waiting trainer."""
EXPOSED_REWARD_STEPS = 3

EXPOSED_LONG_STEP_S = 600
"""A step of this length or more is judged alone: too few of them close in half an hour."""

STALLED_AFTER_STEPS = 4
"""Times the mean step, and times the last one."""
STALLED_AFTER_S = 900
STALLED_FOR_CERTAIN_S = 7200
"""For runs whose last step's length is unknown."""

QUEUE_AGE_S = 120
BACKLOG_LEAST = 200
"""Entries; a smaller backlog may grow without an alert."""

FAILED_SHARE = 0.05
FAILED_LEAST_SAMPLES = 50

LIMITER_WAIT_S = 10
"""Mean wait of a sample for its judge's limits."""

REDELIVERIES = 10
REDIS_MEMORY_SHARE = ADMISSION_MEMORY_SHARE
"""Above it no groups are admitted."""
VERSIONS_BEHIND = 1
LOGPROB_DIFFERENCE = "0.1"
"""A bucket's upper bound."""
LOGPROB_SHARE = 0.01
OPERATOR_EVENT_AGE_S = 600
OPERATOR_QUEUE_DEPTH = 50
