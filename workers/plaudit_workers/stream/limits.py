"""The bounds that a trainer sets."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit_wire.limits import ADMISSION_MEMORY_SHARE


@dataclass(frozen=True)
class StreamLimits:
    """Hold the bounds that a trainer sets.

    Attributes:
        max_open_validation_groups: validation groups that may be open at a time, in addition.
        group_deadline_s: from a group's first published sample to its release.
        group_scoring_deadline_s: from a group's last sample to its release without group-scope scorers.
        min_samples_per_group: a training group with fewer scored samples is dropped.
        memory_share: admissions stop above this share of Redis's memory.
    """

    max_open_groups: int
    max_open_validation_groups: int = 256
    group_deadline_s: float = 900.0
    group_scoring_deadline_s: float = 900.0
    min_samples_per_group: int = 1
    has_group_scorers: bool = False
    memory_share: float = ADMISSION_MEMORY_SHARE
