"""A group as read from its hash by ``group_hash``, for the trainer and group-scope scorers."""

from __future__ import annotations

from typing import Literal

import msgspec

from plaudit_wire.messages import Prompt, SampleBody
from plaudit_wire.records import ScoringRecord, Stamps

Phase = Literal["open", "group_scoring", "ready", "dropped"]
"""The phase of a group; a closed group has no hash."""


class GroupSample(msgspec.Struct, frozen=True):
    """Hold one sample of a group, as read from the group's hash."""

    index: int
    stamps: Stamps
    body: SampleBody | None = None
    digest: str = ""
    scoring: ScoringRecord | None = None
    """None while the sample is not terminal."""
    deliveries: int = 1


class Group(msgspec.Struct, frozen=True):
    """Hold a group, as read from its hash. Points in time as in ``plaudit_wire.records``."""

    id: str
    phase: Phase
    prompt: Prompt
    samples: list[GroupSample]
    incarnation: int
    """Incarnation of the trainer that admitted it."""
    admitted: float
    terminal: float | None = None
    ready: float | None = None
    reason: str = ""
    """The reason to drop it; empty unless ``phase`` is ``dropped``."""
    taken: float | None = None
    """The trainer took it; None if it was only read."""
