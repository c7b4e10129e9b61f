"""Conduct a run: admit → wait → update → publish → close, step by step. Called by ``worker``, on rank 0.

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
import time
from typing import Any

from plaudit_wire.errors import JobFailedError, RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.outage import OUTAGE
from plaudit_workers.training.conductor.announcements import Announcements, published_bytes
from plaudit_workers.training.conductor.backend_thread import BackendThread
from plaudit_workers.training.conductor.background_tasks import BackgroundTasks
from plaudit_workers.training.conductor.groups.admission import Admitter
from plaudit_workers.training.conductor.groups.closing import correct_counters, end_unseen
from plaudit_workers.training.conductor.groups.intake import GroupIntake
from plaudit_workers.training.conductor.open_step import OpenStep
from plaudit_workers.training.conductor.resume import take_over
from plaudit_workers.training.conductor.run_records import RunRecords
from plaudit_workers.training.conductor.step_report import StepReport
from plaudit_workers.training.conductor.step_training import StepTraining
from plaudit_workers.training.conductor.turns import Turns
from plaudit_workers.training.conductor.upkeep import Upkeep
from plaudit_workers.training.conductor.validation import Evaluation, Validation
from plaudit_workers.training.run.state import RunContext, RunState
from plaudit_workers.training.trainer_backend import TrainerBackend

logger = get_logger(__name__)


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
    """Conduct the steps of a run after it was taken over.

    Args:
        stop: finish the current update, then return.
    """

    def __init__(
        self,
        run: RunContext,
        state: RunState,
        thread: BackendThread,
        background: BackgroundTasks,
        stop: asyncio.Event,
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
        self._writing: asyncio.Task[None] | None = None
        self._saved_step = -1

    async def run(self, broken_off: dict[str, Any] | None) -> bool:
        """Go through the steps; return True if all are done.

        Args:
            broken_off: the rest of a step that was interrupted in its middle.
        """
        self._background.start_endless(self._intake.collect())
        self._background.start_endless(Upkeep(self._run, self._state, self._admitter).keep())
        self._background.start_endless(self._announcements.write_requested_files())
        done = await self._steps(broken_off)
        self._background.cancel_endless()
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
        if broken_off is None:
            return OpenStep(self._schedule, number), StepReport(number, self._run.clock.now())
        step = OpenStep(self._schedule, number, broken_off["accounted"], broken_off.get("replaced", 0))
        begun_by = self._state.lineage.parents[self._state.incarnation].incarnation
        return step, StepReport.restored(broken_off["report"], begun_by)

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
        await self._announcements.announce(announcement)
        report.figures["timing_s/update_weights"] = time.monotonic() - started
        self._background.start(self._admitter.admit_training())
        self._background.start(self._prune())

    async def _prune(self) -> None:
        try:
            workers = await self._run.transport.workers()
        except OUTAGE as error:
            logger.warning("cannot reach Redis; old weights stay until the next step", error=str(error))
            return
        in_use = [version for worker in workers for version in (worker.version, worker.loading)]
        await asyncio.to_thread(self._thread.backend.prune, in_use)

    async def _close(self, report: StepReport) -> None:
        closed = self._run.clock.now()
        evaluation = await self._evaluate(report.step)
        if evaluation is not None:
            report.figures |= evaluation.figures
            report.ended += zip(evaluation.groups, evaluation.records, strict=True)
        if self._writing is not None:
            await self._writing
        self._writing = self._background.start(self._records.step(report, closed))
        last = report.step == self._schedule.steps
        if last or (report.step and report.step % self._run.plan.checkpoint_every_steps == 0):
            await self._save()

    async def _evaluate(self, step: int) -> Evaluation | None:
        plan = self._run.plan.validation
        if plan is None or not plan.is_due(step, self._schedule.steps):
            return None
        return await self._validation.evaluate(self._stop)

    async def _save(self, step: OpenStep | None = None, report: StepReport | None = None) -> None:
        if self._writing is not None:
            await self._writing
        if step is not None or self._saved_step != self._state.version.number:
            path = await self._records.checkpoint(step, report)
            self._saved_step = self._state.version.number
            self._background.start(self._records.await_checkpoint(path))
