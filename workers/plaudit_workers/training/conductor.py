"""Conduct a run: admit → wait → update → publish → close, step by step, on rank 0.

A trainer that dies leaves the following, in the order of a step's events:

1. Each mini-batch: update, then its groups are closed. The checkpoint does not contain that update: groups that were
   open or closed since are used again or rolled back (``resume``).
2. Version s is published and announced, and the next prompts are admitted. Samples that rollouts generate with it carry
   a version of a lost future, which is recognised and rolled back.
3. Validation; stored samples and ``steps.jsonl``, written while the next step runs. The step is repeated and written
   again under a higher incarnation; readers take the newest.
4. The checkpoint, written atomically after all of that. From here on the step survives.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from plaudit_metrics.sources.audits import AuditHistory, drift_file, is_audited, read_drift
from plaudit_metrics.statistics.audits import TREND_STEPS, WINDOW_STEPS, drift_figures, step_figures
from plaudit_metrics.statistics.verdict import REPLY_KEY
from plaudit_reward.served_machines import run_provider
from plaudit_wire.errors import JobFailedError, RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import REDIS, VALIDATES, SandboxWork, StepRecord, WaitRecord, WorkerRecord
from plaudit_wire.redis import OUTAGE
from plaudit_workers.files import whole_file
from plaudit_workers.stored_samples import store_groups
from plaudit_workers.training.groups import (
    Admitter,
    GroupIntake,
    correct_counters,
    discard_group,
    end_unseen,
    failed_samples,
    failure_reasons,
)
from plaudit_workers.training.machines import EndedMachines
from plaudit_workers.training.resume import BackendThread, TrainerBackend, take_over
from plaudit_workers.training.state import RunContext, RunState, refuse_replaced
from plaudit_workers.training.step import OpenStep, StepReport, StepTraining, without_outages
from plaudit_workers.training.turns import Announcements, BackgroundTasks, Turns, published_bytes
from plaudit_workers.training.validation import Validation

logger = get_logger(__name__)
_COUNTED = ("duplicates", "redelivered:", "dead:", "poison", "groups_recreated")
"""Prefixes of further counters of Redis that ``ledger.json`` shows."""
_EVERY_S = 1.0
_BEAT_EVERY_S = 5.0


async def conduct(run: RunContext, backend: TrainerBackend, stop: asyncio.Event) -> bool:
    """Conduct a run until all steps are done or ``stop`` is set; write a checkpoint in both cases.

    Return True if all steps are done. When ``stop`` is set, the current update is finished first.

    Raises:
        JobFailedError: too many scores failed, repeatedly, or too many updates in a row were discarded.
        StaleIncarnationError: another trainer took over.
        RefusedError: a checkpoint cannot be loaded or is missing, or the disk is full.
    """
    thread = BackendThread(backend)
    await run.transport.retry_through_outage(run.clock.synchronise)
    state, broken_off = await take_over(run, thread)
    try:
        async with asyncio.TaskGroup() as tasks:
            done = await Conductor(run, state, thread, BackgroundTasks(tasks), stop).run(broken_off)
        await thread.run(backend.close)
    except BaseExceptionGroup as group:
        error = group.exceptions[0]
        if isinstance(error, JobFailedError | RefusedError):
            await thread.run(backend.close)
        raise error from None
    finally:
        thread.abandon()
    return done


class Conductor:
    """Conduct the steps of a run after it was taken over."""

    def __init__(
        self, run: RunContext, state: RunState, thread: BackendThread, background: BackgroundTasks, stop: asyncio.Event
    ) -> None:
        self._run = run
        self._state = state
        self._thread = thread
        self._background = background
        self._stop = stop
        self._schedule = run.plan.schedule
        self._admitter = Admitter(run, state)
        self._intake = GroupIntake(run, state)
        self._announcements = Announcements(run, state, thread)
        self._turns = Turns(run, state, thread, self._announcements, stop)
        self._training = StepTraining(run, state, thread, self._intake, self._admitter, background, self._turns, stop)
        self._records = RunRecords(run, state, thread)
        self._validation = Validation(run, state, self._admitter, self._intake)
        self._machines = _ended_machines(run, state)
        self._writing: asyncio.Task[None] | None = None
        self._saved_step = -1
        self._stamps_fit_after = -1
        """The newest step whose groups may have been begun before Redis's clock was set."""

    async def run(self, broken_off: dict[str, Any] | None) -> bool:
        """Go through the steps, first the rest of one that was broken off; return True if all are done."""
        self._background.start_endless(self._intake.collect())
        upkeep = Upkeep(self._run, self._state, self._admitter, self._machines)
        self._background.start_endless(upkeep.keep())
        self._background.start_endless(upkeep.keep_time())
        self._background.start_endless(self._announcements.write_requested_files())
        if self._machines is not None:
            self._machines.begin()
            self._background.start_endless(self._machines.remove())
        done = await self._steps(broken_off)
        self._background.cancel_endless()
        if self._machines is not None and done:
            await self._machines.end()
        return done

    async def _steps(self, broken_off: dict[str, Any] | None) -> bool:
        self._background.start(self._admitter.admit_training())
        if self._run.plan.validation and self._state.version.number == 0 and broken_off is None:
            await self._close(StepReport(0, self._run.clock.now()))
        while self._steps_are_left and not self._stop.is_set():
            step, report = self._open(broken_off)
            broken_off = None
            if not await self._train(step, report):
                await self._save(step, report)
                return False
            with self._state.at_work("publishes the weights"):
                await self._publish(report)
            await self._close(report)
        await self._background.join()
        if self._steps_are_left:
            await self._save()
            return False
        await end_unseen(self._run, self._state, [flight.group for flight in self._state.ledger.flights()], "run_ended")
        await self._records.ledger()
        await correct_counters(self._run, self._state)
        return True

    @property
    def _steps_are_left(self) -> bool:
        return self._state.version.number < self._schedule.steps

    def _open(self, broken_off: dict[str, Any] | None) -> tuple[OpenStep, StepReport]:
        number = self._state.version.number + 1
        set_by_s = self._run.clock.settle()
        self._state.paused_until += set_by_s
        if set_by_s:  # groups that were begun before have stamps of both clocks
            self._stamps_fit_after = number - 1 + self._schedule.max_staleness
        if broken_off is None:
            return OpenStep(self._schedule, number), StepReport(number, self._run.clock.now())
        step = OpenStep(self._schedule, number, broken_off["accounted"], broken_off.get("replaced", 0))
        begun_by = self._state.lineage.parents[self._state.incarnation].incarnation
        return step, StepReport.restored(broken_off["report"], begun_by, self._run.clock.now())

    async def _train(self, step: OpenStep, report: StepReport) -> bool:
        try:
            return await self._training.train(step, report)
        except JobFailedError:
            await self._background.join()
            await self._save(step, report)
            await self._background.join()
            await self._records.ledger()
            raise

    async def _publish(self, report: StepReport) -> None:
        started = time.monotonic()
        version = PolicyVersion(self._state.incarnation, report.step)
        announcement = await self._thread.run(self._thread.backend.publish, version)
        report.figures["training/published_bytes"] = await asyncio.to_thread(published_bytes, announcement)
        await self._turns.free_memory()
        began = self._run.clock.now()
        await self._announcements.announce(announcement)
        announced = [WaitRecord(began, self._run.clock.now(), [])]
        report.waits += [w for w in without_outages(announced, self._run.clock.outages(began)) if w.cause == REDIS]
        report.figures["timing_s/update_weights"] = time.monotonic() - started
        self._background.start(self._admitter.admit_training())
        try:
            workers = await self._run.transport.workers()
        except OUTAGE as error:
            logger.warning("cannot reach Redis; old weights stay until the next step", error=str(error))
            return
        if loaded := [worker.loaded_s for worker in workers if worker.loaded_s]:
            report.figures["timing_s/load_weights"] = max(loaded)
        in_use = [version for worker in workers for version in (worker.version, worker.loading)]
        self._background.start(asyncio.to_thread(self._thread.backend.prune, in_use))

    async def _close(self, report: StepReport) -> None:
        closed = self._run.clock.now()
        report.figures[REPLY_KEY] = self._run.clock.reply_s(report.opened)
        if self._run.clock.set_by_s or report.step <= self._stamps_fit_after:
            report.forget_causes()
        if self._machines is not None:
            report.figures |= self._machines.release_figures()
        plan = self._run.plan.validation
        if plan is not None and plan.is_due(report.step, self._schedule.steps):
            with self._state.at_work(VALIDATES):
                evaluation = await self._validation.evaluate(self._stop)
            if evaluation is not None:
                report.figures |= evaluation.figures
                report.ended += zip(evaluation.groups, evaluation.records, strict=True)
        if self._writing is not None:
            await self._writing
        self._writing = self._background.start(self._records.step(report, closed))
        last = report.step == self._schedule.steps
        if last or (report.step and report.step % self._run.plan.checkpoint_every_steps == 0):
            await self._save()

    async def _save(self, step: OpenStep | None = None, report: StepReport | None = None) -> None:
        if self._writing is not None:
            await self._writing
        if step is not None or self._saved_step != self._state.version.number:
            with self._state.at_work("saves a checkpoint"):
                path = await self._records.checkpoint(step, report)
            self._saved_step = self._state.version.number
            self._background.start(self._records.await_checkpoint(path))


