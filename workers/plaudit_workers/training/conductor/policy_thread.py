"""The policy's one thread: updates and file writing happen there while the event loop goes on. For the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.stream.group import Group
from plaudit_workers.training.trainer_backend import TrainablePolicy

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PolicyThread:
    """Awaitable calls of a ``TrainablePolicy``, one after the other."""

    def __init__(self, policy: TrainablePolicy) -> None:
        self._policy = policy
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Runs anything in the policy's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """See ``TrainablePolicy.update``."""
        return await self.run(self._policy.update, groups)

    async def publish(self, version: PolicyVersion) -> Announcement:
        """See ``TrainablePolicy.publish``."""
        return await self.run(self._policy.publish, version)

    async def prune(self, in_use: Collection[str]) -> None:
        """See ``TrainablePolicy.prune``; does not wait for what the policy is doing."""
        await asyncio.to_thread(self._policy.prune, in_use)

    async def save(self, step: int, extra: dict[str, Any]) -> Path:
        """See ``TrainablePolicy.save``."""
        return await self.run(self._policy.save, step, extra)

    async def checkpoints(self) -> dict[Path, dict[str, Any]]:
        """See ``TrainablePolicy.checkpoints``."""
        return await self.run(self._policy.checkpoints)

    async def load(self, checkpoint: Path) -> dict[str, Any]:
        """See ``TrainablePolicy.load``."""
        return await self.run(self._policy.load, checkpoint)

    async def close(self) -> None:
        """Closes the policy."""
        await self.run(self._policy.close)

    def abandon(self) -> None:
        """Ends the thread once what runs there is done; nothing waits for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
