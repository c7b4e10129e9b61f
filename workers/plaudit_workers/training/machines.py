"""Remove the machines of samples when their groups have ended, and keep those that the job asks for.

Whoever made a machine may have been killed since: what decides is the ledger. A folder whose group is not in flight is
of no use, because a group enters the ledger before its prompt reaches a rollout.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from plaudit_metrics.statistics.steps import distribution
from plaudit_reward.machines import KEPT, SANDBOXES
from plaudit_reward.providers import Provider
from plaudit_reward.served_machines import ServedProvider
from plaudit_reward.verifier import Keep, is_kept
from plaudit_sandbox.machine import remove
from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_wire.logs import get_logger
from plaudit_workers.training.schedule import TrainerLedger

logger = get_logger(__name__)
_EVERY_S = 1.0
_ENDED = ".sandboxes-ended"
"""``sandboxes`` after the run's last step: no rollout makes a machine in it any more."""


class EndedMachines:
    """Hold the folder of a run's machines.

    Args:
        folder: The run's.
        keep: ``sandboxes.keep``.
    """

    def __init__(self, folder: Path, keep: Keep, ledger: TrainerLedger, provider: Provider) -> None:
        self._provider = provider
        self._folder = folder
        self._keep = keep
        self._ledger = ledger
        self._released_s: list[float] = []
        """Seconds in which machines were removed, since ``release_figures`` was read."""
        self.count = 0
        """Machines of groups in flight, when they were last counted."""

    def begin(self) -> None:
        """Let rollouts make machines."""
        (self._folder / SANDBOXES).mkdir(exist_ok=True)

    async def remove(self) -> None:
        """Remove the machines of groups that are not in flight, until cancelled."""
        while True:
            groups = await asyncio.to_thread(_entries, self._folder / SANDBOXES)
            ended = [group for group in groups if self._ledger.find(group.name) is None]
            try:
                await asyncio.to_thread(self._end, ended)
            except InfrastructureError as error:
                logger.warning("machines of ended groups are not removed yet", error=str(error))
            in_flight = [group for group in groups if group not in ended]
            self.count = await asyncio.to_thread(_num_machines, in_flight)
            await asyncio.sleep(_EVERY_S)

    def release_figures(self) -> dict[str, float]:
        """Return figures of the machines that were removed since the last call."""
        released_s, self._released_s = self._released_s, []
        return distribution("reward_pipeline/sandbox/release_s", np.array(released_s))

    async def end(self) -> None:
        """Remove all machines after the run's last step."""
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        with suppress(InfrastructureError):  # it is tried again
            self._end(_entries(self._folder / SANDBOXES))  # here a broker puts what is kept
        with suppress(FileNotFoundError):
            (self._folder / SANDBOXES).rename(self._folder / _ENDED)
        try:
            self._end(_entries(self._folder / _ENDED))
            remove(self._folder / _ENDED)
            self._provider.end()
        except (ConfigurationError, InfrastructureError) as error:
            logger.warning("machines may be left", error=str(error))

    def _end(self, groups: Sequence[Path]) -> None:
        machines = [machine for group in groups for machine in _entries(group)]
        kept = [m for m in machines if not m.name.startswith(".") and is_kept(self._keep, m)]
        if isinstance(self._provider, ServedProvider):
            self._provider.keep(*kept)
        for machine in kept:
            self._move(machine)
        began_s = time.monotonic()
        self._provider.remove(*(machine for machine in machines if machine not in kept))
        remove(*groups)
        self._released_s += [time.monotonic() - began_s] * (len(machines) - len(kept))

    def _move(self, machine: Path) -> None:
        target = self._folder / KEPT / machine.parent.name
        try:
            target.mkdir(parents=True, exist_ok=True)
            machine.rename(target / machine.name)
        except OSError as error:
            logger.warning("machine not kept", machine=machine.name, error=error.strerror)


def _num_machines(groups: Sequence[Path]) -> int:
    """Count machines, without copies for their tests."""
    return sum(not machine.name.startswith(".") for group in groups for machine in _entries(group))


def _entries(folder: Path) -> list[Path]:
    """Return what a folder holds; nothing for a folder that is gone."""
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