def _ended_machines(run: RunContext, state: RunState) -> EndedMachines | None:
    """Return what removes machines of ended groups; None for a job without machines."""
    spec = run.plan.sandboxes
    if spec is None:
        return None
    return EndedMachines(run.folder, spec.keep, state.ledger, run_provider(spec, run.folder))


class RunRecords:
    """Write the records of a run: ``steps.jsonl``, samples, ``ledger.json``, checkpoints."""

    def __init__(self, run: RunContext, state: RunState, thread: BackendThread) -> None:
        self._run = run
        self._state = state
        self._thread = thread
        self._duplicates: int | None = None
        """Refused in the whole run until the newest step closed; None before this trainer's first one."""
        self._taken_over: int | None = None
        """Prompts that rollouts took over from others, likewise."""
        self._audits = AuditHistory(run.folder, TREND_STEPS)
        self._drawn: dict[int, dict[str, set[str]]] = {}
        """Step → auditor → the groups that it is to score, of the newest steps of this trainer."""

    async def step(self, report: StepReport, closed: float) -> None:
        """Write a step that closed then (server's clock): its line, samples, record for the metrics, the ledger."""
        if failed := list(failed_samples([group for group, _ in report.ended])):
            reasons = failure_reasons(failed)
            logger.warning("samples without a score", step=report.step, count=len(failed), reasons=reasons)
        counters = await self._run.transport.retry_through_outage(self._run.streams.counters)
        refused = counters["duplicates"]
        known = self._duplicates if self._duplicates is not None else 0 if self._state.incarnation == 1 else refused
        self._duplicates = refused
        taken_over = counters.get("redelivered:prompts", 0)
        if self._taken_over is not None:
            report.figures["reward_pipeline/redelivered_prompts"] = float(max(taken_over - self._taken_over, 0))
        self._taken_over = taken_over
        record = await asyncio.to_thread(self._write, report, closed, refused - known)
        await self._run.streams.record_step(record)
        await self.ledger()

    def _write(self, report: StepReport, closed: float, duplicates: int) -> StepRecord:
        if (self._run.plan.auditors or self._run.plan.watches_drift) and report.step:
            report.figures |= self._audit_figures(report)
        record = report.record(self._state.incarnation, max(report.step - 1, 0), closed, max(duplicates, 0))
        self._run.sinks.write(record, self._store(report))
        return record

    def _audit_figures(self, report: StepReport) -> dict[str, float]:
        """Return the figures of what has been audited until now; this step's own groups are audited after it."""
        scored = [record.group for record in report.records if record.num_scored]
        auditors = self._run.plan.auditors
        self._drawn[report.step] = {
            name: {group for group in scored if is_audited(group, report.step, audit.share, audit.every_steps)}
            for name, audit in auditors.items()
        }
        self._drawn = {step: drawn for step, drawn in self._drawn.items() if step > report.step - WINDOW_STEPS}
        drawn = {name: set[str]().union(*(of_step[name] for of_step in self._drawn.values())) for name in auditors}
        try:
            drift = drift_figures(read_drift(drift_file(self._run.folder)), report.step)
            return step_figures(self._audits.read(), auditors, drawn, report.step) | drift
        except OSError as error:
            logger.warning("audits cannot be read", error=str(error))
            return {}

    def _store(self, report: StepReport) -> Path | None:
        """Return the file of the step's samples; None if they are not kept."""
        if not self._run.plan.keep_samples or not (report.ended or report.begun_by):
            return None
        groups = [group for group, _ in report.ended]
        records = {record.group: record for _, record in report.ended}
        folder = self._run.folder / "samples"
        return store_groups(folder, report.step, self._state.incarnation, groups, records, report.begun_by)

    async def ledger(self) -> None:
        """Write ``ledger.json`` and compare Redis's counters with it; raise ``RuntimeError`` if it does not add up."""
        ledger = self._state.ledger
        counters = await self._run.transport.retry_through_outage(self._run.streams.counters)
        own = ledger.counters()
        if any(counters.get(name, 0) != count for name, count in own.items()):
            self._state.counters_suspect = True  # often only because a prompt is being admitted just now
        beside = {name: count for name, count in counters.items() if name.startswith(_COUNTED)}
        content: dict[str, Any] = {
            **own,
            "open": sum(1 for _ in ledger.flights()),
            **beside,
            "problems": ledger.problems(),
            "as_of": {"step": self._state.version.number, "incarnation": self._state.incarnation},
        }
        await asyncio.to_thread(self._write_ledger, content)
        if content["problems"]:
            raise RuntimeError(f"the ledger does not add up: {content['problems']}")

    def _write_ledger(self, content: dict[str, Any]) -> None:
        with whole_file(self._run.folder / "ledger.json") as path:
            path.write_text(json.dumps(content, indent=1) + "\n")

    async def checkpoint(self, open_step: OpenStep | None = None, report: StepReport | None = None) -> Path:
        """Begin a checkpoint and return its folder; with ``open_step`` and ``report`` in the middle of a step.

        Raises:
            StaleIncarnationError: another trainer took over; its checkpoints must not be mixed with ours.
        """
        state = self._state
        refuse_replaced(self._run.folder / "checkpoints", state.incarnation)
        step = state.version.number
        middle = None
        if open_step is not None and report is not None:
            middle = {**open_step.snapshot(), "report": report.snapshot(self._run.clock.now())}
            await asyncio.to_thread(self._store, report)
        state.order.forget_ended(state.ledger.train)
        extra = {
            "step": step,
            "incarnation": state.incarnation,
            "ledger": state.ledger.snapshot(),
            "prompt_order": state.order.snapshot(),
            "open_step": middle,
            "data": None if self._run.data_facts is None else self._run.data_facts.plain(),
        }
        return await self._thread.run(self._thread.backend.save, step, extra)

    async def await_checkpoint(self, path: Path) -> None:
        """Wait until the checkpoint begun last is in place, and log it."""
        await asyncio.to_thread(self._thread.backend.finish_saving)
        logger.info("checkpoint written", path=str(path))


