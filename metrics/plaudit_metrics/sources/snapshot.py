"""Take snapshots of a run's streams, processes and Redis, and keep those of the last hour. Reads only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from plaudit_wire.messages import Announcement, RecordError, decode
from plaudit_wire.names import CONSUMER_GROUPS, Names
from plaudit_wire.records import LIVE_WITHIN_S, VALIDATES, EngineStatus, ScorerWork, WorkerRecord
from plaudit_wire.redis import Lateness


@dataclass(frozen=True)
class StreamDepth:
    """Hold the work in one stream."""

    undelivered: int = 0
    in_flight: int = 0
    """Read and not yet done."""
    oldest_undelivered_s: float = 0.0
    """Age of the oldest entry that no consumer has read; 0 without one."""
    oldest_in_flight_s: float = 0.0
    """Age of the oldest entry that is read and not done, since it was written; 0 without one."""


@dataclass(frozen=True)
class RunSandboxes:
    """Hold the machines of a run's samples at one moment."""

    waiting: int
    """Samples that wait for a place for their machine."""
    starting: int
    in_use: int
    """Machines in which conversations work."""
    left: int
    """Machines that conversations left to their tests, or until their group ends."""
    oldest_wait_s: float

    @property
    def states(self) -> dict[str, int]:
        """Return the counts by state."""
        return {state: getattr(self, state) for state in ("waiting", "starting", "in_use", "left")}


