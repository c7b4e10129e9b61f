"""Train one step: wait → update → close, mini-batch by mini-batch.

``OpenStep`` decides what comes next: ready groups go in, decisions come out (pure). ``StepTraining`` carries the
decisions out. ``StepReport`` collects the samples, groups, waits and figures of the step while it is open.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import msgspec

from plaudit_metrics.statistics.steps import step_record
from plaudit_wire.errors import JobFailedError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import PAUSE, REDIS, UNKNOWN, GroupRecord, SampleRecord, StepRecord, WaitRecord
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.groups import (
    Admitter,
    GroupEnding,
    GroupIntake,
    close_groups,
    end_in_ledger,
    failed_samples,
    failure_reasons,
    is_permanent,
)
from plaudit_workers.training.resume import BackendThread
from plaudit_workers.training.schedule import ReadyGroup, Schedule, choose, join_mini_batches
from plaudit_workers.training.state import RunContext, RunState
from plaudit_workers.training.turns import BackgroundTasks, Turns

logger = get_logger(__name__)
_LOOK_EVERY_S = 1.0
_MOST_SKIPPED_STEPS = 3
"""By chance, a step of few samples may have none with a score."""


@dataclass(frozen=True)
class Wait:
    """Wait until more groups are ready."""


@dataclass(frozen=True)
class Update:
    """Train on these groups now: a closed mini-batch, in order of position."""

    groups: list[ReadyGroup]


@dataclass(frozen=True)
class Retry:
    """Drop these groups and admit their prompts again: too many scores failed."""

    groups: list[ReadyGroup]
    failed_share: float


@dataclass(frozen=True)
class Over:
    """End the step, whose groups are all accounted for; drop these, each with its reason."""

    dropped: list[ReadyGroup]


Decision = Wait | Update | Retry | Over


@dataclass
class OpenStep:
    """Hold the groups that the open step has taken so far, and decide what comes next.

    A mini-batch closes at its size, or when no more groups can arrive. Groups that cannot be trained count as accounted
    for. If scoring failed for more than ``max_failed_share`` of the samples, nothing more is trained: the remaining
    groups of the step are returned, to be admitted again. While groups are missing, that share is computed over those
    that are ready: a mini-batch above it is held until the step is complete, because a few broken prompts that arrive
    first must not stop a step, and a broken scorer must not train it. Groups whose scores are all equal free their
    slots again, ``max_replaced`` of them in a step (``dynamicSampling``).

    Attributes:
        accounted: groups of the step that ended (trained, dropped).
        replaced: groups without a signal whose slots were freed.
        retries: how often the step had too many failed scores.
    """

    schedule: Schedule
    step: int
    accounted: int = 0
    replaced: int = 0
    retries: int = 0
    _batch: list[ReadyGroup] = field(default_factory=list)
    _held: list[ReadyGroup] = field(default_factory=list)
    _untrainable: list[ReadyGroup] = field(default_factory=list)
    _num_samples: int = 0
    _num_failed: int = 0

    def snapshot(self) -> dict[str, int]:
        """Return the state to continue from if the trainer stops now.

        Groups that have not ended will be taken again; ``retries`` start anew, with repaired scorers.
        """
        return {"accounted": self.accounted, "replaced": self.replaced}

    @property
    def taken(self) -> set[str]:
        """Return the ids of the groups in the step."""
        return {group.flight.group for group in (*self._batch, *self._held, *self._untrainable)}

    @property
    def slots(self) -> int:
        """Return the number of groups that the step still has room for."""
        return self.schedule.prompts_per_step - self.accounted - len(self.taken)

    @property
    def batch_slots(self) -> int:
        """Return the number of groups that the current mini-batch still has room for."""
        return min(self.slots, self.schedule.mini_batch_size - len(self._batch))

    def replaceable(self, groups: Sequence[ReadyGroup]) -> list[ReadyGroup]:
        """Return those of the groups that are to be dropped for others, because their scores are all equal."""
        return [group for group in groups if group.uniform][: max(0, self.schedule.max_replaced - self.replaced)]

    def replace(self, groups: Sequence[ReadyGroup]) -> None:
        """Record that groups that were ready for the step were dropped for others."""
        self.replaced += len(groups)
        self._count_samples(groups)

    def take(self, groups: Sequence[ReadyGroup]) -> None:
        """Take ready groups, at most ``batch_slots`` at a time; a mini-batch that is held frees its slots."""
        self._count_samples(groups)
        for group in groups:
            (self._batch if group.trainable else self._untrainable).append(group)
        if self._batch and self.batch_slots == 0 and self._too_many_failed():
            self._held += self._batch
            self._batch = []

    def decide(self) -> Decision:
        """Return the next action. Report ``Update``, ``Retry`` and ``Over`` back by ``ended`` or ``returned``."""
        if self._batch and self.batch_slots == 0:
            return Update(_by_position(self._batch))
        if self.slots > 0:
            return Wait()
        left = self._held + self._untrainable
        if left and self._too_many_failed():
            return Retry(_by_position(left), self._failed_share())
        if self._held:
            return Update(_by_position(self._held[: self.schedule.mini_batch_size]))
        return Over(_by_position(self._untrainable))

    def ended(self, groups: Sequence[ReadyGroup]) -> None:
        """Record that the groups of an ``Update`` or ``Over`` ended."""
        self._forget(groups)
        self.accounted += len(groups)

    def returned(self, groups: Sequence[ReadyGroup]) -> None:
        """Free the slots of a ``Retry``'s groups, which are admitted again, and restart the count of failures."""
        self._forget(groups)
        self.retries += 1
        self._num_samples = self._num_failed = 0

    def _count_samples(self, groups: Sequence[ReadyGroup]) -> None:
        self._num_samples += sum(group.num_samples for group in groups)
        self._num_failed += sum(group.num_failed for group in groups)

    def _forget(self, groups: Sequence[ReadyGroup]) -> None:
        gone = {group.flight.group for group in groups}
        for taken in (self._batch, self._held, self._untrainable):
            taken[:] = [group for group in taken if group.flight.group not in gone]

    def _failed_share(self) -> float:
        return self._num_failed / self._num_samples if self._num_samples else 0.0

    def _too_many_failed(self) -> bool:
        return self._failed_share() > self.schedule.max_failed_share


