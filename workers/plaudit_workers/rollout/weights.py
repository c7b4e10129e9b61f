"""Keep the engine on the announced policy: watch → receive or read → load → check, or sleep.

After loading, the rollout computes the log-probabilities of the folder's probe. A difference from the trainer's above
the probe's limit means that the engine does not hold the announced weights: the rollout never becomes ready with them.
The engine samples from the new weights meanwhile; what it finishes is published after the comparison, or never.
"""

from __future__ import annotations

import asyncio
import glob
import math
import os
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.files import FileLock, remove, temporary_folder
from plaudit_workers.process import set_within
from plaudit_workers.rollout.engine import Engine, EngineFailedError, WeightsUnreadableError, WeightSwitch
from plaudit_workers.stream.transport import Transport
from plaudit_workers.weights.deltas import (
    DeltaChain,
    DeltaError,
    chain_from_held,
    chain_from_whole,
    copy_companions,
    is_delta_only,
    restore,
)
from plaudit_workers.weights.published import PROBE_FILE, Probe, is_whole, weights_digest
from plaudit_workers.weights.receive import Reception
from plaudit_workers.weights.send import TransferError

logger = get_logger(__name__)
_FOLDER = "plaudit-weights"
"""Below the temporary folder (``TMPDIR``); with the user's number, as other users cannot remove what this one left."""
_POLL_S = 0.2
_RETRY_AFTER_S = 0.5
_MOST_REFUSALS = 5


