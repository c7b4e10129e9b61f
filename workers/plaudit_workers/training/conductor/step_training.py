"""Train one step: wait → update → close, mini-batch by mini-batch. Called by the conductor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from plaudit_wire.errors import JobFailedError
from plaudit_wire.logs import get_logger
from plaudit_wire.records import PAUSE, GroupRecord, WaitRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.training.conductor.backend_thread import BackendThread
from plaudit_workers.training.conductor.background_tasks import BackgroundTasks
from plaudit_workers.training.conductor.groups.admission import Admitter
from plaudit_workers.training.conductor.groups.closing import GroupEnding, close_groups, end_in_ledger
from plaudit_workers.training.conductor.groups.failed_scores import failed_samples, failure_reasons, is_permanent
from plaudit_workers.training.conductor.groups.intake import GroupIntake
from plaudit_workers.training.conductor.open_step import Decision, OpenStep, Over, Retry, Update, Wait
from plaudit_workers.training.conductor.step_report import StepReport
from plaudit_workers.training.conductor.turns import Turns
from plaudit_workers.training.run.schedule import ReadyGroup, choose
from plaudit_workers.training.run.state import RunContext, RunState

logger = get_logger(__name__)

_LOOK_EVERY_S = 1.0


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

    async def train(self, step: OpenStep, report: StepReport) -> bool:
        """Train on the step's groups as they become ready; return False if ``stop`` was set before the end.

        Raises:
            JobFailedError: too many scores failed, repeatedly, or too many updates in a row were discarded.
        """
        while True:
            decision = await self._wait(step, report)
            if isinstance(decision, Update):
                if self.stop.is_set() or not await self._take_turn(report):
                    return False
                await self._update(step, decision.groups, report)
            elif isinstance(decision, Retry):
                self._return(step, decision, report)
            elif isinstance(decision, Over):
                self._end(decision.dropped, report, self._dropped(report))
                step.ended(decision.dropped)
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
                return decision
            if not began:
                began, in_hand = self.run.clock.now(), step.taken
                await self.turns.give_back()
            await self.intake.wait(_LOOK_EVERY_S)
        if began:
            awaited = sorted(step.taken - in_hand)
            report.waits += wait_records(began, max(began, self.run.clock.now()), awaited, self.state.paused_until)
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
        """Drop the groups of a step in which too many scores failed; admit their prompts again after a pause.

        Raises:
            JobFailedError: this was the last try, or trying again cannot help.
        """
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
                self.state.order.record(group.prompt.position, report.step, fmean(values), self.run.data)
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
