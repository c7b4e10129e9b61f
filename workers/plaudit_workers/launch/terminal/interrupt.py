"""React to Ctrl-C and SIGTERM: the first asks the run to stop, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from rich.console import Console


class Interrupt:
    """Handle the two signals of a run on its event loop. Make it inside the task that runs the job.

    ``saves`` returns True while a stop means that the trainer writes a checkpoint first.
    """

    def __init__(self, console: Console, saves: Callable[[], bool]) -> None:
        self.stop = asyncio.Event()
        self._console = console
        self._saves = saves
        self._twice = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.listen()

    @property
    def at_once(self) -> bool:
        """Return True when processes are to be killed and not asked: there is nothing to save, or a second Ctrl-C."""
        return self.stop.is_set() and (self._twice or not self._saves())

    def listen(self) -> None:
        """Handle the signals; again after ``ray.init``, whose handler of SIGTERM prints a C++ stack."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self._twice = True
            self._console.out("stopping at once", highlight=False)
            self._task.cancel()
            return
        self.stop.set()
        after = ": the trainer finishes its update and writes a checkpoint (Ctrl-C again stops at once)"
        self._console.out(f"stopping{after if self._saves() else ' …'}", highlight=False)
