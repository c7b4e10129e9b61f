"""Take a group through the trainer: admitted, accepted when it is ready, ended.

``Admitter`` creates groups in the ledger and in Redis, as far as the schedule allows. ``GroupIntake`` takes ready ones
from the stream and shows them to the conductor. Groups end in the ledger first, which is authoritative, then in Redis.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from redis.exceptions import ResponseError

from plaudit_metrics.statistics.columns import FailureCounts
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion, Prompt
from plaudit_wire.records import GroupEnd, GroupRecord, Split
from plaudit_wire.redis import OUTAGE
from plaudit_workers.stream.calls import Admission
from plaudit_workers.stream.groups import Group, GroupSample
from plaudit_workers.training.schedule import GroupInFlight, ReadyGroup, admissible
from plaudit_workers.training.state import RunContext, RunState

logger = get_logger(__name__)
_MOST_KINDS = 3
_TAKEN_AT_ONCE = 64
_BLOCK_S = 1.0
_PAUSE_S = 0.5
_AT_ONCE = 64


class Admitter:
    """Create groups for positions; never waits for room."""

    def __init__(self, run: RunContext, state: RunState) -> None:
        self._run = run
        self._state = state
        self._lock = asyncio.Lock()
        self.pending: set[str] = set()
        """Groups in the ledger that Redis may not have yet."""

    async def admit_training(self) -> None:
        """Admit every training prompt that the schedule allows now."""
        async with self._lock:
            positions = self._state.ledger.train
            due = admissible(self._run.plan.schedule, self._state.version.number, positions)
            if self._run.clock.now() >= self._state.paused_until:
                await self._admit_in_turn("train", due)

    async def admit_validation(self, positions: Sequence[int]) -> None:
        """Admit these validation prompts, as far as there is room."""
        async with self._lock:
            await self._admit_in_turn("validation", positions)

    async def _admit_in_turn(self, split: Split, positions: Sequence[int]) -> None:
        for start in range(0, len(positions), _AT_ONCE):
            part = positions[start : start + _AT_ONCE]
            if not all(await asyncio.gather(*(self._admit(split, position) for position in part))):
                return

    async def _admit(self, split: Split, position: int) -> bool:
        prompt = self._prompt(split, position)
        flight = GroupInFlight(prompt.group, position, prompt.attempt, prompt.step, prompt.min_version.number)
        self._state.ledger.admit(split, flight)
        self.pending.add(prompt.group)
        try:
            outcome = await self._run.streams.admit(prompt)
        finally:
            self.pending.discard(prompt.group)
        if outcome in (Admission.admitted, Admission.duplicate):  # duplicate: a call that was repeated
            return True
        if self._state.ledger.find(prompt.group) is None:  # admitted by a call whose reply was lost, and ended since
            return True
        self._state.ledger.withdraw(prompt.group)
        logger.warning("prompt not admitted", group=prompt.group, outcome=outcome.name)
        return False

    def _prompt(self, split: Split, position: int) -> Prompt:
        plan, state = self._run.plan, self._state
        validation = plan.validation if split == "validation" else None
        if split == "validation":
            assert self._run.validation_data is not None
            row = self._run.validation_data.prompt_at(position)
        else:
            step_of = partial(state.ledger.train.step_of, plan.schedule)
            row = self._run.data.prompt_at(state.order.place(position, step_of, self._run.data))
        attempt = state.ledger.splits[split].attempt(position)
        return Prompt(
            group=f"{split[0]}-{position}-{state.incarnation}.{attempt}",
            position=position,
            split=split,
            step=state.version.number if validation else state.ledger.train.step_of(plan.schedule, position),
            n=validation.samples_per_prompt if validation else plan.samples_per_prompt,
            min_version=state.version,
            seed=sample_seed(plan.seed, split, position),
            sampling=validation.sampling if validation else plan.sampling,
            data_source=row.data_source,
            prompt=row.prompt_text,
            prompt_ids=row.prompt_ids,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            messages=row.messages,
            attempt=attempt,
            images=list(row.images),
        )


def sample_seed(run_seed: int, split: Split, position: int) -> int:
    """Return the seed of a position's first sample: below 2**62, far from those of other positions."""
    digest = hashlib.sha256(f"{run_seed} {split} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


class GroupIntake:
    """Hold the ready groups that the trainer has accepted.

    They stay in ``TrainerStreams.taken`` until they are closed; the ledger marks those accepted here.
    """

    def __init__(self, run: RunContext, state: RunState) -> None:
        self._run = run
        self._state = state
        self._arrived = asyncio.Event()

    async def collect(self) -> None:
        """Take groups until cancelled, through outages of Redis."""
        while True:
            try:
                groups = await self._run.streams.take_ready(_TAKEN_AT_ONCE, _BLOCK_S)
                for group in groups:
                    await self._accept(group)
            except OUTAGE as error:
                self._run.transport.outages.report(error)
                await asyncio.sleep(_PAUSE_S)
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                await self._run.transport.recreate_groups()

    async def wait(self, timeout_s: float) -> None:
        """Return when a group has arrived since the last call, or after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return
        self._arrived.clear()

    def training(self) -> list[ReadyGroup]:
        """Return the training groups in the order in which they became ready, as the schedule needs them."""
        flights = self._state.ledger.train.in_flight
        return [summary(group, flights[group.id], self._run.plan.filter_truncated) for group in self._of("train")]

    def validation(self) -> list[Group]:
        """Return the validation groups."""
        return self._of("validation")

    def get(self, ids: Iterable[str]) -> list[Group]:
        """Return these groups."""
        return [self._run.streams.taken[group] for group in ids]

    def _of(self, split: Split) -> list[Group]:
        flights = self._state.ledger.splits[split].in_flight
        taken = self._run.streams.taken.values()
        return [group for group in taken if (flight := flights.get(group.id)) is not None and flight.arrived]

    async def _accept(self, group: Group) -> None:
        flight = self._state.ledger.find(group.id)
        if flight is None:
            logger.warning("closing a group that is not in flight", group=group.id)
            await discard_group(self._run, self._state, group.id)
            return
        versions = sampled_versions(group)
        if not all(self._state.lineage.survives(version, self._state.version) for version in versions):
            ending = GroupEnding(
                "dropped", self._state.version.number + 1, self._run.clock.now(), reason="rolled_back", again=True
            )
            await end_groups(self._run, self._state, [group], ending)
            return
        oldest = min((version.number for version in versions), default=flight.version)
        in_flight = self._state.ledger.splits[group.prompt.split].in_flight
        in_flight[group.id] = replace(flight, version=oldest, arrived=True)
        self._arrived.set()


def sampled_versions(group: Group) -> set[PolicyVersion]:
    """Return the policy versions that sampled a token of a group."""
    return {
        PolicyVersion(incarnation, number)
        for sample in group.samples
        if sample.body is not None
        for _, incarnation, number in sample.body.version_spans
    }


def summary(group: Group, flight: GroupInFlight, filter_truncated: bool = False) -> ReadyGroup:
    """Reduce a group to what the schedule needs.

    Args:
        filter_truncated: samples that ended at a limit count as such without a score.
    """
    num_failed = sum(map(has_failed, group.samples))
    scored = [each for each in group.samples if each.scoring is not None and each.scoring.value is not None]
    kept = {each.scoring.value for each in scored if each.scoring and not (filter_truncated and _is_truncated(each))}
    uniform = len(scored) > 1 and len(kept) < 2
    return ReadyGroup(flight, len(group.samples), num_failed, trainable=group.phase == "ready", uniform=uniform)


def _is_truncated(sample: GroupSample) -> bool:
    return sample.body is not None and sample.body.generation.is_truncated


@dataclass(frozen=True)
class GroupEnding:
    """Describe how some groups end."""

    end: GroupEnd
    step: int
    """The step in which they are closed."""
    taken: float
    """When the trainer took them (server's clock)."""
    reason: str = ""
    """Cause of the drop; empty: each group's own reason."""
    again: bool = False
    """Their prompts are admitted again."""


async def end_groups(
    run: RunContext, state: RunState, groups: Sequence[Group], ending: GroupEnding
) -> list[GroupRecord]:
    """End groups that the trainer holds; return their records, in the same order."""
    records = end_in_ledger(run, state, groups, ending)
    await close_groups(run, state, records)
    return records


def end_in_ledger(run: RunContext, state: RunState, groups: Sequence[Group], ending: GroupEnding) -> list[GroupRecord]:
    """End groups in the ledger; ``close_groups`` has to follow."""
    records = [group_record(group, ending, run.clock.now()) for group in groups]
    for record in records:
        state.ledger.end(record.group, record.end, record.reason, again=ending.again)
    state.closing += 1
    return records


async def close_groups(run: RunContext, state: RunState, records: Sequence[GroupRecord]) -> None:
    """Close groups in Redis, which counts the ends and frees the memory."""
    try:
        closed = await asyncio.gather(
            *(run.streams.close(record.group, record.end, record.reason, record) for record in records)
        )
    finally:
        state.closing -= 1
    if not all(closed):
        state.counters_suspect = True


async def end_unseen(run: RunContext, state: RunState, group_ids: Sequence[str], reason: str) -> None:
    """Drop groups in flight that the trainer does not hold."""
    for group_id in group_ids:
        state.ledger.end(group_id, "dropped", reason)
    await asyncio.gather(*(run.streams.close(group_id, "dropped", reason) for group_id in group_ids))


async def discard_group(run: RunContext, state: RunState, group_id: str) -> None:
    """Close a group that is not in the ledger; Redis's counters are corrected later."""
    await run.streams.close(group_id, "dropped", "rolled_back")
    state.counters_suspect = True


async def correct_counters(run: RunContext, state: RunState) -> None:
    """Restore Redis's counters from the ledger if they may differ. No admission may be in progress."""
    if state.counters_suspect and not state.closing:
        state.counters_suspect = False
        await run.streams.restore(state.ledger.counters(), state.version.number)


def group_record(group: Group, ending: GroupEnding, closed: float) -> GroupRecord:
    """Describe the course of a group."""
    return GroupRecord(
        group=group.id,
        split=group.prompt.split,
        step=ending.step,
        end=ending.end,
        num_samples=len(group.samples),
        num_scored=sum(sample.scoring is not None and sample.scoring.is_scored for sample in group.samples),
        admitted=group.admitted,
        closed=closed,
        terminal=group.terminal,
        ready=group.ready,
        taken=ending.taken,
        reason=(ending.reason or group.reason or "unknown") if ending.end == "dropped" else "",
    )


def has_failed(sample: GroupSample) -> bool:
    """Return True if scoring the sample failed. A sample that its scorers skipped on purpose did not fail."""
    return sample.scoring is None or sample.scoring.has_failed


def failed_samples(groups: Sequence[Group]) -> Iterator[GroupSample]:
    """Yield the samples of the groups whose scoring failed."""
    return (sample for group in groups for sample in group.samples if has_failed(sample))


def failure_reasons(samples: Sequence[GroupSample]) -> str:
    """Return the most frequent kinds of failure, such as ``mine: 64 × KeyError: 'answer' (reward.py:2 in score)``."""
    counts = FailureCounts()
    for sample in samples:
        if sample.scoring is not None:
            counts.add(sample.scoring)
    failures = counts.failures()
    shown = [f"{failure.scorer}: {failure}" for failure in failures[:_MOST_KINDS]]
    others = sum(failure.count for failure in failures[_MOST_KINDS:])
    return "; ".join([*shown, f"{others} × other reasons"] if others else shown)


def is_permanent(samples: Sequence[GroupSample]) -> bool:
    """Return True if every failure is a data error: the scorer or its data is wrong, and waiting changes neither."""
    return all(sample.scoring is not None and sample.scoring.outcome == "data_error" for sample in samples)
