"""What the conductor's parts share while a run goes on: the job's surroundings, and where the run stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.stream.connection import Transport
from plaudit_workers.stream.trainer.groups import TrainerStreams
from plaudit_workers.training.run.ledger import TrainerLedger
from plaudit_workers.training.run.lineage import Lineage
from plaudit_workers.training.run.plan import RunPlan
from plaudit_workers.training.run.prompts import PromptSource
from plaudit_workers.training.run.server_clock import ServerClock
from plaudit_workers.training.run.sinks import Sinks


@dataclass(frozen=True)
class Run:
    """The surroundings of one run."""

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
    """Where the run stands."""

    incarnation: int
    lineage: Lineage
    announcement: Announcement
    ledger: TrainerLedger = field(default_factory=TrainerLedger)
    closing: int = 0
    """Calls under way that end groups: the ledger counts these ends already, Redis perhaps not yet."""
    problem: str = ""
    """Why the run makes no progress now, for people; the trainer's heartbeat carries it."""
    counters_suspect: bool = False
    """Redis may count otherwise than the ledger does (lost keys, groups that reappeared)."""

    @property
    def version(self) -> PolicyVersion:
        """The newest published policy."""
        return self.announcement.version