class PolicyWeights:
    """Hold the policy version that the engine has loaded, and load newer ones.

    Args:
        changed: called after ``held`` or ``loading`` changed; the heartbeat reports both to the trainer.
        sleeps: False keeps the GPUs also while reward models free theirs for the trainer.
        shares: another process of the run uses the same GPUs.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        switch: WeightSwitch,
        changed: Callable[[], Awaitable[None]],
        *,
        sleeps: bool = True,
        shares: bool = False,
    ) -> None:
        self._transport = transport
        self._engine = engine
        self._switch = switch
        self._changed = changed
        self._sleeps = sleeps
        self._shares = shares
        self._local = LocalWeights()
        self._marks = ReceptionMarks(transport.names.run)
        self._avoids_memory = False
        """The process before this one was killed while it received weights; True until the first load from files."""
        self._wanted = asyncio.Event()
        """Somebody waits for a newer version than the loaded one."""
        self._loaded = asyncio.Event()
        """A load has begun or ended since somebody began to wait for it."""
        self._uncompared: PolicyVersion | None = None
        """The version that the engine may hold although its probe has not been compared with the trainer's."""
        self._refusals: list[PolicyVersion] = []
        """The version whose files the engine could not read, once for each time in a row."""
        self.held: PolicyVersion | None = None
        """None before the first load and after a failed one."""
        self.loading: PolicyVersion | None = None
        self.loaded_s = 0.0
        """Seconds in which the engine loaded ``held``; 0 before the first load."""
        self.needs_files = ""
        """The version that could not be received from the trainer's memory, or restored from its delta; the trainer
        then writes its files whole."""
        self.asleep = ""
        """The announcement's ``sleep`` for which the engine has freed its GPUs; empty while it has not."""
        self._ready_asleep = False
        """It slept while it held a version, and no load has failed since."""
        self.logprob_mismatch: float | None = None
        """Of the loaded weights; None if the folder has no probe or the engine no model."""

    @property
    def ready(self) -> bool:
        """Return True while an announced version is loaded; neither a switch to a newer one nor sleep ends it."""
        return self.held is not None or self._ready_asleep

    async def watch(self) -> None:
        """Follow the announcement until cancelled; raise as ``follow`` does."""
        while True:
            self._wanted.clear()
            await self.follow()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._wanted.wait()

    async def begin(self) -> None:
        """Return once the trainer lets rollouts take their GPUs; to be called before the engine starts.

        On a GPU that it shares that is after the trainer's first announcement: its model lies there by then.
        """
        self._avoids_memory = await asyncio.to_thread(self._marks.take_abandoned)
        await self._changed()  # first: a trainer that has not seen this rollout cannot wait for it
        announcement = await self._announced()
        while self._shares if announcement is None else announcement.sleep:
            await self._report_asleep(announcement.sleep if announcement else "")
            await asyncio.sleep(_POLL_S)
            announcement = await self._announced()
        if announcement is not None and self._sleeps:
            self.loading = announcement.version  # the engine takes memory from now until these weights are in it
        await self._report_asleep("", again=self.loading is not None)

    async def close(self) -> None:
        """Delete the local copy of the weights, if there is one."""
        await asyncio.to_thread(self._local.discard)

    def holds(self, least: PolicyVersion | None = None) -> bool:
        """Return True while a version of at least ``least`` is loaded, and no other is being loaded."""
        return self.loading is None and self.held is not None and (least is None or self.held >= least)

    async def hold(self, least: PolicyVersion | None = None) -> None:
        """Return once ``watch`` has loaded a version of at least ``least``; it then looks at once.

        ``watch`` loads, not the caller: a prompt whose lease is lost must not interrupt a switch of weights.
        """
        while not self.holds(least):
            self._wanted.set()
            await set_within(self._loaded, _POLL_S)

    async def compared(self, versions: Collection[PolicyVersion]) -> None:
        """Return once the probes of these versions, which the engine has sampled from, agree with the trainer's.

        A version whose probe disagrees ends the process; its samples stay here until then.
        """
        while self._uncompared in versions:
            await set_within(self._loaded, _POLL_S)

    async def follow(self) -> bool:
        """Read the announcement once and load its version unless it is loaded already. One call at a time.

        Returns:
            True if the announced version is loaded now; False if nothing is announced, if it could not be loaded, or
            if rollouts shall sleep.

        Raises:
            EngineFailedError: the engine broke, or does not compute with the announced weights.
        """
        announcement = await self._announced()
        if announcement is None:
            return False
        if announcement.sleep:
            self.loading = None
            await self._sleep(announcement.sleep)
            return False
        if self.asleep or self.loading is not None:
            return await self._wake(announcement)
        return announcement.version == self.held or await self._load(announcement)

    async def _announced(self) -> Announcement | None:
        announcement = await self._transport.retry_through_outage(self._transport.announced)
        if announcement is None or self._sleeps:
            return announcement
        return msgspec.structs.replace(announcement, sleep="")

    async def _sleep(self, sleep: str) -> None:
        if not self.asleep:
            self._ready_asleep, self.held = self.ready, None
            await self._engine.sleep(self._switch)
            logger.info("asleep", update=sleep)
        await self._report_asleep(sleep)

    async def _wake(self, announcement: Announcement) -> bool:
        """Load the announced version; one report says that it is awake and that it loads.

        Between two reports the trainer would see an engine that does neither, and let others fall asleep while this
        one takes its memory.
        """
        self.asleep, self.loading = "", announcement.version
        await self._changed()
        try:
            return await self._load(announcement)
        finally:
            if self.loading is not None:  # the weights did not arrive
                self.loading = None
                await self._changed()

    async def _report_asleep(self, sleep: str, *, again: bool = False) -> None:
        if again or sleep != self.asleep:
            self.asleep = sleep
            await self._changed()

    async def _load(self, announcement: Announcement) -> bool:
        received = announcement.transfer is not None and not self._needs_files_of(announcement)
        try:
            await (self._load_received(announcement) if received else self._load_files(announcement))
        except WeightsUnreadableError as error:
            version = str(announcement.version)
            logger.warning("weights unreadable", version=version, path=announcement.path, error=str(error))
            await asyncio.sleep(_RETRY_AFTER_S)
            return False
        return True

    def _needs_files_of(self, announcement: Announcement) -> bool:
        return bool(announcement.path) and self.needs_files == str(announcement.version)

    async def _load_received(self, announcement: Announcement) -> None:
        """Receive the weights into memory while the engine samples with its present ones; then switch."""
        try:
            if self._avoids_memory:
                raise WeightsUnreadableError("a process was killed while it received weights; requesting files")
            assert announcement.transfer is not None
            with self._marks.held(), Reception(announcement.version, announcement.transfer) as reception:
                try:
                    folder = await asyncio.to_thread(reception.receive)
                except TransferError as error:
                    raise WeightsUnreadableError(str(error)) from error
                async with self._loading(announcement.version):
                    await self._load_folder(folder, announcement.version)
        except WeightsUnreadableError:
            self.needs_files = str(announcement.version)
            await self._changed()
            raise

    async def _load_files(self, announcement: Announcement) -> None:
        """Load the announced files, or those that their deltas restore; request whole ones if they cannot."""
        folder = Path(announcement.path)
        async with self._loading(announcement.version):
            try:
                if self._needs_files_of(announcement) and await asyncio.to_thread(is_delta_only, folder):
                    raise WeightsUnreadableError("the trainer has not written them whole yet")
                whole = await asyncio.to_thread(self._local.whole, folder, announcement.digest)
                await self._load_checked(whole, announcement.version)
            except WeightsUnreadableError:
                await asyncio.to_thread(self._local.discard)
                if await asyncio.to_thread(is_delta_only, folder):
                    self.needs_files = str(announcement.version)
                raise

    async def _load_checked(self, folder: Path, version: PolicyVersion) -> None:
        """Load files whose digest is right: if the engine cannot read them, it is no fault of the trainer's."""
        try:
            await self._load_folder(folder, version)
        except WeightsUnreadableError as error:
            self._refusals = [*(each for each in self._refusals if each == version), version]
            if len(self._refusals) < _MOST_REFUSALS:
                raise
            raise EngineFailedError(
                f"the files of weights {version} have the announced digest, but the engine could not read them "
                f"{_MOST_REFUSALS} times: {error}"
            ) from error

    @asynccontextmanager
    async def _loading(self, version: PolicyVersion) -> AsyncIterator[None]:
        self.loading, started = version, time.monotonic()
        await self._changed()
        try:
            yield
            self.loaded_s = time.monotonic() - started
        finally:
            self.loading = None
            self._loaded.set()
            await self._changed()

    async def _load_folder(self, folder: Path, version: PolicyVersion) -> None:
        probe = await asyncio.to_thread(read_probe, folder)
        self._uncompared = version
        try:
            await self._engine.load_weights(folder, version, self._switch)
            await self._compare(version, probe)
        except BaseException:
            # Cancellation included: the engine may hold the new weights by now, or half of them.
            self.held, self._ready_asleep = None, False
            raise
        self.held, self._ready_asleep, self._uncompared = version, False, None
        self.needs_files, self._avoids_memory = "", False
        logger.info("weights loaded", version=str(version), logprob_mismatch=self.logprob_mismatch)

    async def _compare(self, version: PolicyVersion, probe: Probe | None) -> None:
        logprobs = None if probe is None else await self._engine.probe(probe.ids)
        if probe is None or logprobs is None:
            self.logprob_mismatch = None
            return
        difference = self.logprob_mismatch = mean_difference(probe.logprobs, logprobs)
        if difference <= probe.limit:
            return
        raise EngineFailedError(
            f"the engine loaded weights {version}, but its log-probabilities of the probe differ from the trainer's by "
            f"{difference:.3g} nats a token (limit {probe.limit}): it does not compute with these weights. If this "
            "repeats after a restart, this model cannot be served by this engine on this device: compare "
            "rollout.engine.arguments with its defaults, and the model with those that vLLM supports"
        )