@dataclass(frozen=True)
class RunSnapshot:
    """Hold the state of a run's streams, processes and Redis at one moment."""

    time: float = 0.0
    """Seconds since the epoch, by Redis's clock."""
    taken: float = 0.0
    """This process's monotonic seconds at that moment; 0: unknown."""
    streams: dict[str, StreamDepth] = field(default_factory=dict)
    redeliveries: dict[str, int] = field(default_factory=dict)
    duplicates: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    workers: dict[tuple[str, str], int] = field(default_factory=dict)
    """(role, state) → live processes; state is busy, idle or starting."""
    worker_records: tuple[WorkerRecord, ...] = ()
    silent: tuple[tuple[WorkerRecord, float], ...] = ()
    """Processes whose heartbeat is overdue, and for which somebody waits: with the entries that they still hold as
    ``busy``, and the seconds since."""
    all_silent_s: float = 0.0
    """Seconds since the newest heartbeat of any process of the run; 0 without one."""
    reply_s: float = 0.0
    """Seconds until Redis replied to this service: the fastest of some replies."""
    judge_requests: dict[tuple[str, ...], int] = field(default_factory=dict)
    """(judge, status) → requests that ended so, over all reward workers since the run began."""
    judge_tokens: dict[tuple[str, ...], int] = field(default_factory=dict)
    """(judge, prompt or completion) → tokens."""
    cache_reads: dict[tuple[str, ...], int] = field(default_factory=dict)
    """(scorer, hit or miss) → samples that were looked up in the scorer's cache."""
    policy_version: int | None = None
    policy_version_lag: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    aof_ok: bool = True

    def without_outage(self, outage_s: float, ended_s: float) -> RunSnapshot:
        """Return the snapshot without silences that an outage of Redis, which ended ``ended_s`` ago, explains."""
        unexplained = ((silent_s > ended_s) * outage_s + SILENT_AFTER_S for _, silent_s in self.silent)
        silent = tuple(each for each, least_s in zip(self.silent, unexplained, strict=True) if each[1] > least_s)
        return self if silent == self.silent else replace(self, silent=silent)

    def clock_set_s(self, before: RunSnapshot | None) -> float:
        """Return by how many seconds Redis's clock was set since an earlier snapshot; less than a second is none."""
        if before is None or not (self.taken and before.taken):
            return 0.0
        set_by_s = (self.time - before.time) - (self.taken - before.taken)
        return set_by_s if abs(set_by_s) > _CLOCK_SET_S else 0.0

    @property
    def trainer_started(self) -> float:
        """Return when the live trainer began to work (seconds since the epoch); 0 without one."""
        return max((worker.started for worker in self.worker_records if worker.role == "trainer"), default=0.0)

    @property
    def is_validating(self) -> bool:
        """Return True while the trainer waits for validation samples."""
        return any(worker.role == "trainer" and worker.doing == VALIDATES for worker in self.worker_records)

    @property
    def scorers(self) -> dict[str, ScorerWork]:
        """Return the unfinished work of each scorer, over all live reward workers."""
        merged: dict[str, ScorerWork] = {}
        for worker in self.worker_records:
            for name, work in worker.scorers.items():
                others = merged.get(name, ScorerWork(0, 0.0))
                merged[name] = ScorerWork(
                    others.in_flight + work.in_flight,
                    max(others.oldest_s, work.oldest_s),
                    others.waiting + work.waiting,
                )
        return merged

    @property
    def rollouts(self) -> tuple[WorkerRecord, ...]:
        """Return the live rollouts."""
        return tuple(worker for worker in self.worker_records if worker.role == "rollout")

    @property
    def sandboxes(self) -> RunSandboxes | None:
        """Return the machines of samples; None where no live process reports any."""
        of_rollouts = [worker.sandboxes for worker in self.rollouts if worker.sandboxes is not None]
        of_trainer = [w.sandboxes for w in self.worker_records if w.role == "trainer" and w.sandboxes is not None]
        if not of_rollouts and not of_trainer:
            return None
        starting, in_use = (sum(getattr(work, each) for work in of_rollouts) for each in ("starting", "held"))
        return RunSandboxes(
            waiting=sum(work.waiting for work in of_rollouts),
            starting=starting,
            in_use=in_use,
            left=max(sum(work.held for work in of_trainer) - in_use - starting, 0),
            oldest_wait_s=max((work.oldest_wait_s for work in of_rollouts), default=0.0),
        )

    @property
    def slowest_reply(self) -> tuple[str, float]:
        """Return the process to which Redis replies slowest (empty: this service), and the seconds of a reply."""
        replies = [(worker.worker, worker.reply_s) for worker in self.worker_records]
        return max([("", self.reply_s), *replies], key=lambda reply: reply[1])

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Return the engines of the live rollouts."""
        return tuple(worker.engine for worker in self.worker_records if worker.engine is not None)

    @property
    def circuits_open(self) -> dict[str, bool]:
        """Return judge → True while the circuit breaker of any reward worker is open for it."""
        known = {labels[0] for labels in self.judge_requests}
        failing = {judge for worker in self.worker_records for judge in worker.circuits_open}
        return {judge: judge in failing for judge in sorted(known | failing)}


_CLOCK_SET_S = 1.0


async def take_snapshot(client: Redis, keys: Names) -> RunSnapshot:
    """Take one snapshot; raise ``redis.RedisError`` if Redis cannot be reached.

    What does not depend on each other is asked at once, so that a slow Redis has few round trips to be slow in.
    """
    now, first_reply_s = await _reply(client)
    taken = time.monotonic()
    found, heard, replies_s, requests, tokens, (counters, info, version) = await asyncio.gather(
        asyncio.gather(*(_depth(client, keys.stream(name), group, now) for name, group in CONSUMER_GROUPS.items())),
        _heard_workers(client, keys, now),
        _replies(client),
        _of_judges(client, keys.judges),
        _of_judges(client, keys.judge_tokens),
        _values(client, keys),
    )
    depths, holders = zip(*found, strict=True)
    workers = [worker for worker, silent_s in heard if silent_s <= LIVE_WITHIN_S]
    return RunSnapshot(
        time=now,
        taken=taken,
        streams=dict(zip(CONSUMER_GROUPS, depths, strict=True)),
        redeliveries=_counters(counters, "redelivered"),
        duplicates=_counters(counters, "duplicates"),
        dead_letters=_counters(counters, "dead"),
        workers=dict(Counter((worker.role, _state_of(worker)) for worker in workers)),
        worker_records=tuple(workers),
        all_silent_s=max(min((silent_s for _, silent_s in heard), default=0.0), 0.0),
        silent=tuple(_silent(heard, sum(holders, Counter()), is_awaited=found[_READY][0].undelivered > 0)),
        judge_requests=requests,
        judge_tokens=tokens,
        cache_reads={
            (scorer, result): count
            for result, name in (("hit", "cache_hits"), ("miss", "cache_misses"))
            for scorer, count in _counters(counters, name).items()
        },
        policy_version=version,
        policy_version_lag=_lag(workers, version),
        memory_bytes=int(info.get("used_memory", 0)),
        memory_limit_bytes=int(info.get("maxmemory", 0)),
        aof_ok=_aof_ok(info),
        reply_s=min(first_reply_s, *replies_s),
    )


async def _values(client: Redis, keys: Names) -> tuple[dict[str, str], dict[str, Any], int | None]:
    """Return the run's counters, what Redis says of itself, and the number of the announced policy version."""
    asked: Any = (client.hgetall(keys.counters), client.info(), client.hget(keys.state, "announced"))
    counted, info, announced = await asyncio.gather(*asked)
    return _texts(counted), info, _announced_number(announced)


