"""Name every key of a run in Redis, and the readers of each stream.

All keys share the run as hash tag, so that one script may access them on a Redis Cluster too. The contents of each key
are described in ``lua/shared/run.lua`` and ``lua/shared/group.lua``, which write them.
"""

from __future__ import annotations

from typing import Final, Literal

Stream = Literal["prompts", "samples", "groups", "ready"]
CONSUMER_GROUPS: Final[dict[Stream, str]] = {
    "prompts": "rollout",
    "samples": "reward",
    "groups": "reward",
    "ready": "trainer",
}
"""The consumer group of each stream that carries work."""
EVENTS_GROUP: Final = "metrics"
"""The metrics service's consumer group of ``events``."""


class Names:
    """Name the keys of one run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"plaudit:{{{run}}}:"
        """The first part of every key of the run."""
        self.prompts = self.prefix + "prompts"
        """Stream of admitted groups, read by rollouts."""
        self.samples = self.prefix + "samples"
        """Stream of finished samples, read by reward workers."""
        self.groups = self.prefix + "groups"
        """Stream of groups that wait for their group-scope scorers, read by reward workers."""
        self.ready = self.prefix + "ready"
        """Stream of groups that the trainer may take."""
        self.open = self.prefix + "open"
        """Sorted set of groups that are admitted and not closed, by deadline (server's clock, seconds)."""
        self.closed = self.prefix + "closed"
        """Sorted set of the 1,024 groups closed last, by call: a repeated close repeats its answer."""
        self.events = self.prefix + "events"
        """Stream of records for the metrics."""
        self.dead = self.prefix + "dead"
        """Stream of dead letters."""
        self.leases = self.prefix + "leases"
        """Hash: times of the last searches for lapsed leases and overdue deadlines, and the server clock's steps."""
        self.state = self.prefix + "state"
        """Hash: incarnation, step, announced policy. Only the trainer writes it."""
        self.counters = self.prefix + "counters"
        """Hash: counts of events, the ledger's counters, ``cache_hits:<scorer>`` and ``cache_misses:<scorer>``."""
        self.service = self.prefix + "service"
        """The offer of a scoring service to clients."""
        self.sessions = self.prefix + "sessions"
        """Sorted set of the clients' sessions, by expiry time (server's clock, seconds)."""
        self.workers = self.prefix + "workers"
        """Sorted set of process names by their last heartbeat (server's clock, seconds)."""
        self.worker_records = self.prefix + "workers:records"
        """Hash of their ``WorkerRecord``."""
        self.judges = self.prefix + "judges"
        """Hash: ``<judge>:<status>`` to the number of such requests. Reward workers write it (HINCRBY)."""
        self.judge_tokens = self.prefix + "judges:tokens"
        """Hash: ``<judge>:prompt`` and ``<judge>:completion`` to tokens. Written like ``judges``."""
        self.kept = self.prefix + "kept"
        """Sorted set of a service's groups that wait to be stored for auditors, by their end (server's clock)."""
        self.kept_batch = self.prefix + "kept_batch"
        """Sorted set of those that are being stored, by the number of their file."""
        self.audit_attempts = self.prefix + "audits"
        """Hash: group to the number of workers that have begun to audit it, until one has ended."""

        self.sandboxes = self.prefix + "sandboxes"
        """Hash: holder of a place for a machine (``<group> <index>`` of a sample, ``warm <machine>`` of a pool) to its
        machine. Only the broker of the machines writes it, and its own lease in ``sandboxes:broker``."""

    def audit_lease(self, group_id: str) -> str:
        """Return the key that holds the worker which audits a group; it lapses."""
        return f"{self.prefix}audit:{group_id}"

    def group(self, group_id: str) -> str:
        """Return the key of one group's hash."""
        return f"{self.prefix}group:{group_id}"

    def kept_group(self, group_id: str) -> str:
        """Return the key of the hash of a group that waits to be stored."""
        return f"{self.prefix}kept:{group_id}"

    def session(self, session: str, part: Literal["groups", "results"]) -> str:
        """Return the key of a client session's submissions or results."""
        return f"{self.prefix}session:{session}:{part}"

    def open_reward_session(self, token: str, session: str) -> str:
        """Return the key of a session that a client of the Open Reward Standard has by a token; it lapses."""
        return f"{self.prefix}session:http.{token}:task:{session}"

    def open_reward_sizes(self, token: str) -> str:
        """Return the key of the bytes that each of these sessions of a token holds."""
        return f"{self.prefix}session:http.{token}:tasks"

    def stream(self, stream: Stream) -> str:
        """Return the key of a stream that carries work."""
        return self.prefix + stream
