"""Score some groups a second time, after their step: the auditors of a job, in a reward worker with room to spare.

The stored samples are the queue and ``audits/`` holds the results (``plaudit_metrics.sources.audits``): what is drawn
and has no line yet is open, whatever was killed. A lease in Redis keeps two workers from the same group. Nobody waits
for an audit: the trainer, deadlines, drains and the autoscaler see nothing of it, and a failure is one more result.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

from plaudit_job.spec.rewards import AuditSpec, RewardSpec
from plaudit_metrics.sources.audits import (
    append_audit,
    audits_file,
    is_drawn,
    read_audits,
)
from plaudit_metrics.sources.sample_schema import (
    FOLDER,
    LATER_SCORER_INPUT,
    SCORER_INPUT,
    scorer_input,
    surviving_files,
)
from plaudit_metrics.statistics.audits import AuditedGroup, AuditedSample
from plaudit_reward.pipeline import Pipeline
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.logs import get_logger
from plaudit_wire.records import LEASE_S, Sample, ScorerRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.process import unless_stopped
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.stream.transport import Transport

logger = get_logger(__name__)
_LOOK_EVERY_S = 2.0
_LOOK_FOR_ROOM_EVERY_S = 0.1
_PAUSE_S = 30.0
"""After an error of the volume or of Redis."""
_AT_ONCE = 64
"""Samples of a group that one auditor scores at a time."""
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
        worker: name of this process.
        auditors: of the job, by name.
        pipelines: one for each auditor that could be opened; ``run`` closes them.
    """

    def __init__(
        self,
        worker: str,
        transport: Transport,
        run_folder: Path,
        auditors: Mapping[str, AuditSpec],
        pipelines: Mapping[str, Pipeline],
    ) -> None:
        self._worker = worker
        self._transport = transport
        self._folder = run_folder
        self._auditors = {name: spec for name, spec in auditors.items() if name in pipelines}
        self._pipelines = pipelines
        self._done: set[Path] = set()
        """Files of samples of which every drawn group has been audited."""

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
        """Audit every open group, those of the newest steps first."""
        try:
            files = await asyncio.to_thread(surviving_files, self._folder / FOLDER)
            for path in reversed(files.values()):
                if path not in self._done:
                    await self._audit_file(path, has_room)
        except Exception as error:  # it must not end the worker that scores
            logger.warning("audits pause", error=described(error))
            await asyncio.sleep(_PAUSE_S)

    async def _audit_file(self, samples: Path, has_room: Callable[[], bool]) -> None:
        left_to_others = False
        for group in await asyncio.to_thread(open_groups, self._folder, samples, self._auditors):
            while not has_room():  # noqa: ASYNC110 (room depends on several queues, and an audit is in no hurry)
                await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)
            left_to_others |= not await self._audit_if_free(group, audits_file(self._folder, samples))
        if not left_to_others:
            self._done.add(samples)

    async def _audit_if_free(self, group: OpenGroup, target: Path) -> bool:
        """Audit a group that no other worker audits; return True if it has been audited."""
        redis, names = self._transport.commands, self._transport.names
        lease = names.audit_lease(group.group)
        if not await redis.set(lease, self._worker, nx=True, px=round(LEASE_S * 1000)):
            return False
        try:
            audited = {name for each in read_audits([target]) if each.group == group.group for name in each.auditors}
            left = [name for name in group.auditors if name not in audited]
            attempts = await redis.hincrby(names.audit_attempts, group.group, 1)
            renewing = asyncio.create_task(self._renew(lease))
            try:
                results = {name: await self._scored(name, group.samples, attempts) for name in left}
            finally:
                renewing.cancel()
            if not await self._holds(lease):  # it was frozen for longer than a lease
                return False
            await asyncio.to_thread(append_audit, target, _audited(group, results))
            await redis.hdel(names.audit_attempts, group.group)
            return True
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
        pipeline, slots = self._pipelines[name], asyncio.Semaphore(_AT_ONCE)

        async def one(sample: Sample) -> Any:
            async with slots:
                return await pipeline.score(sample)

        scorings = await asyncio.gather(*map(one, samples))
        if pipeline.scores_groups:
            scorings = await pipeline.score_group(samples, scorings)
        return [
            scoring.scorers.get(name, ScorerRecord(scoring.outcome, scoring.value, scoring.reason))
            for scoring in scorings
        ]


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
            if is_drawn(group, step, spec.share, spec.every_steps) and name not in audited.get(group, ())
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


def _rows(samples: Path, groups: list[str]) -> list[dict[str, Any]]:
    present = pyarrow.parquet.read_schema(samples).names
    columns = SCORER_INPUT + [name for name in LATER_SCORER_INPUT if name in present]
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


async def open_auditor(reward: RewardSpec, context: BuildContext, transport: Transport, run_folder: Path) -> Auditor:
    """Open the auditors of a job. One that is refused is left out: it must not end the worker that scores."""
    pipelines: dict[str, Pipeline] = {}
    for name in reward.auditors:
        try:
            pipelines[name] = await build_pipeline(reward.of_auditor(name), context.worker, context)
        except RefusedError as error:
            logger.error("auditor refused", scorer=name, error=str(error))
    return Auditor(context.worker, transport, run_folder, reward.auditors, pipelines)