async def _reply(client: Redis) -> tuple[float, float]:
    """Return Redis's clock (seconds since the epoch), and the seconds until it replied."""
    asked = time.monotonic()
    with Lateness() as late:
        seconds, microseconds = await client.time()
    return float(seconds) + microseconds / 1e6, max(time.monotonic() - asked - late.seconds, 0.0)


async def _replies(client: Redis) -> list[float]:
    """Return the seconds of some more replies: one is late too when this process was busy."""
    return [(await _reply(client))[1] for _ in range(2)]


async def _depth(client: Redis, key: str, group: str, now: float) -> tuple[StreamDepth, Counter[str]]:
    """Return a stream's depth, and who holds how many of the entries in flight.

    Undelivered are entries less pending ones, since finished entries are deleted.
    """
    length = int(await client.xlen(key))
    try:
        groups: list[dict[str, Any]] = await client.xinfo_groups(key)
    except ResponseError:  # no such key yet
        return StreamDepth(), Counter()
    named = next((each for each in groups if _text(each["name"]) == group), None)
    if named is None:
        oldest_s = await _oldest_s(client, key, "-", now)
        return StreamDepth(undelivered=length, oldest_undelivered_s=oldest_s), Counter()
    pending = int(named["pending"])
    undelivered = max(length - pending, 0)
    oldest_s = await _oldest_s(client, key, f"({_text(named['last-delivered-id'])}", now) if undelivered else 0.0
    held: dict[str, Any] = await client.xpending(key, group) if pending else {}
    in_flight_s = _age_s(held["min"], now) if held.get("min") else 0.0
    holders = Counter({_text(each["name"]): int(each["pending"]) for each in held.get("consumers") or ()})
    return StreamDepth(undelivered, pending, oldest_s, in_flight_s), holders


async def _oldest_s(client: Redis, key: str, after: str, now: float) -> float:
    entries: Any = await client.xrange(key, min=after, count=1)
    return _age_s(entries[0][0], now) if entries else 0.0


def _age_s(entry_id: bytes | str, now: float) -> float:
    milliseconds = int(_text(entry_id).partition("-")[0])
    return max(now - milliseconds / 1000, 0.0)


SILENT_AFTER_S = 8.0
"""A heartbeat comes every five seconds."""
_READY = list(CONSUMER_GROUPS).index("ready")