class Upkeep:
    """Run the trainer's periodic work: heartbeat, deadlines, admissions that found no room, lost groups.

    It runs beside the steps about once a second, also during an update.
    """

    def __init__(
        self, run: RunContext, state: RunState, admitter: Admitter, machines: EndedMachines | None = None
    ) -> None:
        self._run = run
        self._state = state
        self._admitter = admitter
        self._machines = machines
        self._next_beat = 0.0
        self._started = 0.0
        """When the first heartbeat was sent (server's clock); 0 before."""
        self._reported: tuple[str, str, list[str]] = ("", "", [])
        self._unknown: set[str] = set()

    async def keep(self) -> None:
        """Run until cancelled, through outages of Redis."""
        await self._repeat(self._once)

    async def keep_time(self) -> None:
        """Follow Redis's clock until cancelled: no other call that hangs hides when an outage began."""
        await self._repeat(self._run.clock.synchronise)

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except OUTAGE as error:
                self._run.transport.outages.report(error)
            await asyncio.sleep(_EVERY_S)

    async def _once(self) -> None:
        await self._beat()
        await self._run.streams.release_expired()
        open_groups = set(await self._run.streams.open_groups())
        await self._return_lost(open_groups)
        await self._discard_unknown(open_groups)
        if not self._admitter.pending:
            await correct_counters(self._run, self._state)
        await self._admitter.admit_training()

    async def _beat(self) -> None:
        problem, doing = self._state.problem, self._state.doing
        notices = [*filter(None, [self._run.data_notice]), *self._run.sinks.notices]
        if time.monotonic() >= self._next_beat or (problem, doing, notices) != self._reported:
            self._next_beat, self._reported = time.monotonic() + _BEAT_EVERY_S, (problem, doing, notices)
            self._started = self._started or self._run.clock.now()
            version = str(self._state.version)
            record = WorkerRecord(
                worker=self._run.worker,
                role="trainer",
                version=version,
                started=self._started,
                problem=problem,
                notices=notices,
                doing=doing,
                sandboxes=None if self._machines is None else SandboxWork(self._machines.count),
            )
            await self._run.transport.beat(record)

    async def _return_lost(self, open_groups: set[str]) -> None:
        """Admit the prompts of groups that Redis has lost again (FLUSHALL, failover)."""
        names = [flight.group for flight in self._state.ledger.flights()]
        doubtful = [name for name in names if name not in open_groups and self._can_be_lost(name)]
        for group in await self._run.streams.missing(doubtful):
            if self._state.ledger.find(group) and self._can_be_lost(group):
                self._state.ledger.end(group, "dropped", "lost", again=True)
                self._state.counters_suspect = True
                logger.error("group lost", group=group)

    def _can_be_lost(self, group: str) -> bool:
        return group not in self._run.streams.taken and group not in self._admitter.pending

    async def _discard_unknown(self, open_groups: set[str]) -> None:
        """Close groups again that ended long ago and reappeared with an old append-only file; never train them."""
        unknown = {group for group in open_groups if self._state.ledger.find(group) is None}
        for group in unknown & self._unknown:  # seen twice: not one that is being closed just now
            logger.error("group reappeared", group=group)
            await discard_group(self._run, self._state, group)
        self._unknown = unknown
