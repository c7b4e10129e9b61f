"""The keys of a run in Redis that the metrics read.

The stream protocol (and these names with it) belongs to ``plaudit_workers``, which stands above the metrics in the
import order; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

WATCHED_GROUPS = {"prompts": "rollout", "samples": "reward", "groups": "reward", "ready": "trainer"}
"""Each stream that carries work and its consumer group."""

EVENTS_GROUP = "metrics"
"""The metrics service's own consumer group of ``events``."""


@dataclass(frozen=True)
class Keys:
    """The keys of one run."""

    run: str

    @property
    def prefix(self) -> str:
        """What every key of the run begins with."""
        return f"plaudit:{{{self.run}}}:"

    def stream(self, name: str) -> str:
        """The key of a stream that carries work."""
        return self.prefix + name

    @property
    def events(self) -> str:
        """Stream of event records."""
        return self.prefix + "events"

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return self.prefix + "dead"

    @property
    def state(self) -> str:
        """Hash: incarnation, step, announced policy."""
        return self.prefix + "state"

    @property
    def counters(self) -> str:
        """Hash: how often what happened: redelivered:<stream>, duplicates:<stream>, dead:<stream>, ..."""
        return self.prefix + "counters"

    @property
    def workers(self) -> str:
        """Sorted set of process names by their last heartbeat (seconds since the epoch, server's clock)."""
        return self.prefix + "workers"

    @property
    def judges(self) -> str:
        """Hash: ``<judge>:<status>`` → requests sent to it that ended so. Written by reward workers (HINCRBY)."""
        return self.prefix + "judges"

    @property
    def judge_tokens(self) -> str:
        """Hash: ``<judge>:prompt`` and ``<judge>:completion`` → tokens that it counted. Written like ``judges``."""
        return self.prefix + "judges:tokens"

    @property
    def worker_records(self) -> str:
        """Hash: process name → its ``WorkerRecord``."""
        return self.prefix + "workers:records"
