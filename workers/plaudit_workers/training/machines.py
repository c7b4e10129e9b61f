"""Remove the machines of samples when their groups have ended, and keep those that the job asks for.

Whoever made a machine may have been killed since: what decides is the ledger. A folder whose group is not in flight is
of no use, because a group enters the ledger before its prompt reaches a rollout.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from plaudit_reward.machines import KEPT, SANDBOXES
from plaudit_reward.providers import Provider
from plaudit_reward.verifier import has_reward
from plaudit_sandbox.machine import remove
from plaudit_wire.errors import ConfigurationError, InfrastructureError
from plaudit_wire.logs import get_logger
from plaudit_workers.training.schedule import TrainerLedger

logger = get_logger(__name__)
_EVERY_S = 1.0
_ENDED = ".sandboxes-ended"
"""``sandboxes`` after the run's last step: no rollout makes a machine in it any more."""
Keep = Literal["none", "failed", "all"]


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
            await asyncio.sleep(_EVERY_S)

    async def end(self) -> None:
        """Remove all machines after the run's last step."""
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
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
        kept = [machine for machine in machines if not machine.name.startswith(".") and self._is_kept(machine)]
        for machine in kept:
            self._move(machine)
        self._provider.remove(*(machine for machine in machines if machine not in kept))
        remove(*groups)

    def _is_kept(self, machine: Path) -> bool:
        return self._keep == "all" or (self._keep == "failed" and not has_reward(machine))

    def _move(self, machine: Path) -> None:
        target = self._folder / KEPT / machine.parent.name
        try:
            target.mkdir(parents=True, exist_ok=True)
            machine.rename(target / machine.name)
        except OSError as error:
            logger.warning("machine not kept", machine=machine.name, error=error.strerror)


def _entries(folder: Path) -> list[Path]:
    """Return what a folder holds; nothing for a folder that is gone."""
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
