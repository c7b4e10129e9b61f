"""Make, hold and remove the machines of a run's samples, for processes that have no right to.

A machine is a folder ``machines/<id>`` of the run, which the provider fills, and a place in Redis (``places``):

1. A claim waits in order of arrival until a place is free. If its sample has a machine already, of a rollout that died,
   that one is removed at once. A warm machine of the same shape is taken with its place.
2. The place is taken, then the machine is made, then a mark is written. A machine without the mark is no machine.
3. Commands and tests run one at a time. A command is noted before it begins, so that it never runs twice.
4. The machine is removed, then the place is freed: when its client asks, or when the sample has ended. What the job
   keeps of it is put into the sample's own folder before.

So a broker may be killed at any line: the next one reads the places, goes on with machines that have their mark,
removes all others, and answers a command that its predecessor had begun with an error. Work goes on when a client's
connection breaks; a request that comes again gets its answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from plaudit_job.tasks import Task
from plaudit_reward.machines import SANDBOXES, sample_of, task_of
from plaudit_reward.providers import TaskMachine, WarmProvider
from plaudit_reward.served_machines import ClaimedMachine, ClaimRequest, RunRequest, VerifyRequest
from plaudit_reward.verifier import Keep, is_kept
from plaudit_sandbox.machine import CommandEnd
from plaudit_sandbox.verification import Verdict
from plaudit_wire.errors import DataError, InfrastructureError, ScoringError
from plaudit_wire.logs import get_logger
from plaudit_workers.sandboxes.places import WARM, Places
from plaudit_workers.sandboxes.series import BrokerSeries, State, reason_of
from plaudit_workers.stream.calls import MachinePlace

logger = get_logger(__name__)
MACHINES: Final = "machines"
"""The folder of the machines, below the run's."""
_MARK: Final = "made.json"
_BEGAN: Final = "began"
"""In a machine's folder: the command that began last."""
_REAP_EVERY_S = 0.5
_LOOK_EVERY_S = 1.0
_LOOK_FOR_ORPHANS_EVERY_S = 60.0
_ABANDONED_S = 90.0
"""A claim that nobody has asked for again in this time is dropped. Its client asks every 20 s."""
_AGAIN_S = 2.0
_MADE_WITHIN_S = 20.0
Answer = TypeVar("Answer")


@dataclass
class Operation:
    """One command or verification, whose answer a repeated request gets too."""

    id: str
    task: asyncio.Task[Any]


@dataclass(eq=False)
class HeldMachine:
    """One machine with a place."""

    id: str
    holder: str
    """Of its place."""
    name: str = ""
    """Its sample's name for it; empty for a warm one."""
    shape: str = ""
    """Of a warm one."""
    state: State = "starting"
    made: TaskMachine | None = None
    making: asyncio.Task[Any] | None = None
    operation: Operation | None = None
    ending: asyncio.Task[None] | None = None

    @property
    def value(self) -> str:
        """Return what Redis holds of it."""
        return f"{self.id} {self.name or self.shape}"


@dataclass(eq=False)
class WaitingClaim:
    """One request for a machine, until its machine is gone."""

    request: ClaimRequest
    task: Task | None
    answer: asyncio.Future[ClaimedMachine]
    arrived_s: float = field(default_factory=time.monotonic)
    seen_s: float = field(default_factory=time.monotonic)


