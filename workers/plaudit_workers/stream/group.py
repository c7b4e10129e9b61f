"""A group as its hash holds it, read. ``group_hash`` reads it; the trainer and group-scope scorers use it."""

from __future__ import annotations

from typing import Literal

import msgspec

from plaudit_wire.messages import Body, Prompt
from plaudit_wire.records import ScoringRecord, Stamps

Phase = Literal["open", "group_scoring", "ready", "dropped"]
"""Where a group is; a closed group's hash is gone."""


class GroupSample(msgspec.Struct, frozen=True):
    """One index of a group as its hash tells it."""

    index: int
    stamps: Stamps
    body: Body | None = None
    digest: str = ""
    scoring: ScoringRecord | None = None
    """None while the sample is not terminal."""
    deliveries: int = 1


class Group(msgspec.Struct, frozen=True):
    """A group's hash, read. Points in time as in ``plaudit_wire.records``."""

    id: str
    phase: Phase
    prompt: Prompt
    samples: list[GroupSample]
    incarnation: int
    """Of the trainer that admitted it."""
    admitted: float
    terminal: float | None = None
    ready: float | None = None
    reason: str = ""
    """Why it is to be dropped; empty unless ``phase`` is ``dropped``."""
    taken: float | None = None
    """The trainer took it; None where it was only looked at."""
