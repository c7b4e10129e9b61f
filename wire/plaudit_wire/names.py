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
    """Name the keys of one run.

    Attributes:
        prefix: the first part of every key of the run.
        prompts: stream of admitted groups, read by rollouts.
        samples: stream of finished samples, read by reward workers.
        groups: stream of groups that wait for their group-scope scorers, read by reward workers.
        ready: stream of groups that the trainer may take.
        open: sorted set of groups that are admitted and not closed, by deadline (server's clock, seconds).
        closed: sorted set of the 1,024 groups closed last, by call: a repeated close repeats its answer.
        events: stream of records for the metrics.
        dead: stream of dead letters.
        leases: hash: the times of each stream's last search for lapsed leases, and of the server clock's last step.
        state: hash: incarnation, step, announced policy. Only the trainer writes it.
        counters: hash: counts of events, including the ledger's counters, and ``cache_hits:<scorer>``,
            ``cache_misses:<scorer>``.
        service: the offer of a scoring service to clients.
        sessions: sorted set of the clients' sessions, by expiry time (server's clock, seconds).
        workers: sorted set of process names by their last heartbeat (server's clock, seconds).
        worker_records: hash of their ``WorkerRecord``.
        judges: hash: ``<judge>:<status>`` to the number of such requests. Reward workers write it (HINCRBY).
        judge_tokens: hash: ``<judge>:prompt`` and ``<judge>:completion`` to tokens. Written like ``judges``.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"plaudit:{{{run}}}:"
        self.prompts = self.prefix + "prompts"
        self.samples = self.prefix + "samples"
        self.groups = self.prefix + "groups"
        self.ready = self.prefix + "ready"
        self.open = self.prefix + "open"
        self.closed = self.prefix + "closed"
        self.events = self.prefix + "events"
        self.dead = self.prefix + "dead"
        self.leases = self.prefix + "leases"
        self.state = self.prefix + "state"
        self.counters = self.prefix + "counters"
        self.service = self.prefix + "service"
        self.sessions = self.prefix + "sessions"
        self.workers = self.prefix + "workers"
        self.worker_records = self.prefix + "workers:records"
        self.judges = self.prefix + "judges"
        self.judge_tokens = self.prefix + "judges:tokens"

    def group(self, group_id: str) -> str:
        """Return the key of one group's hash."""
        return f"{self.prefix}group:{group_id}"

    def session(self, session: str, part: Literal["groups", "results"]) -> str:
        """Return the key of a client session's submissions or results."""
        return f"{self.prefix}session:{session}:{part}"

    def stream(self, stream: Stream) -> str:
        """Return the key of a stream that carries work."""
        return self.prefix + stream