class LocalWeights:
    """Keep a local copy of whole weights, and bring it to each version that is published as a delta.

    The engine loads whole files, and a delta is useless without the version before it. Nothing is copied before the
    first delta: whole versions are loaded from where they were published. A process that is killed leaves its copy to
    the next one, which deletes it.

    All methods block, and may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._folder_lock: FileLock | None = None
        self._held = ""
        """The version of the copy; empty while it is changed, or damaged."""

    def whole(self, folder: Path, digest: str) -> Path:
        """Return a folder that holds the whole weight files of a published version, checked, and its probe.

        Raises:
            WeightsUnreadableError: the files are missing or damaged, or there is no room for the copy.
        """
        with self._lock:
            try:
                return self._brought_forward(folder, digest) or self._published_or_restored(folder, digest)
            except (DeltaError, OSError) as error:
                raise WeightsUnreadableError(str(error)) from error

    def discard(self) -> None:
        """Delete the copy."""
        with self._lock:
            self._discard()

    def _brought_forward(self, folder: Path, digest: str) -> Path | None:
        """Change the copy in place; return None if it does not lead to the version."""
        try:
            chain = chain_from_held(folder, self._held) if self._held else None
            if chain is None or self._folder is None:
                return None
            self._held = ""
            return self._restored(DeltaChain(self._folder, chain.deltas), folder, digest)
        except (DeltaError, OSError) as error:
            logger.warning("local weights cannot be brought forward", version=folder.name, error=str(error))
            return None

    def _published_or_restored(self, folder: Path, digest: str) -> Path:
        self._discard()
        if is_whole(folder):
            _check(weights_digest(folder), digest)
            return folder
        return self._restored(chain_from_whole(folder), folder, digest)

    def _restored(self, chain: DeltaChain, folder: Path, digest: str) -> Path:
        if self._folder is None:
            self._folder, self._folder_lock = temporary_folder(Path(tempfile.gettempdir()) / f"{_FOLDER}-{os.getuid()}")
            self._folder.chmod(0o700)
        if chain.start != self._folder:
            copy_companions(chain.start, self._folder)
        _check(restore(chain.start, chain.deltas, self._folder), digest)
        copy_companions(folder, self._folder)
        self._held = folder.name
        return self._folder

    def _discard(self) -> None:
        self._held = ""
        if self._folder is not None and self._folder_lock is not None:
            remove(self._folder)
            self._folder_lock.release()
        self._folder = self._folder_lock = None


def _check(digest: str, announced: str) -> None:
    if digest != announced:
        raise DeltaError(f"the files have digest {digest}, announced was {announced}")


class ReceptionMarks:
    """Mark in the temporary folder (``TMPDIR``) that weights are being received, for the successor of a killed process.

    Received weights are memory of the process, so it may be killed for lack of memory, whatever was available before.
    Its successor would receive the same weights and be killed again; it loads its first version from files instead.
    The folder survives a restart of a pod's container.
    """

    def __init__(self, run: str) -> None:
        # Other users cannot lock or remove what this one left.
        self._folder, self._name = Path(tempfile.gettempdir()), f"plaudit-receiving-{os.getuid()}-{quote(run, '')}"

    def take_abandoned(self) -> bool:
        """Remove the marks of dead processes; return True if there were any."""
        abandoned = [FileLock.try_acquire(path) for path in self._folder.glob(f"{glob.escape(self._name)}.*")]
        for lock in abandoned:
            if lock is not None:
                lock.release()
        return any(abandoned)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a mark of this process's own within the context; a process that is killed within it leaves the mark."""
        lock = FileLock.acquire(self._folder / f"{self._name}.{secrets.token_hex(8)}")
        try:
            yield
        finally:
            lock.release()


def read_probe(folder: Path) -> Probe | None:
    """Read the folder's probe; None if it has none. Raise ``WeightsUnreadableError`` if the file is not a probe."""
    try:
        return msgspec.json.decode((folder / PROBE_FILE).read_bytes(), type=Probe)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsUnreadableError(f"probe.json in {folder}: {error}") from error


def mean_difference(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return the mean absolute difference of two [N] sequences: infinite if lengths differ, 0 if empty."""
    if len(expected) != len(actual):
        return math.inf
    return math.fsum(abs(a - b) for a, b in zip(expected, actual, strict=True)) / max(1, len(expected))
