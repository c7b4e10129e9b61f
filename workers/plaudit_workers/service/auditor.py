"""Score some groups a second time, after their step: the auditors of a job, in a reward worker with room to spare.

Watched scorers are asked again about the same samples, so that their drift shows (``drift``).

Stored samples are the queue: the trainer writes them, in a service its workers. ``audits/`` holds the results
(``plaudit_metrics.sources.audits``): what is drawn and has no line yet is open, whatever was killed. A lease in Redis
keeps two workers from the same group. Nobody waits for an audit: the trainer, deadlines, drains and the autoscaler see
nothing of it, and a failure is one more result.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet

from plaudit_job.spec.rewards import AuditSpec, DriftSpec, RewardSpec
from plaudit_metrics.sources.audits import (
    append_audit,
    audits_file,
    drift_file,
    is_audited,
    read_audits,
    read_drift,
)
from plaudit_metrics.sources.sample_schema import (
    FOLDER,
    LATER_SCORER_INPUT,
    SCORER_INPUT,
    scorer_column,
    scorer_input,
    surviving_files,
)
from plaudit_metrics.statistics.audits import AuditedGroup, AuditedSample, Rescored
from plaudit_reward.pipeline import Pipeline
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.logs import get_logger
from plaudit_wire.records import LEASE_S, Sample, ScorerRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.process import Supervised, unless_stopped
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.stored_samples import KeptGroups
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_LOOK_EVERY_S = 2.0
_LOOK_FOR_ROOM_EVERY_S = 0.1
_PAUSE_S = 30.0
"""After an error of the volume or of Redis."""
_AT_ONCE = 64
"""Samples that a worker audits at a time, of one group or of several: a judge of 20 s must keep up with its steps."""
_MOST_ATTEMPTS = 3


@dataclass(frozen=True)
class OpenGroup:
    """A drawn group of stored samples, and the auditors that have not scored it."""

    group: str
    step: int
    data_source: str
    samples: list[Sample]
    scores: list[float | None]
    auditors: list[str]


class Auditor:
    """Audit the groups of one run as long as there is room in this worker.

    Args:
        reward: of the job, with its auditors and the scorers whose drift is watched.
        pipelines: one for each of them that could be opened; ``run`` closes them.
        kept: the groups of a reward service, which no trainer stores.
    """

    def __init__(
        self,
        worker: str,
        transport: Transport,
        run_folder: Path,
        reward: RewardSpec,
        pipelines: Mapping[str, Pipeline],
        kept: KeptGroups | None = None,
    ) -> None:
        self._worker = worker
        self._transport = transport
        self._folder = run_folder
        self._auditors = {name: spec for name, spec in reward.auditors.items() if name in pipelines}
        self._watched = {name: spec for name, spec in reward.watched.items() if name in pipelines}
        self._pipelines = pipelines
        self._kept = kept
        self._done: set[Path] = set()
        """Files of samples of which every drawn group has been audited."""
        self._under_way: dict[asyncio.Task[None], int] = {}
        """Audits of groups with the numbers of their samples."""

    async def run(self, stop: asyncio.Event, has_room: Callable[[], bool]) -> None:
        """Audit until ``stop`` is set: what is under way then is left to others."""
        try:
            while not stop.is_set():
                if not await unless_stopped(stop, self._audit_all(has_room)):
                    return
                await unless_stopped(stop, asyncio.sleep(_LOOK_EVERY_S))
        finally:
            for pipeline in self._pipelines.values():
                await pipeline.close()

    async def _audit_all(self, has_room: Callable[[], bool]) -> None:
        """Audit every open group; look for newer steps before each step, so that the newest comes first."""
        seen: set[Path] = set()
        try:
            async with Supervised() as audits:
                while True:
                    files = await asyncio.to_thread(surviving_files, self._folder / FOLDER)
                    if self._kept is not None and await self._kept.store(max(files, default=0)):
                        continue
                    await self._watch_drift(files, has_room)
                    left = [path for path in files.values() if path not in self._done | seen]
                    if left:
                        seen.add(left[-1])
                        await self._begin(left[-1], audits, has_room)
                    elif self._under_way:
                        await asyncio.wait(self._under_way, timeout=_LOOK_EVERY_S)
                    else:
                        return
        except Exception as error:  # it must not end the worker that scores
            logger.warning("audits pause", error=described(error))
            await asyncio.sleep(_PAUSE_S)

    async def _begin(self, samples: Path, audits: Supervised, has_room: Callable[[], bool]) -> None:
        """Begin to audit the open groups of a file, each as soon as there is room for its samples."""
        groups = await asyncio.to_thread(open_groups, self._folder, samples, self._auditors)
        if not groups:
            self._done.add(samples)
        for group in groups:
            await _room(partial(self._fits, group, has_room))
            audit = audits.start(self._audit_if_free(group, audits_file(self._folder, samples)))
            self._under_way[audit] = len(group.samples)
            audit.add_done_callback(self._under_way.pop)

    def _fits(self, group: OpenGroup, has_room: Callable[[], bool]) -> bool:
        at_once = sum(self._under_way.values()) + len(group.samples)
        return has_room() and (not self._under_way or at_once <= _AT_ONCE)

    async def _audit_if_free(self, group: OpenGroup, target: Path) -> None:
        """Audit a group that no other worker audits."""

        async def audited(attempts: int) -> Callable[[], None] | None:
            before = {name for each in read_audits([target]) if each.group == group.group for name in each.auditors}
            left = [name for name in group.auditors if name not in before]
            results = {name: await self._scored(name, group.samples, attempts) for name in left}
            return partial(append_audit, target, _audited(group, results)) if results else None

        await self._leased(group.group, audited)

    async def _watch_drift(self, files: Mapping[int, Path], has_room: Callable[[], bool]) -> None:
        """Ask the watched scorers again about samples of the first step, where that is due."""
        target = drift_file(self._folder)
        asked = {(each.scorer, each.step) for each in read_drift(target)}
        for name, spec in self._watched.items():
            due = max(files, default=0) // spec.every_steps * spec.every_steps
            if due and (name, due) not in asked:
                await _room(has_room)
                await self._leased(f"drift {name} {due}", partial(self._ask_again, name, spec, due, files, target))

    async def _ask_again(
        self, name: str, spec: DriftSpec, due: int, files: Mapping[int, Path], target: Path, attempts: int
    ) -> Callable[[], None] | None:
        if (name, due) in {(each.scorer, each.step) for each in read_drift(target)}:
            return None
        first_step = min(step for step in files if step)  # step 0 holds a validation
        first = await asyncio.to_thread(first_values, files[first_step], name, spec.samples)
        records = await self._scored(name, [sample for sample, _ in first], attempts)
        pairs = [
            (value, record.value) for (_, value), record in zip(first, records, strict=True) if record.value is not None
        ]
        return partial(append_audit, target, Rescored(name, due, pairs, len(first) - len(pairs)))

    async def _leased(self, name: str, work: Callable[[int], Awaitable[Callable[[], None] | None]]) -> None:
        """Do work that no other worker does, and write its result, through an outage of Redis as well.

        ``work`` gets the number of the attempt and returns how its result is written; None: it was written before.
        """
        redis, names = self._transport.commands, self._transport.names
        lease = names.audit_lease(name)
        if not await redis.set(lease, self._worker, nx=True, px=round(LEASE_S * 1000)):
            return
        try:
            attempts = await redis.hincrby(names.audit_attempts, name, 1)
            renewing = asyncio.create_task(self._renew(lease))
            try:
                write = await work(attempts)
            except asyncio.CancelledError:  # this worker ends in order: the group is not to blame
                await redis.hincrby(names.audit_attempts, name, -1)
                raise
            finally:
                renewing.cancel()
            if not await self._transport.retry_through_outage(lambda: self._holds(lease)):
                return  # it was frozen for longer than a lease
            if write is not None:
                await asyncio.to_thread(write)
            await self._transport.retry_through_outage(lambda: redis.hdel(names.audit_attempts, name))
        finally:
            with suppress(*OUTAGE):
                if await self._holds(lease):
                    await redis.delete(lease)

    async def _holds(self, lease: str) -> bool:
        return bool(await self._transport.commands.get(lease) == self._worker.encode())

    async def _renew(self, lease: str) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            with suppress(*OUTAGE):
                if await self._holds(lease):
                    await self._transport.commands.pexpire(lease, round(LEASE_S * 1000))

    async def _scored(self, name: str, samples: list[Sample], attempts: int) -> list[ScorerRecord]:
        if attempts > _MOST_ATTEMPTS:
            reason = f"{_MOST_ATTEMPTS} workers were lost while they audited its group"
            return [ScorerRecord("poison", reason=reason)] * len(samples)
        scorings = await self._pipelines[name].score_whole_group(samples, asyncio.Semaphore(_AT_ONCE))
        return [
            scoring.scorers.get(name, ScorerRecord(scoring.outcome, scoring.value, scoring.reason))
            for scoring in scorings
        ]


async def _room(has_room: Callable[[], bool]) -> None:
    while not has_room():  # noqa: ASYNC110 (room depends on several queues, and an audit is in no hurry)
        await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)


def _audited(group: OpenGroup, results: Mapping[str, list[ScorerRecord]]) -> AuditedGroup:
    samples = [
        AuditedSample(sample.index, score, {name: records[place] for name, records in results.items()})
        for place, (sample, score) in enumerate(zip(group.samples, group.scores, strict=True))
    ]
    return AuditedGroup(group.group, group.step, group.data_source, samples)


def open_groups(run_folder: Path, samples: Path, auditors: Mapping[str, AuditSpec]) -> list[OpenGroup]:
    """Return the drawn groups of a file of samples that lack an audit, without samples that were never generated.

    Audits that a step had before it was interrupted count again: its last file repeats those groups.
    """
    target = audits_file(run_folder, samples)
    _take_over(target, samples)
    audited = {each.group: each.auditors for each in read_audits([target])}
    steps = _groups(samples)
    wanted = {
        group: [
            name
            for name, spec in auditors.items()
            if is_audited(group, step, spec.share, spec.every_steps) and name not in audited.get(group, ())
        ]
        for group, step in steps.items()
    }
    chosen = {group: names for group, names in wanted.items() if names}
    rows = _rows(samples, list(chosen)) if chosen else []
    return [
        OpenGroup(
            name,
            members[0]["step"],
            members[0]["data_source"],
            [scorer_input(row) for row in members],
            [row["score"] for row in members],
            chosen[name],
        )
        for name, of_group in itertools.groupby(rows, lambda row: row["group"])
        if (members := [row for row in of_group if row["response"] is not None])
    ]


def _groups(samples: Path) -> dict[str, int]:
    """Return the step of each training group of a file that has a scored sample."""
    table = pyarrow.parquet.read_table(
        samples, columns=["group", "step"], filters=[("split", "==", "train"), ("outcome", "==", "scored")]
    )
    return dict(zip(table["group"].to_pylist(), table["step"].to_pylist(), strict=True))


def first_values(samples: Path, scorer: str, count: int) -> list[tuple[Sample, float]]:
    """Return some samples of a file, spread by their groups' ids, with the values that a scorer gave them."""
    groups = sorted(_groups(samples), key=lambda group: zlib.crc32(group.encode(errors="replace")))
    column = scorer_column(scorer, "value")
    if column not in pyarrow.parquet.read_schema(samples).names:
        return []
    rows = [row for row in _rows(samples, groups[:count], column) if row[column] is not None and row["response"]]
    rows.sort(key=lambda row: (row["index"], row["group"]))
    return [(scorer_input(row), row[column]) for row in rows[:count]]


