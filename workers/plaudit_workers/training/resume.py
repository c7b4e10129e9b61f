"""Take a run over: from its newest checkpoint, or from the start.

The checkpoint is authoritative. Open groups in Redis are used if the restored schedule can use them unchanged. All
others are rolled back: closed as ``rolled_back``, and their prompts admitted again with a new attempt. ``adopt``
decides that and is pure. ``TrainerBackend`` is the protocol of what is trained (``backend``, or ``scripted`` in
simulations), and ``BackendThread`` runs its blocking calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.data_facts import DataFacts, refuse_changed_data
from plaudit_workers.stream.groups import Group
from plaudit_workers.training.groups import sampled_versions
from plaudit_workers.training.schedule import GroupInFlight, Schedule, TrainerLedger
from plaudit_workers.training.state import LINEAGE_FILE, Lineage, PromptOrder, RunContext, RunState

logger = get_logger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_READ_AT_ONCE = 16


class TrainerBackend(Protocol):
    """Train a policy. All calls block.

    All but ``prune``, ``write_files`` and ``finish_saving`` come from one thread, one at a time.
    """

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train on one mini-batch (never empty) and return its figures.

        Raises:
            JobFailedError: too many updates in a row had no finite gradient.
        """

    def publish(self, version: PolicyVersion) -> Announcement:
        """Write the weights where rollouts read them, or offer them from memory."""

    def write_files(self, announcement: Announcement) -> Announcement:
        """Write weights that are offered from memory as files too; return the announcement of both.

        Called while the next update runs.

        Raises:
            TransferError: the version was withdrawn meanwhile.
        """

    def write_whole(self, announcement: Announcement) -> None:
        """Write weights that were published as a delta whole, if they are still the newest ones and not yet whole."""

    def free_memory(self) -> None:
        """Return memory of the GPUs that an update needed, before rollouts take it."""

    def prune(self, in_use: Collection[str]) -> None:
        """Delete published weights that are not needed; ``in_use`` are the versions that live workers report."""

    def save(self, step: int, extra: dict[str, Any]) -> Path:
        """Begin a checkpoint after ``step`` with the conductor's state beside the model's; return its folder.

        The states are those of the call, although writing continues during the next updates. Waits for the checkpoint
        before it, and raises what that one raised.
        """

    def finish_saving(self) -> None:
        """Wait until the checkpoint begun last is in place. Called while updates run.

        Raises:
            StaleIncarnationError: a later trainer has begun; all checkpoints are unchanged.
            RefusedError: the disk is full; older checkpoints are unchanged.
        """

    def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """Return the run's checkpoints, each with the conductor's state. Called once, before anything is saved."""

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Load a checkpoint and return the conductor's state in it."""

    def close(self) -> None:
        """Release the other ranks."""


