"""Run the backend's blocking calls in one thread while the event loop continues. Used by the conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from plaudit_workers.training.trainer_backend import TrainerBackend

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class BackendThread:
    """Hold the thread of a backend: ``await thread.run(thread.backend.update, groups)``."""

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
