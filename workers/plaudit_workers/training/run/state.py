"""Hold the objects that the conductor's parts share: the run's context, and its current state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.trainer.groups import TrainerStreams
from plaudit_workers.training.run.lineage import Lineage
from plaudit_workers.training.run.plan import RunPlan
from plaudit_workers.training.run.prompt_order import PromptOrder
from plaudit_workers.training.run.prompts import PromptSource
from plaudit_workers.training.run.server_clock import ServerClock
from plaudit_workers.training.run.sinks import Sinks
from plaudit_workers.training.run.trainer_ledger import TrainerLedger


@dataclass(frozen=True)
class RunContext:
    """Hold everything of one run that does not change."""

    plan: RunPlan
    folder: Path
    transport: Transport
    streams: TrainerStreams
    data: PromptSource
    sinks: Sinks
    clock: ServerClock
    validation_data: PromptSource | None = None
    worker: str = "trainer"
    """Name in heartbeats."""


@dataclass
class RunState:
    """Hold the current state of the run."""

    incarnation: int
    lineage: Lineage
    announcement: Announcement
    ledger: TrainerLedger = field(default_factory=TrainerLedger)
    order: PromptOrder = field(default_factory=PromptOrder)
    closing: int = 0
    """Calls in progress that end groups: the ledger has counted these ends, Redis perhaps not yet."""
    paused_until: float = 0.0
    """No training prompts are admitted before this time (server's clock), because a step could not be trained."""
    problem: str = ""
    """Why the run makes no progress now, for people; the trainer's heartbeat carries it."""
    counters_suspect: bool = False
    """Redis's counters may differ from the ledger (lost keys, groups that reappeared)."""

    @property
    def version(self) -> PolicyVersion:
        """Return the newest published policy."""
        return self.announcement.version