class Broker:
    """Hold the machines of one run, whose folder is ``folder``."""

    def __init__(
        self, folder: Path, provider: WarmProvider, places: Places, series: BrokerSeries, keep: Keep = "none"
    ) -> None:
        self._folder = folder / MACHINES
        self._samples = folder / SANDBOXES
        self._keep = keep
        self._provider = provider
        self._places = places
        self._series = series
        self._claims: dict[str, WaitingClaim] = {}
        self._held: dict[str, HeldMachine] = {}
        """By holder."""
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with what ended the broker's own work, such as ``DeposedError``."""
        series.show(
            lambda: len(self._waiting()), lambda state: sum(held.state == state for held in self._held.values())
        )

    async def open(self) -> None:
        """Find the machines of the broker before, and remove what belongs to nobody. This broker must lead."""
        await asyncio.to_thread(self._provider.require)
        await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
        for holder, value in (await self._places.held()).items():
            machine, _, name = value.partition(" ")
            warm = holder.startswith(WARM)
            held = HeldMachine(machine, holder, "" if warm else name, name if warm else "")
            self._held[holder] = held
            try:
                await asyncio.to_thread(self._restore, held)
            except (DataError, InfrastructureError, OSError, ValueError) as error:
                logger.info("machine not found again", machine=machine, holder=holder, error=str(error))
                await self.end(held)
        known = {held.id for held in self._held.values()}
        left = [path for path in await asyncio.to_thread(lambda: [*self._folder.iterdir()]) if path.name not in known]
        await asyncio.to_thread(self._provider.remove, *left)
        logger.info("holds machines", found=len(self._held), removed=len(left))

    async def run(self) -> None:
        """Grant claims and remove the machines of ended samples, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._grant())
            tasks.create_task(self._reap())
            tasks.create_task(self._fail())  # with the error of any other vital work

    async def close(self) -> None:
        """Stop all work; the machines stay for the next broker, which must not find one that is still being made."""
        if making := [held.making for held in self._held.values() if held.making is not None]:
            await asyncio.wait(making, timeout=_MADE_WITHIN_S)
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        self.failed.cancel()

    async def claim(self, request: ClaimRequest) -> asyncio.Future[ClaimedMachine]:
        """Return the future of a sample's machine. Raises ``DataError`` for a name or a task that is none."""
        claim = self._claims.get(request.machine)
        if claim is None:
            if sample_of(request.machine) is None:
                raise DataError(f"{request.machine!r} is no name of a machine")
            task = await asyncio.to_thread(_task, request.task, request.digest)
        if (claim := self._claims.get(request.machine)) is None:  # meanwhile
            claim = self._claims[request.machine] = self._known(request, task)
            old = self._held.get(_holder(request.machine))
            if old is not None and old.name != request.machine and old.ending is None:
                self._series.superseded.inc()
                self._start(self.end(old))  # at once: a claim before this one may wait for its place
            self._changed.set()
        claim.seen_s = time.monotonic()
        return claim.answer

    async def execute(self, request: RunRequest) -> asyncio.Task[CommandEnd]:
        """Return the task that runs a command. Raises ``InfrastructureError`` if the machine is gone."""
        held = self._of(request.machine)
        return self._operation(held, request.id, lambda before: self._execute(held, request, before))

    async def verify(self, request: VerifyRequest) -> asyncio.Task[Verdict]:
        """Return the task that runs a machine's tests. Raises ``InfrastructureError`` if the machine is gone."""
        held = self._of(request.machine)
        return self._operation(held, request.id, lambda before: self._verify(held, request, before))

    async def release(self, names: Sequence[str] | None, *, keeps: bool = False) -> None:
        """Remove the machines of these names, or all; with ``keeps``, keep before what the job keeps."""
        for name in list(self._claims) if names is None else names:
            if (claim := self._claims.pop(name, None)) is not None:
                claim.answer.cancel()
        held = [each for each in self._held.values() if names is None or each.name in names]
        await asyncio.gather(*(self.end(each, keeps=keeps) for each in held))

    async def end(self, held: HeldMachine, *, keeps: bool = False) -> None:
        """Remove a machine, then free its place; work in it is cancelled."""
        if held.ending is None:
            held.ending = self._start(self._ended(held, keeps=keeps))
        await asyncio.shield(held.ending)

    @property
    def free(self) -> int:
        """Return the places that nobody holds or waits for."""
        return self._places.most - len(self._held) - len(self._waiting())

    def warm(self, shape: str) -> list[HeldMachine]:
        """Return the machines of a pool, ready or not."""
        return [held for held in self._held.values() if held.shape == shape and held.ending is None]

    def shapes(self) -> set[str]:
        """Return the shapes of all pools."""
        return {held.shape for held in self._held.values() if held.shape}

    async def start_warm(self, shape: str, task: Task | None) -> None:
        """Begin to start a machine for whoever needs this shape next, if a place is free."""
        machine = secrets.token_hex(8)
        held = HeldMachine(machine, WARM + machine, shape=shape)
        self._held[held.holder] = held  # before the place: a claim that comes meanwhile counts it
        if await self._places.hold_warm(machine, held.value) is not MachinePlace.held:
            del self._held[held.holder]
            return
        held.making = self._start(self._make_warm(held, task))

    async def _grant(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()
            now = time.monotonic()
            for name, claim in [*self._claims.items()]:
                if claim.answer.done() and now - claim.seen_s > _ABANDONED_S:
                    del self._claims[name]
            for claim in self._waiting():
                if now - claim.seen_s > _ABANDONED_S:
                    del self._claims[claim.request.machine]
                elif not await self._grant_one(claim):
                    break  # in order of arrival: nobody behind it may pass

    async def _grant_one(self, claim: WaitingClaim) -> bool:
        """Begin to make a claim's machine; return False if it has to wait."""
        holder = _holder(claim.request.machine)
        if (old := self._held.get(holder)) is not None:
            await self.end(old)
        shape = self._provider.shape(claim.task)
        taken = next((held for held in self.warm(shape) if held.state == "warm"), None)
        held = HeldMachine(taken.id if taken else secrets.token_hex(8), holder, claim.request.machine)
        if taken is not None:
            taken.state = "claimed"
        answer = await self._places.hold(holder, held.value, taken.id if taken else "")
        if answer is MachinePlace.full:
            return await self._evict(shape) and await self._grant_one(claim)
        if answer is MachinePlace.gone and taken is not None:
            self._held.pop(taken.holder, None)
            return await self._grant_one(claim)
        if answer is MachinePlace.ended:
            if taken is not None:
                taken.state = "warm"
            self._refuse(claim, "its sample has ended")
            return True
        if taken is not None:
            del self._held[taken.holder]
        self._held[holder] = held
        held.making = self._start(self._make(held, claim, is_warm=taken is not None))
        return True

    async def _evict(self, shape: str) -> bool:
        """Remove a warm machine of another shape, whose place is needed; return False if there is none."""
        others = (held for held in self._held.values() if held.state == "warm" and held.shape != shape)
        if (victim := next((held for held in others if held.ending is None), None)) is None:
            return False
        await self.end(victim)
        return True

    async def _make(self, held: HeldMachine, claim: WaitingClaim, *, is_warm: bool) -> None:
        """Make a machine, or fill a warm one, and mark it."""
        waited_s = time.monotonic() - claim.arrived_s
        self._series.seconds.labels("claim").observe(waited_s)
        folder = self._folder / held.id
        try:
            with self._series.timed("fill" if is_warm else "start"):
                made = await asyncio.to_thread(self._made, folder, claim.task, is_warm=is_warm)
            about = {"task": claim.request.task, "digest": claim.request.digest}
            await asyncio.to_thread(_mark, folder, about)
        except (ScoringError, OSError) as error:
            self._refuse(claim, str(error))
            self._start(self.end(held))
            return
        held.made, held.state = made, "claimed"
        if not claim.answer.done():
            claim.answer.set_result(ClaimedMachine(made.directory, waited_s, made.cpus))

    def _made(self, folder: Path, task: Task | None, *, is_warm: bool) -> TaskMachine:
        if is_warm:
            (folder / _MARK).unlink()
        else:
            folder.mkdir()
            self._provider.start(folder, task)
        return self._provider.fill(folder, task)

    async def _make_warm(self, held: HeldMachine, task: Task | None) -> None:
        folder = self._folder / held.id

        def start() -> None:
            folder.mkdir()
            self._provider.start(folder, task)
            _mark(folder, {})

        try:
            with self._series.timed("start"):
                await asyncio.to_thread(start)
        except (ScoringError, OSError) as error:
            self._series.failures.labels("start", reason_of(error)).inc()
            logger.warning("a warm machine cannot be started", shape=held.shape, error=str(error))
            await asyncio.sleep(_AGAIN_S)
            self._start(self.end(held))
            return
        held.state = "warm"
        self._changed.set()

    async def _execute(self, held: HeldMachine, request: RunRequest, before: Operation | None) -> CommandEnd:
        assert held.made is not None
        await _ended(before)
        began, machine = self._folder / held.id / _BEGAN, held.made.machine
        if await asyncio.to_thread(_noted, began, request.id):
            raise InfrastructureError("the broker of the machine was lost while the command ran")
        with self._series.timed("exec"):
            return await machine.run(
                request.command,
                timeout_s=request.timeout_s,
                environment=request.environment,
                directory=request.directory,
                stdin=request.stdin,
            )

    async def _verify(self, held: HeldMachine, request: VerifyRequest, before: Operation | None) -> Verdict:
        assert held.made is not None
        await _ended(before)
        task = await asyncio.to_thread(_task, request.task, request.digest)
        if task is None:
            raise DataError("no task is named whose tests could run")
        held.state = "verifying"
        try:
            with self._series.timed("verify"):
                return await held.made.verify(task, timeout_s=request.timeout_s, environment=request.environment)
        finally:
            held.state = "claimed"

    def _operation(
        self,
        held: HeldMachine,
        name: str,
        begin: Callable[[Operation | None], Coroutine[Any, Any, Answer]],
    ) -> asyncio.Task[Answer]:
        """Return the task of an operation, which ends the one before: its client has left."""
        before = held.operation
        if before is None or before.id != name:
            held.operation = Operation(name, self._start(begin(before), is_vital=False))
        assert held.operation is not None
        return held.operation.task

    def _of(self, name: str) -> HeldMachine:
        if (held := self._usable(name)) is None:
            raise InfrastructureError(f"the machine {name} is gone")
        return held

    def _usable(self, name: str) -> HeldMachine | None:
        """Return the machine that a sample has under this name; None if it is not made yet, or ends."""
        held = self._held.get(_holder(name))
        known = held is not None and held.name == name and held.made is not None and held.ending is None
        return held if known else None

    def _known(self, request: ClaimRequest, task: Task | None) -> WaitingClaim:
        """Return a claim, answered if the machine is one of the broker before."""
        claim = WaitingClaim(request, task, asyncio.get_running_loop().create_future())
        if (held := self._usable(request.machine)) is not None and held.made is not None:
            claim.answer.set_result(ClaimedMachine(held.made.directory, 0.0, held.made.cpus))
        return claim

    def _restore(self, held: HeldMachine) -> None:
        """Find a machine of the broker before. Raises if it was not finished."""
        folder = self._folder / held.id
        about = json.loads((folder / _MARK).read_text())
        if held.name and not about:
            raise InfrastructureError("its task's files were not copied yet")
        task = _task(about["task"], about["digest"]) if held.name else None
        held.state = "warm" if held.shape else "claimed"
        if held.name:
            held.made = self._provider.find(folder, task)

    def _refuse(self, claim: WaitingClaim, reason: str) -> None:
        if not claim.answer.done():
            claim.answer.set_exception(InfrastructureError(f"the machine {claim.request.machine}: {reason}"))
            claim.answer.exception()  # whoever asks gets it; nobody may ask any more

    async def _ended(self, held: HeldMachine, *, keeps: bool) -> None:
        await _ended(held.operation)
        if held.making is not None:  # a thread cannot be cancelled
            await asyncio.wait([held.making])
        if keeps and held.made is not None:
            await self._kept(held, held.made, self._samples / held.name)
        with self._series.timed("release"):
            await self._remove(held)
        await self._places.free(held.holder, held.value)
        if self._held.get(held.holder) is held:
            del self._held[held.holder]
        if held.name:
            self._claims.pop(held.name, None)
        self._changed.set()

    async def _kept(self, held: HeldMachine, made: TaskMachine, to: Path) -> None:
        """Keep a machine if the job says so; one that is lost cannot be kept."""
        if self._keep == "none" or not await asyncio.to_thread(lambda: to.is_dir() and is_kept(self._keep, to)):
            return
        try:
            with self._series.timed("keep"):
                await asyncio.to_thread(self._provider.keep, self._folder / held.id, made, to)
        except InfrastructureError as error:
            logger.warning("a machine is not kept", machine=held.name, error=str(error))

    async def _remove(self, held: HeldMachine) -> None:
        """Remove a machine, however often that fails: its place is not free before."""
        while True:
            try:
                return await asyncio.to_thread(self._provider.remove, self._folder / held.id)
            except InfrastructureError as error:
                self._series.failures.labels("release", reason_of(error)).inc()
                logger.warning("a machine is not removed yet", machine=held.id, error=str(error))
            await asyncio.sleep(_AGAIN_S)

    async def _reap(self) -> None:
        """Remove the machines of samples that have ended."""
        looked_s = 0.0
        while True:
            await asyncio.sleep(_REAP_EVERY_S)
            if time.monotonic() - looked_s > _LOOK_FOR_ORPHANS_EVERY_S:
                looked_s = time.monotonic()
                self._start(self._reap_orphans())
            samples = {s: held for held in self._held.values() if held.name and (s := sample_of(held.name))}
            for sample in await self._places.ended(samples):
                if samples[sample].ending is None:
                    self._start(self.end(samples[sample], keeps=True))

    async def _reap_orphans(self) -> None:
        """Remove machines that a killed broker's last calls made, after the next one had looked."""
        try:
            await asyncio.to_thread(self._provider.reap, [self._folder / held.id for held in self._held.values()])
        except InfrastructureError as error:
            logger.warning("machines of a killed broker may be left", error=str(error))

    async def _fail(self) -> None:
        await self.failed

    def _start(self, work: Coroutine[Any, Any, Answer], *, is_vital: bool = True) -> asyncio.Task[Answer]:
        """Run work that no request's end may end. An error of vital work ends the broker; else whoever asks gets it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done_vital if is_vital else self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> BaseException | None:
        self._background.discard(task)
        return None if task.cancelled() else task.exception()

    def _done_vital(self, task: asyncio.Task[Any]) -> None:
        if (error := self._done(task)) is not None and not self.failed.done():
            self.failed.set_exception(error)

    def _waiting(self) -> list[WaitingClaim]:
        begun = {held.name for held in self._held.values() if held.ending is None}
        claims = self._claims.values()
        return [claim for claim in claims if not claim.answer.done() and claim.request.machine not in begun]


def _holder(name: str) -> str:
    """Return the holder of the place of a sample's machine; empty for a name that is none."""
    sample = sample_of(name)
    return f"{sample[0]} {sample[1]}" if sample else ""


def _task(folder: str, digest: str) -> Task | None:
    return task_of({"task": folder, "digest": digest}) if folder else None


async def _ended(operation: Operation | None) -> None:
    """Cancel an operation, and wait for its end."""
    if operation is not None and not operation.task.done():
        operation.task.cancel()
        await asyncio.wait([operation.task])


def _mark(folder: Path, about: dict[str, str]) -> None:
    temporary = folder / f".{_MARK}"
    temporary.write_text(json.dumps(about))
    temporary.rename(folder / _MARK)


def _noted(file: Path, name: str) -> bool:
    """Note that a command begins; return True if it was noted before."""
    if file.exists() and file.read_text() == name:
        return True
    file.write_text(name)
    return False