class BackendThread:
    """Run a backend's calls in one thread while the event loop continues: ``await thread.run(backend.update)``."""

    def __init__(self, backend: TrainerBackend) -> None:
        self.backend = backend
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer-backend")

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a function in the thread, after those that were passed before."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def abandon(self) -> None:
        """End the thread after its current call, without waiting for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Restored:
    """Hold the state from which a trainer continues."""

    step: int
    """The last closed step; 0 at the start."""
    ledger: TrainerLedger
    parent: PolicyVersion
    """The version from which it continues; incarnation 0 for weights of another origin."""
    order: PromptOrder
    open_step: dict[str, Any] | None = None
    """The rest of the next step, if it was interrupted in its middle."""


async def take_over(run: RunContext, thread: BackendThread) -> tuple[RunState, dict[str, Any] | None]:
    """Become the run's trainer: restore its state and announce its weights.

    Return the state, and the rest of a step that was interrupted in its middle.
    """
    folder = run.folder / "checkpoints"
    lineage = Lineage.read(folder)
    own = await thread.run(thread.backend.checkpoints)
    known = [extra["incarnation"] for extra in own.values()]
    incarnation = await run.streams.take_over(max([lineage.newest, *known]))
    # A replaced trainer may have saved one after its successor chose an older one: such a checkpoint does not count.
    surviving = [path for path, extra in own.items() if not lineage.rules_out(_version_of(extra))]
    newest = max(surviving, key=lambda path: _version_of(own[path]), default=None)
    refuse_lost_checkpoint(lineage, None if newest is None else _version_of(own[newest]), folder)
    if newest is not None:
        # Before it is loaded, which takes minutes: from now on a replaced trainer saves nothing that would delete it.
        lineage.parents[incarnation] = _version_of(own[newest])
        lineage.write(folder)
    restored = await _restore(run, thread, newest)
    lineage.parents[incarnation] = restored.parent
    lineage.write(folder)
    await _adopt_open_groups(run, restored, lineage, PolicyVersion(incarnation, restored.step))
    await run.streams.restore(restored.ledger.counters(), restored.step)
    announcement = await thread.run(thread.backend.publish, PolicyVersion(incarnation, restored.step))
    await run.streams.announce(announcement)
    logger.info("took over the run", incarnation=incarnation, step=restored.step, ledger=restored.ledger.counters())
    state = RunState(incarnation, lineage, announcement, restored.ledger, restored.order)
    return state, restored.open_step


async def _restore(run: RunContext, thread: BackendThread, newest: Path | None) -> Restored:
    order = PromptOrder(run.plan.skip_solved, run.plan.schedule.max_staleness)
    if newest is not None:
        extra = await thread.run(thread.backend.load, newest)
        _refuse_other_data(run, extra)
        ledger = TrainerLedger.restored(extra["ledger"])
        order.restore(extra.get("prompt_order"), ledger.train)
        return Restored(extra["step"], ledger, _version_of(extra), order, extra["open_step"])
    if run.plan.resume_from:
        extra = await thread.run(thread.backend.load, Path(run.plan.resume_from))
        ledger = TrainerLedger.restored(extra["ledger"]).begun_anew()
        if changes := _changes_of_data(run, extra):
            order.begin(ledger.train)
            logger.info("other data than the checkpoint's: it begins with its first prompt", changes=changes)
        else:
            order.restore(extra.get("prompt_order"), ledger.train, with_results=False)
        return Restored(extra["step"], ledger, PolicyVersion(0, extra["step"]), order)
    return Restored(0, TrainerLedger(), PolicyVersion(0, 0), order)


def _changes_of_data(run: RunContext, extra: dict[str, Any]) -> list[str]:
    before = DataFacts.restored(extra.get("data"))
    return [] if run.data_facts is None else run.data_facts.changes_since(before)


def _refuse_other_data(run: RunContext, extra: dict[str, Any]) -> None:
    """Raise ``RefusedError`` if the data is not the checkpoint's, and nobody has accepted it."""
    if run.data_facts is not None:
        changes = refuse_changed_data(run.data_facts, DataFacts.restored(extra.get("data")), run.folder)
        if changes:
            logger.warning("continuing with changed data, as accepted", changes=changes)


def _version_of(extra: dict[str, Any]) -> PolicyVersion:
    return PolicyVersion(extra["incarnation"], extra["step"])


def refuse_lost_checkpoint(lineage: Lineage, newest: PolicyVersion | None, folder: Path) -> None:
    """Check that the checkpoint from which the last trainer continued, or a newer one, exists.

    Args:
        lineage: before the new incarnation is added.
        newest: version of the newest checkpoint that the lineage does not rule out; None when there is none.

    Raises:
        RefusedError: it is missing. To go on would train prompts a second time that the run has already learnt from.
    """
    parent = lineage.parents.get(lineage.newest, PolicyVersion(0, 0))
    if parent.incarnation == 0 or (newest is not None and newest >= parent):
        return
    found = "there is none from which it can continue" if newest is None else f"the newest one is of version {newest}"
    raise RefusedError(
        f"{folder}: {LINEAGE_FILE} records that the run continued from the checkpoint of version {parent} (step "
        f"{parent.number}), but {found}. Restore step-{parent.number:06d} from a backup; to accept the loss and train "
        f"again from what is left, delete {LINEAGE_FILE}"
    )