def _by_position(groups: Sequence[ReadyGroup]) -> list[ReadyGroup]:
    return sorted(groups, key=lambda group: group.flight.position)


@dataclass
class StepReport:
    """Hold the record of a step in progress."""

    step: int
    opened: float
    """Server's clock."""
    samples: list[SampleRecord] = field(default_factory=list)
    records: list[GroupRecord] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    """The figures of each update."""
    update_s: float = 0.0
    stopped_s: float = 0.0
    """Seconds in which no trainer ran, between the one that was stopped in the step and the one that resumed it."""
    saved: float = 0.0
    """When the snapshot was taken (server's clock)."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further figures of the step."""
    begun_by: int = 0
    """The incarnation that stored the first groups of the step, if it was interrupted in its middle; else 0."""
    ended: list[tuple[Group, GroupRecord]] = field(default_factory=list)
    """Groups to store: all that ended, validation included."""

    def add(self, groups: Sequence[Group], records: Sequence[GroupRecord]) -> None:
        """Add training groups that ended in this step."""
        for group in groups:
            self.samples += sample_records(group, self.step)
        self.records += records
        self.ended += zip(groups, records, strict=True)

    def forget_causes(self) -> None:
        """Call the causes of the waits unknown: Redis's clock was set, so that no stamps tell what they were for."""
        self.waits = [wait if wait.cause else WaitRecord(wait.start, wait.end, [], UNKNOWN) for wait in self.waits]

    def record(self, incarnation: int, trainer_version: int, closed: float, duplicates: int = 0) -> StepRecord:
        """Return the record of the whole step.

        Args:
            trainer_version: number of the version that the step's first update started from.
            closed: server's clock.
            duplicates: publications and commits refused as such since the step before closed.
        """
        ends = [record.end for record in self.records]
        extra = {
            "timing_s/step": closed - self.opened - self.stopped_s,
            "timing_s/update_actor": self.update_s,
            "training/mini_batches": float(len(self.updates)),
            "training/groups": float(ends.count("trained")),
            "training/dropped": float(ends.count("dropped")),
        }
        return step_record(
            self.step,
            incarnation,
            self.samples,
            groups=self.records,
            waits=self.waits,
            opened=self.opened,
            closed=closed,
            stopped_s=self.stopped_s,
            update_s=self.update_s,
            trainer_version=trainer_version,
            duplicates=duplicates,
            extra=join_mini_batches(self.updates) | extra | self.figures,
        )

    def snapshot(self, now: float) -> str:
        """Return everything but ``ended`` as text, for a checkpoint in the middle of a step."""
        return base64.b64encode(msgspec.msgpack.encode(replace(self, ended=[], saved=now))).decode()

    @classmethod
    def restored(cls, snapshot: str, begun_by: int, now: float) -> StepReport:
        """Return the report of a ``snapshot``, which that incarnation took; the step goes on now."""
        report = msgspec.msgpack.decode(base64.b64decode(snapshot), type=cls)
        opened, stopped_s = report.opened, report.stopped_s + now - (report.saved or now)
        if now < report.saved:  # Redis's clock was set back meanwhile: what was trained until then still counts
            opened, stopped_s = now - (report.saved - report.opened - report.stopped_s), 0.0
            report.forget_causes()
        return replace(report, begun_by=begun_by, opened=opened, stopped_s=stopped_s)


