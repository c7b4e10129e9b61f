"""Conducts a run: admit → wait → update → publish → close, step by step. Called by ``worker``, on rank 0.

What a trainer that dies leaves, in the order of events of a step:

1. Each mini-batch: update, then its groups are closed. The checkpoint does not know that update: what was open or
   closed since is used again or rolled back (``resume``).
2. Version s is published and announced, the next prompts are admitted. What rollouts generate with it has a version of
   a lost future, which is recognised and rolled back.
3. Validation; stored samples and ``steps.jsonl``, written beside the next step. The step is done again and written
   again under a higher incarnation; readers take the newest.
4. The checkpoint, after all of that: a folder that is there as a whole or not at all. From here on the step survives.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.outage import OUTAGE
from plaudit_workers.process import JobFailedError, RefusedError
from plaudit_workers.training.conductor.admission import Admitter
from plaudit_workers.training.conductor.background_tasks import Beside
from plaudit_workers.training.conductor.closing import correct_counters, end_unseen
from plaudit_workers.training.conductor.open_step import OpenStep
from plaudit_workers.training.conductor.policy_thread import PolicyThread
from plaudit_workers.training.conductor.ready_groups import ReadyGroups
from plaudit_workers.training.conductor.resume import take_over
from plaudit_workers.training.conductor.run_records import RunRecords
from plaudit_workers.training.conductor.step_report import StepReport
from plaudit_workers.training.conductor.step_training import StepTraining
from plaudit_workers.training.conductor.upkeep import Upkeep
from plaudit_workers.training.conductor.validation import Evaluation, Validation
from plaudit_workers.training.run.state import Run, RunState
from plaudit_workers.training.trainer_backend import TrainablePolicy

logger = get_logger(__name__)


async def conduct(run: Run, policy: TrainablePolicy, stop: asyncio.Event) -> bool:
    """Conducts a run until all steps are done or ``stop`` is set; a checkpoint is written in both cases.

    Args:
        run: the run's surroundings.
        policy: what is trained; ``ScriptedPolicy`` simulates one.
        stop: finish the update under way and leave.

    Returns:
        Whether all steps are done.

    Raises:
        JobFailedError: too many scores failed, again and again.
        StaleIncarnationError: another trainer took over.
        RefusedError: a checkpoint cannot be loaded, or the disk is full.
    """
    thread = PolicyThread(policy)
    await run.clock.synchronise()
    state, broken_off = await take_over(run, thread)
    admitter, ready = Admitter(run, state), ReadyGroups(run, state)
    upkeep = Upkeep(run, state, admitter, ready)
    try:
        async with asyncio.TaskGroup() as tasks:
            lasting = [tasks.create_task(part) for part in (ready.collect(), upkeep.keep())]
            training = StepTraining(run, state, thread, admitter, ready, Beside(tasks), stop)
            done = await Conductor(training).follow(broken_off)
            for task in lasting:
                task.cancel()
        await thread.close()
    except BaseExceptionGroup as group:
        error = group.exceptions[0]
        if isinstance(error, JobFailedError | RefusedError):
            await thread.close()
        raise error from None
    finally:
        thread.abandon()
    return done


class Conductor:
    """The steps of a run that was taken over.

    Args:
        training: what trains each of them.
    """

    def __init__(self, training: StepTraining) -> None:
        self._training = training
        self._run: Run = training.run
        self._state: RunState = training.state
        self._schedule = training.run.plan.schedule
        self._beside = training.beside
        self._stop = training.stop
        self._records = RunRecords(training.run, training.state, training.policy)
        self._validation = Validation(training.run, training.state, training.admitter, training.ready)
        self._writing: asyncio.Task[None] | None = None
        self._saved_step = -1

    async def follow(self, broken_off: dict[str, Any] | None) -> bool:
        """Goes through the steps; returns whether all are done.

        Args:
            broken_off: what is left of a step that was broken off in its middle.
        """
        self._beside.start(self._training.admitter.admit_training())
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
        await self._beside.settle()
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
        step = OpenStep(self._schedule, number, broken_off["accounted"])
        return step, StepReport.restored(broken_off["report"])

    async def _train(self, step: OpenStep, report: StepReport) -> bool:
        try:
            return await self._training.train(step, report)
        except JobFailedError:
            await self._beside.settle()
            await self._save(step, report)
            await self._records.ledger()
            raise

    async def _publish(self, report: StepReport) -> None:
        started = time.monotonic()
        version = PolicyVersion(self._state.incarnation, report.step)
        self._state.announcement = await self._training.policy.publish(version)
        await self._run.streams.announce(self._state.announcement)
        report.figures["timing_s/update_weights"] = time.monotonic() - started
        self._beside.start(self._training.admitter.admit_training())
        self._beside.start(self._prune())

    async def _prune(self) -> None:
        try:
            workers = await self._run.transport.workers()
        except OUTAGE as error:
            logger.warning("redis is away, old weights stay", error=str(error))
            return
        in_use = [version for worker in workers for version in (worker.version, worker.loading)]
        await self._training.policy.prune(in_use)

    async def _close(self, report: StepReport) -> None:
        closed = self._run.clock.now()
        evaluation = await self._evaluate(report.step)
        if evaluation is not None:
            report.figures |= evaluation.figures
            report.ended += zip(evaluation.groups, evaluation.records, strict=True)
        if self._writing is not None:
            await self._writing
        self._writing = self._beside.start(self._records.step(report, closed))
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
            await self._records.checkpoint(step, report)
            self._saved_step = self._state.version.number