async def _adopt_open_groups(run: RunContext, restored: Restored, lineage: Lineage, head: PolicyVersion) -> None:
    retry = run.transport.retry_through_outage
    counters = await retry(run.streams.counters)
    ids = await retry(run.streams.open_groups)
    found: list[Group] = []
    for start in range(0, len(ids), _READ_AT_ONCE):
        part = ids[start : start + _READ_AT_ONCE]
        read = await asyncio.gather(*(retry(partial(run.streams.read, group)) for group in part))
        found += [group for group in read if group is not None]
    ledger = restored.ledger
    adoption = adopt(run.plan.schedule, restored.step, ledger, found, lambda version: lineage.survives(version, head))
    gone = {flight.group for flight in ledger.flights()} - {group.id for group in found}
    for flight in adoption.kept:  # admitted after the checkpoint: their prompts are those that it leads to
        restored.order.place(flight.position, partial(ledger.train.step_of, run.plan.schedule), run.data)
    bring_up_to_date(ledger, adoption, max(0, num_ended(counters) - num_ended(ledger.counters()) - len(gone)))
    for group in adoption.rolled_back:
        await run.streams.close(group, "dropped", "rolled_back")


def num_ended(counters: dict[str, int]) -> int:
    """Return the number of ended groups in these counters."""
    return sum(counters.get(end, 0) for end in ("trained", "evaluated", "dropped"))


@dataclass(frozen=True)
class Adoption:
    """Hold the decision on the groups that a new trainer finds open."""

    kept: list[GroupInFlight]
    rolled_back: list[str]
    num_lost: int = 0
    """Of those rolled back, the ones that were admitted after the checkpoint: its ledger has not counted them."""


def adopt(
    schedule: Schedule,
    step: int,
    ledger: TrainerLedger,
    found: Sequence[Group],
    survives: Callable[[PolicyVersion], bool],
) -> Adoption:
    """Choose the open groups that the restored run continues with.

    Args:
        ledger: as the checkpoint has it.
        survives: returns True for policy versions of the surviving line.
    """
    kept: dict[int, GroupInFlight] = {}
    for group in sorted(found, key=lambda group: (group.incarnation, group.prompt.attempt), reverse=True):
        prompt = group.prompt
        if (
            prompt.split == "train"
            and prompt.position not in kept
            and prompt.position < schedule.admissible_end(step) + ledger.train.num_extras
            and prompt.step == ledger.train.step_of(schedule, prompt.position)  # else an extra of a lost future
            and _is_awaited(ledger, group)
            and all(survives(version) for version in {prompt.min_version, *sampled_versions(group)})
        ):
            kept[prompt.position] = _flight(group)
    names = {flight.group for flight in kept.values()}
    rolled_back = [group for group in found if group.id not in names]
    return Adoption(
        list(kept.values()),
        [group.id for group in rolled_back],
        sum(not _is_known(ledger, group) for group in rolled_back),
    )


def _is_known(ledger: TrainerLedger, group: Group) -> bool:
    """Return True if the checkpoint's ledger has admitted the group: it is in flight there, or its end is counted."""
    positions, prompt = ledger.splits[group.prompt.split], group.prompt
    return group.id in positions.in_flight or positions.has_ended(prompt.position, prompt.attempt)


def _is_awaited(ledger: TrainerLedger, group: Group) -> bool:
    """Return True if the restored run has yet to train it: in flight at the checkpoint, or admitted after it."""
    return group.id in ledger.train.in_flight or not ledger.train.was_admitted(group.prompt.position)


def _flight(group: Group) -> GroupInFlight:
    prompt = group.prompt
    numbers = [version.number for version in sampled_versions(group)]
    oldest = min(numbers, default=prompt.min_version.number)
    return GroupInFlight(group.id, prompt.position, prompt.attempt, prompt.step, oldest)


def bring_up_to_date(ledger: TrainerLedger, adoption: Adoption, ended_since: int) -> None:
    """Bring a checkpoint's ledger up to the moment of the resume.

    Args:
        ledger: changed in place.
        ended_since: groups that ended after the checkpoint: their work is lost.
    """
    kept = {flight.group: flight for flight in adoption.kept}
    known = {flight.group for flight in ledger.flights()}
    ledger.roll_back(known - kept.keys())
    for name in kept.keys() & known:
        ledger.train.in_flight[name] = kept[name]
    for flight in sorted(adoption.kept, key=lambda flight: flight.position):
        if flight.group not in known:
            ledger.admit("train", flight)
    ledger.count_lost(adoption.num_lost + ended_since)