def sample_records(group: Group, step: int) -> list[SampleRecord]:
    """Return the terminal samples of a group."""
    return [
        SampleRecord(
            group=group.id,
            index=sample.index,
            split=group.prompt.split,
            step=step,
            data_source=group.prompt.data_source,
            stamps=sample.stamps,
            scoring=sample.scoring,
            generation=sample.body.generation if sample.body else None,
            deliveries=sample.deliveries,
        )
        for sample in group.samples
        if sample.scoring is not None
    ]


@dataclass
class StepTraining:
    """Train the steps of a run, one after the other."""

    run: RunContext
    state: RunState
    thread: BackendThread
    intake: GroupIntake
    admitter: Admitter
    background: BackgroundTasks
    turns: Turns
    stop: asyncio.Event
    _skipped_steps: int = 0
    """Steps in a row of which every sample was skipped."""

    async def train(self, step: OpenStep, report: StepReport) -> bool:
        """Train on the step's groups as they become ready; return False if ``stop`` was set before the end.

        Raises:
            JobFailedError: too many scores failed, repeatedly, or too many updates in a row were discarded.
        """
        while True:
            decision = await self._wait(step, report)
            if isinstance(decision, Update):
                with self.state.at_work("updates the policy"):
                    if self.stop.is_set() or not await self._take_turn(report):
                        return False
                    await self._update(step, decision.groups, report)
            elif isinstance(decision, Retry):
                self._return(step, decision, report)
            elif isinstance(decision, Over):
                self._end(decision.dropped, report, self._dropped(report))
                step.ended(decision.dropped)
                self._refuse_skipped(step, report)
                return True
            else:
                return False

    async def _wait(self, step: OpenStep, report: StepReport) -> Decision:
        """Take ready groups until a decision is possible; return ``Wait`` if ``stop`` is set."""
        began, in_hand = 0.0, set[str]()
        while True:
            self._take_ready(step, report)
            decision = step.decide()
            if not isinstance(decision, Wait):
                break
            if self.stop.is_set():
                break
            if not began:
                began, in_hand = self.run.clock.now(), step.taken
                await self.turns.give_back()
            await self.intake.wait(_LOOK_EVERY_S)
        if began:
            awaited = sorted(step.taken - in_hand)
            if isinstance(decision, Wait):  # stopped before any of the step's groups ended the wait
                awaited = [flight.group for flight in self.state.ledger.train.in_flight.values()]
            ended, outages = self.run.clock.now(), self.run.clock.outages(began)
            report.waits += without_outages(wait_records(began, ended, awaited, self.state.paused_until), outages)
        return decision

    def _take_ready(self, step: OpenStep, report: StepReport) -> None:
        while step.batch_slots:
            taken = step.taken
            ready = [group for group in self.intake.training() if group.flight.group not in taken]
            in_flight = [f for f in self.state.ledger.train.in_flight.values() if f.group not in taken]
            chosen = choose(step.schedule, step.step, step.slots, in_flight, ready)[: step.batch_slots]
            if not chosen:
                return
            replaced = step.replaceable(chosen)
            if replaced:
                self._replace(step, replaced, report)
            step.take([group for group in chosen if group not in replaced])

    def _replace(self, step: OpenStep, groups: Sequence[ReadyGroup], report: StepReport) -> None:
        """Drop groups without a signal and admit further prompts for the step."""
        records = self._end_in_ledger(groups, report, self._dropped(report, "zero_variance"))
        step.replace(groups)
        self.state.ledger.train.add_extras(step.step, len(groups))
        report.figures["training/groups_replaced"] = float(step.replaced)
        self.background.start(self._close_and_admit(records))

    async def _close_and_admit(self, records: Sequence[GroupRecord]) -> None:
        await close_groups(self.run, self.state, records)  # makes room in Redis
        await self.admitter.admit_training()

    async def _take_turn(self, report: StepReport) -> bool:
        started = time.monotonic()
        taken = await self.turns.take()
        if self.turns.needed:
            waited = report.figures.get("timing_s/wait_for_gpus", 0.0)
            report.figures["timing_s/wait_for_gpus"] = waited + time.monotonic() - started
        return taken

    async def _update(self, step: OpenStep, chosen: Sequence[ReadyGroup], report: StepReport) -> None:
        taken, started = self.run.clock.now(), time.monotonic()
        figures = await self.thread.run(
            self.thread.backend.update, self.intake.get(group.flight.group for group in chosen)
        )
        report.update_s += time.monotonic() - started
        report.updates.append(figures)
        self.state.problem = ""
        self._end(chosen, report, GroupEnding("trained", report.step, taken))
        step.ended(chosen)

    def _return(self, step: OpenStep, retry: Retry, report: StepReport) -> None:
        """Drop the groups of a step in which too many scores failed; admit their prompts again after a pause."""
        failed = list(failed_samples(self.intake.get(group.flight.group for group in retry.groups)))
        pauses = self.run.plan.retry_pauses_s
        last = step.retries >= len(pauses) or (retry.failed_share == 1 and is_permanent(failed))
        pause_s = 0.0 if last else pauses[step.retries]
        missing, reasons = f"{retry.failed_share:.0%} of its samples have no score", failure_reasons(failed)
        logger.error(
            "step not trained", step=step.step, failed_share=retry.failed_share, reasons=reasons, next_try_s=pause_s
        )
        self.state.problem = f"step {step.step} not trained: {missing}, next try in {pause_s:.0f} s. {reasons}"
        self.state.paused_until = self.run.clock.now() + pause_s
        self._end(retry.groups, report, self._dropped(report, "too_many_failed", again=True))
        step.returned(retry.groups)
        report.figures["training/retries"] = float(step.retries)
        if last:
            tries = "try" if step.retries == 1 else "tries"
            raise JobFailedError(
                f"step {step.step} not trained: {missing} after {step.retries} {tries} "
                f"(reward.maxFailedShare is {step.schedule.max_failed_share:.0%}). {reasons}. Fix the scorers or their "
                "data, then continue with --resume"
            )

    def _refuse_skipped(self, step: OpenStep, report: StepReport) -> None:
        """Fail the job when its scorers skip every sample of step after step, or of all of its steps.

        Samples whose scoring failed may be among them, fewer than ``reward.maxFailedShare`` allows.
        """
        scorings = [sample.scoring for sample in report.samples if sample.scoring is not None]
        num_skipped = sum(scoring.outcome == "skipped" for scoring in scorings)
        if report.updates or not num_skipped or any(scoring.value is not None for scoring in scorings):
            self._skipped_steps = 0
            return
        self._skipped_steps += 1
        if self._skipped_steps < min(_MOST_SKIPPED_STEPS, step.schedule.steps):
            return
        ((reason, count),) = Counter(scoring.reason for scoring in scorings).most_common(1)
        how = "skipped" if num_skipped == len(scorings) else "skipped or failed"
        self.state.problem = f"step {step.step} not trained: its scorers {how} every sample. {count} × {reason}"
        raise JobFailedError(
            f"{self.state.problem}. It was so in {self._skipped_steps} steps in a row. A sample needs a scorer that "
            "gives it a value: fix the scorers, or the agent that they depend on, then continue with --resume"
        )

    def _dropped(self, report: StepReport, reason: str = "", *, again: bool = False) -> GroupEnding:
        return GroupEnding("dropped", report.step, self.run.clock.now(), reason, again)

    def _end(self, ended: Sequence[ReadyGroup], report: StepReport, ending: GroupEnding) -> None:
        records = self._end_in_ledger(ended, report, ending)
        self.background.start(close_groups(self.run, self.state, records))

    def _end_in_ledger(self, ended: Sequence[ReadyGroup], report: StepReport, ending: GroupEnding) -> list[GroupRecord]:
        groups: list[Group] = self.intake.get(group.flight.group for group in ended)
        self._record_results(groups, report, ending)
        records = end_in_ledger(self.run, self.state, groups, ending)
        report.add(groups, records)
        return records

    def _record_results(self, groups: Sequence[Group], report: StepReport, ending: GroupEnding) -> None:
        """Record the mean rewards of groups that show how well the policy solves their prompts."""
        if self.run.plan.skip_solved is None or not (ending.end == "trained" or ending.reason == "zero_variance"):
            return
        for group in groups:
            scorings = [sample.scoring for sample in group.samples if sample.scoring is not None]
            values = [scoring.value for scoring in scorings if scoring.value is not None]
            if values:
                self.state.order.record(group.prompt.position, report.step, mean(values), self.run.data)
        report.figures["training/prompts_solved"] = float(self.state.order.num_solved)


