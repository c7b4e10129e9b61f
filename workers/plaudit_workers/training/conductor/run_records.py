"""Write the records of a run: steps.jsonl, samples, ledger.json, checkpoints. Called by the conductor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from plaudit_wire.logs import get_logger
from plaudit_wire.records import StepRecord
from plaudit_workers.training.conductor.backend_thread import BackendThread
from plaudit_workers.training.conductor.groups.failed_scores import failed_samples, failure_reasons
from plaudit_workers.training.conductor.open_step import OpenStep
from plaudit_workers.training.conductor.step_report import StepReport
from plaudit_workers.training.run.lineage import refuse_replaced
from plaudit_workers.training.run.state import RunContext, RunState
from plaudit_workers.training.run.stored_samples import store_groups
from plaudit_workers.whole_files import whole_file

logger = get_logger(__name__)

_COUNTED = ("duplicates", "redelivered:", "dead:", "poison", "groups_recreated")
"""Prefixes of further counters of Redis that ``ledger.json`` shows."""


class RunRecords:
    """Write the records of a run."""

    def __init__(self, run: RunContext, state: RunState, thread: BackendThread) -> None:
        self._run = run
        self._state = state
        self._thread = thread

    async def step(self, report: StepReport, closed: float) -> None:
        """Write a closed step: its line, its samples, its record for the metrics, the ledger.

        Args:
            closed: on the server's clock.

        Raises:
            RuntimeError: the ledger does not add up.
            RefusedError: the disk is full.
        """
        if failed := list(failed_samples([group for group, _ in report.ended])):
            reasons = failure_reasons(failed)
            logger.warning("samples without a score", step=report.step, count=len(failed), reasons=reasons)
        record = await asyncio.to_thread(self._write, report, closed)
        await self._run.streams.record_step(record)
        await self.ledger()

    def _write(self, report: StepReport, closed: float) -> StepRecord:
        record = report.record(self._state.incarnation, max(report.step - 1, 0), closed)
        self._run.sinks.write(record, self._store(report))
        return record

    def _store(self, report: StepReport) -> Path | None:
        """Return the file of the step's samples; None if they are not kept."""
        if not self._run.plan.keep_samples or not (report.ended or report.begun_by):
            return None
        groups = [group for group, _ in report.ended]
        records = {record.group: record for _, record in report.ended}
        folder = self._run.folder / "samples"
        return store_groups(folder, report.step, self._state.incarnation, groups, records, report.begun_by)

    async def ledger(self) -> None:
        """Write ``ledger.json`` and compare Redis's counters with it.

        Raises:
            RuntimeError: the ledger does not add up.
        """
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
            RefusedError: the disk is full.
        """
        state = self._state
        refuse_replaced(self._run.folder / "checkpoints", state.incarnation)
        step = state.version.number
        middle = None
        if open_step is not None and report is not None:
            middle = {**open_step.snapshot(), "report": report.snapshot()}
            await asyncio.to_thread(self._store, report)
        state.order.forget_ended(state.ledger.train)
        extra = {
            "step": step,
            "incarnation": state.incarnation,
            "ledger": state.ledger.snapshot(),
            "prompt_order": state.order.snapshot(),
            "open_step": middle,
        }
        return await self._thread.run(self._thread.backend.save, step, extra)

    async def await_checkpoint(self, path: Path) -> None:
        """Wait until the checkpoint begun last is in place, and log it.

        Raises:
            StaleIncarnationError: another trainer took over meanwhile.
            RefusedError: the disk is full.
        """
        await asyncio.to_thread(self._thread.backend.finish_saving)
        logger.info("checkpoint written", path=str(path))