async def _heard_workers(client: Redis, keys: Names, now: float) -> list[tuple[WorkerRecord, float]]:
    """Return the processes that sent a heartbeat in the last ten minutes, with the seconds since the newest.

    A heartbeat of the future is from before the clock was set back: who lives sends another one within seconds.
    """
    heard: Any = await client.zrangebyscore(keys.workers, "-inf", now + LIVE_WITHIN_S, withscores=True)
    if not heard:
        return []
    encoded: Any = await client.hmget(keys.worker_records, [name for name, _ in heard])
    records = [None if each is None else decode_worker(each) for each in encoded]
    return [(record, now - at) for record, (_, at) in zip(records, heard, strict=True) if record is not None]


def _silent(
    heard: list[tuple[WorkerRecord, float]], held: Counter[str], *, is_awaited: bool
) -> Iterator[tuple[WorkerRecord, float]]:
    """Yield the silent processes for which somebody waits: what they held is with others once it was taken over.

    Args:
        is_awaited: scored groups wait for the trainer.
    """
    newest_s = min((silent_s for worker, silent_s in heard if worker.role == "trainer"), default=0.0)
    for worker, silent_s in heard:
        holds = held[worker.worker] > 0
        if worker.role == "trainer":  # an earlier one has a successor
            holds = (holds or is_awaited or bool(worker.doing)) and silent_s == newest_s
        if silent_s > SILENT_AFTER_S and holds:
            yield msgspec.structs.replace(worker, busy=held[worker.worker]), silent_s


async def _of_judges(client: Redis, key: str) -> dict[tuple[str, ...], int]:
    """Read a hash whose fields are ``<judge>:<label>``."""
    fields: Any = await client.hgetall(key)
    counts: dict[tuple[str, ...], int] = {}
    for name, count in _texts(fields).items():
        judge, _, label = name.partition(":")
        counts[judge, label] = int(count)
    return counts


def decode_worker(encoded: bytes) -> WorkerRecord | None:
    """Decode a heartbeat; return None for one of another version that cannot be read."""
    try:
        return msgspec.msgpack.decode(encoded, type=WorkerRecord)
    except msgspec.MsgspecError:
        return None


WORKER_STATES = ("busy", "idle", "starting")


def _state_of(worker: WorkerRecord) -> str:
    if not worker.ready:
        return "starting"
    return "busy" if worker.busy > 0 else "idle"


def _lag(workers: list[WorkerRecord], announced: int | None) -> int:
    held = [int(w.version.rpartition(".")[2]) for w in workers if w.role == "rollout" and w.ready and w.version]
    return max(announced - min(held), 0) if held and announced is not None else 0


def _announced_number(stored: Any) -> int | None:
    """Return the number of the announced policy version; None before the first, or when it cannot be read."""
    try:
        return None if stored is None else decode(stored, Announcement).version.number
    except RecordError:
        return None


def _counters(counted: Mapping[str, str], name: str) -> dict[str, int]:
    """Return the counters named ``<name>:<stream>`` or ``<name>:<scorer>``."""
    prefix = f"{name}:"
    return {key.removeprefix(prefix): int(value) for key, value in counted.items() if key.startswith(prefix)}


def _aof_ok(info: Mapping[str, Any]) -> bool:
    if not int(info.get("aof_enabled", 0)):
        return False
    return info.get("aof_last_write_status") == "ok" and info.get("aof_last_bgrewrite_status") == "ok"


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(key): value.decode(errors="replace") for key, value in fields.items()}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


MOST_LOOKS = 1800
"""An hour of snapshots, one every two seconds."""


class QueueHistory:
    """Keep the newest ``limit`` snapshots of a run."""

    def __init__(self, limit: int = MOST_LOOKS) -> None:
        self._looks: deque[RunSnapshot] = deque(maxlen=limit)

    def add(self, seen: RunSnapshot) -> None:
        """Add one snapshot."""
        self._looks.append(seen)

    def after(self, time: float) -> list[RunSnapshot]:
        """Return the snapshots after a point in time (seconds since the epoch, Redis's clock), oldest first."""
        return [seen for seen in self._looks if seen.time > time]