def wait_records(began: float, ended: float, awaited: list[str], paused_until: float) -> list[WaitRecord]:
    """Split a wait into the pause after a failed try, if it fell into one, and the wait for the groups that ended it.

    A wait that ended before the pause did was ended by groups that were already in flight, so it is no pause.

    Args:
        began: seconds on the server's clock, as the others.
        paused_until: when the last pause ended or will end.
    """
    if not began < paused_until <= ended:
        return [WaitRecord(began, ended, awaited)]
    return [WaitRecord(began, paused_until, [], PAUSE), WaitRecord(paused_until, ended, awaited)]


def without_outages(waits: Sequence[WaitRecord], outages: Sequence[tuple[float, float]]) -> list[WaitRecord]:
    """Cut out of waits the stretches in which Redis did not answer, in order and disjoint, as waits of their own."""
    records: list[WaitRecord] = []
    for wait in waits:
        start = wait.start
        for began, ended in outages:
            began, ended = max(began, start), min(ended, wait.end)
            if began >= ended:
                continue
            if start < began:
                records.append(WaitRecord(start, began, wait.awaited, wait.cause))
            records.append(WaitRecord(began, ended, [], REDIS))
            start = ended
        if start < wait.end or start == wait.start:
            records.append(WaitRecord(start, wait.end, wait.awaited, wait.cause))
    return records
