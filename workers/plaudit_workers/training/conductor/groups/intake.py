"""Accept ready groups: taken from the ``ready`` stream as they come, checked, and shown to the conductor.

The groups themselves stay in ``TrainerStreams.taken`` until they are closed; the ledger marks those accepted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from redis.exceptions import ResponseError

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.outage import OUTAGE
from plaudit_wire.records import Split
from plaudit_workers.stream.group import Group
from plaudit_workers.training.conductor.groups.closing import GroupEnding, discard_group, end_groups
from plaudit_workers.training.conductor.groups.failed_scores import has_failed
from plaudit_workers.training.run.schedule import GroupInFlight, ReadyGroup
from plaudit_workers.training.run.state import RunContext, RunState

logger = get_logger(__name__)

_TAKEN_AT_ONCE = 64
_BLOCK_S = 1.0
_PAUSE_S = 0.5


class GroupIntake:
    """Hold the ready groups that the trainer has accepted."""

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
        return [summary(group, flights[group.id]) for group in self._of("train")]

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


def summary(group: Group, flight: GroupInFlight) -> ReadyGroup:
    """Reduce a group to what the schedule needs."""
    num_failed = sum(map(has_failed, group.samples))
    scores = [sample.scoring.value for sample in group.samples if sample.scoring and sample.scoring.value is not None]
    uniform = len(scores) > 1 and min(scores) == max(scores)
    return ReadyGroup(flight, len(group.samples), num_failed, trainable=group.phase == "ready", uniform=uniform)