def _rows(samples: Path, groups: list[str], *further: str) -> list[dict[str, Any]]:
    present = pyarrow.parquet.read_schema(samples).names
    columns = SCORER_INPUT + [name for name in LATER_SCORER_INPUT if name in present] + list(further)
    rows = pyarrow.parquet.read_table(samples, columns=columns, filters=[("group", "in", groups)]).to_pylist()
    return sorted(rows, key=lambda row: (row["group"], row["index"]))


def _take_over(target: Path, samples: Path) -> None:
    """Repeat the audits of the same step's earlier files, of groups that this file holds as well."""
    step = samples.stem.rpartition("-i")[0]
    earlier = [path for path in sorted(target.parent.glob(f"{step}-i*.jsonl")) if path != target]
    if not earlier:
        return
    held, own = _groups(samples), {each.group for each in read_audits([target])}
    for each in read_audits(earlier):
        if each.group in held and each.group not in own:
            append_audit(target, each)


async def open_auditor(
    reward: RewardSpec, context: BuildContext, transport: Transport, run_folder: Path, *, trains: bool = True
) -> Auditor:
    """Open the auditors of a job, and the scorers whose drift is watched.

    One that is refused is left out: it must not end the worker that scores.
    """
    pipelines: dict[str, Pipeline] = {}
    for name in (*reward.auditors, *reward.watched):
        try:
            pipelines[name] = await build_pipeline(reward.alone(name), context.worker, context)
        except RefusedError as error:
            logger.error("auditor refused", scorer=name, error=str(error))
    kept = None if trains else KeptGroups(transport, run_folder)
    return Auditor(context.worker, transport, run_folder, reward, pipelines, kept)
