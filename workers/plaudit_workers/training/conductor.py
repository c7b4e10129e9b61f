"""Conducts a run: admit → wait → update → publish → close, step by step. Called by ``worker``, on rank 0.

The order of events at the end of a step, and what a trainer that dies in between leaves:

1. Each mini-batch: update, then its groups are closed. The checkpoint does not know that update: what was open or
   closed since is used again or rolled back (``resume``).
2. Version s is published and announced, the next prompts are admitted. What rollouts generate with it has a version of
   a lost future, which is recognised and rolled back.
3. Validation, stored samples, ``steps.jsonl``. The step is done again and written again under a higher incarnation;
   readers take the newest.
4. The checkpoint: a folder that is there as a whole or not at all. From here on the step survives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from plaudit_metrics.records import GroupEnd, WaitRecord
from plaudit_workers.process import JobFailedError, RefusedError
from plaudit_workers.stream.records import Group, PolicyVersion
from plaudit_workers.stream.scripts import OUTAGE
from plaudit_workers.training.admission import Admitter
from plaudit_workers.training.closing import Ending, end_groups, end_unseen
from plaudit_workers.training.open_step import Decision, OpenStep, Over, Retry, Update, Wait
from plaudit_workers.training.policy_thread import PolicyThread
from plaudit_workers.training.ready_groups import ReadyGroups
from plaudit_workers.training.resume import take_over
from plaudit_workers.training.run_records import RunRecords
from plaudit_workers.training.run_state import Run, RunState
from plaudit_workers.training.schedule import ReadyGroup, choose
from plaudit_workers.training.step_report import StepReport
from plaudit_workers.training.trainable_policy import TrainablePolicy
from plaudit_workers.training.upkeep import Upkeep
from plaudit_workers.training.validation import Evaluation, Validation

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


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
    conductor = Conductor(run, state, thread, stop)
    try:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(part) for part in (conductor.ready.collect(), conductor.upkeep.keep())]
            done = await conductor.follow(broken_off)
            for task in beside:
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
        run: the run's surroundings.
        state: where it stands.
        policy: what is trained.
        stop: finish the update under way and leave.
    """

    def __init__(self, run: Run, state: RunState, policy: PolicyThread, stop: asyncio.Event) -> None:
        self._run = run
        self._state = state
        self._policy = policy
        self._stop = stop
        self._schedule = run.plan.schedule
        self._admitter = Admitter(run, state)
        self.ready = ReadyGroups(run, state)
        self.upkeep = Upkeep(run, state, self._admitter, self.ready)
        self._validation = Validation(run, state, self._admitter, self.ready)
        self._records = RunRecords(run, state, policy)
        self._closed: list[Group] = []
        """Training groups that ended in the open step."""
        self._saved_step = -1

    async def follow(self, broken_off: dict[str, Any] | None) -> bool:
        """Goes through the steps; returns whether all are done.

        Args:
            broken_off: what is left of a step that was broken off in its middle.
        """
        await self._admitter.admit_training()
        if self._run.plan.validation and self._state.version.number == 0 and broken_off is None:
            await self._close_step(StepReport(0, self._run.clock.now()))
        while self._steps_are_left and not self._stop.is_set():
            step, report = self._open(broken_off)
            broken_off = None
            if not await self._train_step(step, report):
                await self._save(step, report)
                return False
            await self._publish(report)
            await self._close_step(report)
        if self._steps_are_left:
            await self._save()
            return False
        await end_unseen(self._run, self._state, [flight.group for flight in self._state.ledger.flights()], "run_ended")
        await self._records.ledger()
        return True

    @property
    def _steps_are_left(self) -> bool:
        return self._state.version.number < self._schedule.steps

    def _open(self, broken_off: dict[str, Any] | None) -> tuple[OpenStep, StepReport]:
        number = self._state.version.number + 1
        if broken_off is None:
            return OpenStep(self._schedule, number), StepReport(number, self._run.clock.now())
        step = OpenStep(self._schedule, number, broken_off["accounted"], broken_off["retries"])
        return step, StepReport.restored(broken_off["report"])

    async def _train_step(self, step: OpenStep, report: StepReport) -> bool:
        """Trains on the step's groups as they become ready; False when it was told to stop before the end."""
        while True:
            decision = await self._wait(step, report)
            if isinstance(decision, Update):
                await self._update(step, decision.groups, report)
            elif isinstance(decision, Retry):
                await self._retry(step, decision, report)
            elif isinstance(decision, Over):
                await self._end(decision.dropped, report, "dropped")
                step.ended(decision.dropped)
                return True
            else:
                return False

    async def _wait(self, step: OpenStep, report: StepReport) -> Decision:
        """Takes ready groups until there is something to do; ``Wait`` when it was told to stop."""
        began, in_hand = 0.0, set[str]()
        while True:
            self._take_ready(step)
            decision = step.decide()
            if not isinstance(decision, Wait):
                break
            if self._stop.is_set():
                return decision
            if not began:
                began, in_hand = self._run.clock.now(), step.taken
            await self.ready.wait(_LOOK_EVERY_S)
        if began:
            awaited = sorted(step.taken - in_hand)
            report.waits.append(WaitRecord(began, max(began, self._run.clock.now()), awaited))
        return decision

    def _take_ready(self, step: OpenStep) -> None:
        while step.batch_slots:
            taken = step.taken
            ready = [group for group in self.ready.training() if group.flight.group not in taken]
            in_flight = [f for f in self._state.ledger.train.in_flight.values() if f.group not in taken]
            chosen = choose(self._schedule, step.step, step.slots, in_flight, ready)[: step.batch_slots]
            if not chosen:
                return
            step.take(chosen)

    async def _update(self, step: OpenStep, chosen: Sequence[ReadyGroup], report: StepReport) -> None:
        taken, started = self._run.clock.now(), time.monotonic()
        figures = await self._policy.update(self.ready.get(group.flight.group for group in chosen))
        report.update_s += time.monotonic() - started
        report.updates.append(figures)
        await self._end(chosen, report, "trained", taken=taken)
        step.ended(chosen)

    async def _retry(self, step: OpenStep, retry: Retry, report: StepReport) -> None:
        """Drops what has too many failed scores; its prompts are admitted again after a pause.

        Raises:
            JobFailedError: that was the last try.
        """
        pauses = self._run.plan.retry_pauses_s
        last = step.retries >= len(pauses)
        pause_s = 0.0 if last else pauses[step.retries]
        fields = {"step": step.step, "failed_share": retry.failed_share, "tries": step.retries + 1, "pause_s": pause_s}
        logger.error("too many samples without a score", extra={"fields": fields})
        self._admitter.pause(pause_s)
        await self._end(retry.groups, report, "dropped", reason="too_many_failed", again=True)
        step.returned(retry.groups)
        report.figures["training/retries"] = float(step.retries)
        if last:
            await self._save(step, report)
            await self._records.ledger()
            raise JobFailedError(
                f"step {step.step}: {retry.failed_share:.0%} of the samples have no score, after {step.retries} tries "
                f"(reward.maxFailedShare is {self._schedule.max_failed_share:.0%}). See the reward workers' logs; with "
                "the scorers mended, --resume goes on from here"
            )

    async def _end(
        self,
        ended: Sequence[ReadyGroup],
        report: StepReport,
        end: GroupEnd,
        *,
        taken: float | None = None,
        reason: str = "",
        again: bool = False,
    ) -> None:
        groups = self.ready.take(group.flight.group for group in ended)
        ending = Ending(end, report.step, self._run.clock.now() if taken is None else taken, reason, again)
        report.add(groups, await end_groups(self._run, self._state, groups, ending))
        self._closed += groups

    async def _publish(self, report: StepReport) -> None:
        started = time.monotonic()
        self._state.announcement = await self._policy.publish(PolicyVersion(self._state.incarnation, report.step))
        await self._run.streams.announce(self._state.announcement)
        report.figures["timing_s/update_weights"] = time.monotonic() - started
        await self._admitter.admit_training()
        try:
            workers = await self._run.transport.workers()
            await self._policy.prune([version for worker in workers for version in (worker.version, worker.loading)])
        except OUTAGE as error:
            logger.warning("redis is away, old weights stay", extra={"fields": {"error": str(error)}})

    async def _close_step(self, report: StepReport) -> None:
        closed = self._run.clock.now()
        groups, records = self._closed, list(report.records)
        self._closed = []
        evaluation = await self._evaluate(report.step)
        if evaluation is not None:
            report.figures |= evaluation.figures
            groups, records = groups + evaluation.groups, records + evaluation.records
        await self._records.step(report, closed, groups, records)
        last = report.step == self._schedule.steps
        if last or (report.step and report.step % self._run.plan.checkpoint_every_steps == 0):
            await self._save()

    async def _evaluate(self, step: int) -> Evaluation | None:
        plan = self._run.plan.validation
        if plan is None or not plan.is_due(step, self._schedule.steps):
            return None
        return await self._validation.evaluate(self._stop)

    async def _save(self, step: OpenStep | None = None, report: StepReport | None = None) -> None:
        if step is not None or self._saved_step != self._state.version.number:
            await self._records.checkpoint(step, report)
            self._saved_step = self._state.version.number
