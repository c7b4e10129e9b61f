"""What a trainer allows to be under way, and what it is answered."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Admission(enum.Enum):
    """What became of a prompt that was to be admitted."""

    admitted = b"admitted"
    full = b"full"
    """As many groups are open as may be."""
    memory = b"memory"
    """Redis's memory is too full for more."""
    duplicate = b"duplicate"
    """A group of this id exists or existed."""


@dataclass(frozen=True)
class StreamLimits:
    """What the trainer allows.

    Attributes:
        max_open_groups: training groups that may be open at a time.
        max_open_validation_groups: the same for validation groups, beside them.
        group_deadline_s: from a group's first published sample to its release.
        group_scoring_deadline_s: from a group's last sample to its release without group-scope scorers.
        min_samples_per_group: a training group with fewer scored samples is dropped.
        has_group_scorers: group-scope scorers follow on the samples' own.
        memory_share: nothing is admitted above this share of Redis's memory.
    """

    max_open_groups: int
    max_open_validation_groups: int = 256
    group_deadline_s: float = 900.0
    group_scoring_deadline_s: float = 900.0
    min_samples_per_group: int = 1
    has_group_scorers: bool = False
    memory_share: float = 0.7
