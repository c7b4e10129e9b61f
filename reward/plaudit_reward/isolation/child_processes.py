"""Start the child processes of a pool, wait until they have loaded the function, replace those that end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from plaudit_reward.functions.target import Description, Target
from plaudit_reward.isolation.messages import FromChild, FunctionLoaded, FunctionRefused, LoadFunction
from plaudit_reward.isolation.slot import Slot
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)

_LOAD_WITHIN_S = 300.0
_MAX_FAILED_LOADS = 3
_MAX_RESTART_PAUSE_S = 30.0
_IDLE_S = 60.0
"""How long additional children stay idle before they are ended: functions often hang several at a time."""


class Owner(Protocol):
    """Receive the events of child processes."""

    def on_messages(self, slot: Slot, messages: list[FromChild]) -> None:
        """Handle messages of a loaded child."""

    def on_ready(self) -> None:
        """Handle that another child is ready."""

    def on_death(self, slot: Slot, how: str) -> None:
        """Handle the end of a loaded child that ended by itself."""

    def on_unavailable(self, reason: str) -> None:
        """Handle that no child is ready and none can be started at present."""


class ChildProcesses:
    """Keep the child processes of one pool running.

    Args:
        processes: how many to keep; one for async functions that run inline.
        max_concurrent: limit on concurrent works of all children, where a child can run several.
    """

    def __init__(self, name: str, target: Target, processes: int, max_concurrent: int, owner: Owner) -> None:
        self.slots: list[Slot] = []
        self.processes = processes
        self.description: Description | None = None
        self._name = name
        self._target = target
        self._max_concurrent = max_concurrent
        self._owner = owner
        self._opened: asyncio.Future[Description] | None = None
        self._failed_loads = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def one_at_a_time(self) -> bool:
        """Return True when a child runs one work at a time."""
        return self.description is None or self.description.isolation == "process"

    @property
    def max_children(self) -> int:
        """Return the limit on children, including those that take over while works run that may never end."""
        return 4 * self.processes + 4

    @property
    def slots_each(self) -> int:
        """Return how many works a child that can run several may get."""
        return math.ceil(self._max_concurrent / self.processes)

    async def open(self) -> Description:
        """Start the first child, wait until it has loaded the function, then start the others."""
        self._opened = asyncio.get_running_loop().create_future()
        self.spawn()
        try:
            async with asyncio.timeout(_LOAD_WITHIN_S):
                self.description = await self._opened
        except TimeoutError:
            raise ConfigurationError(
                f"{self._target.path} did not finish importing within {_LOAD_WITHIN_S:.0f} s: move slow work at import "
                "into the function"
            ) from None
        if self.description.isolation == "inline":
            self.processes = 1
        self.fill()
        return self.description

    def spawn(self) -> None:
        """Start one child."""
        slot = Slot(self._name, LoadFunction(self._target, self.slots_each), self._on_messages, self._on_exit)
        slot.load_until_s = time.monotonic() + _LOAD_WITHIN_S
        self.slots.append(slot)
        self._run(self._start(slot))

    def fill(self) -> None:
        """Start children until there are ``processes`` of them."""
        if not self._closed:
            for _ in range(self.processes - sum(not slot.draining for slot in self.slots)):
                self.spawn()

    def end(self, slot: Slot) -> None:
        """Kill a child now."""
        slot.child.kill()
        if slot in self.slots:
            self.slots.remove(slot)
            self._run(slot.child.ended())

    def tidy(self, now_s: float) -> None:
        """End children that have drained, that are no longer needed, or that did not load in time."""
        spare = sum(slot.ready and not slot.draining for slot in self.slots) - self.processes
        for slot in list(self.slots):
            if slot.num_given:
                slot.idle_since_s = math.inf
            elif slot.draining:
                self.end(slot)
            elif not slot.ready and now_s > slot.load_until_s:
                self.end(slot)
                self._on_failed_load("it did not finish importing")
            elif slot.ready:
                slot.idle_since_s = min(slot.idle_since_s, now_s)
                if spare > 0 and now_s - slot.idle_since_s > _IDLE_S:
                    spare -= 1
                    self.end(slot)

    def settled(self) -> bool:
        """Return True when ``tidy`` has nothing left to do later."""
        return len(self.slots) <= self.processes and all(slot.ready and not slot.draining for slot in self.slots)

    async def close(self) -> None:
        """End all children."""
        self._closed = True
        for slot in list(self.slots):
            self.end(slot)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, slot: Slot) -> None:
        try:
            await slot.child.start()
        except OSError as error:
            self._on_exit(slot, f"could not be started: {error}")
        if self._closed:
            slot.child.kill()
            await slot.child.ended()

    def _on_messages(self, slot: Slot, messages: list[FromChild]) -> None:
        if slot.ready:
            self._owner.on_messages(slot, messages)
            return
        match messages[0]:
            case FunctionLoaded(description):
                slot.ready = True
                self._failed_loads = 0
                if self._opened is not None and not self._opened.done():
                    self._opened.set_result(description)
                self._owner.on_ready()
            case FunctionRefused(message):
                self.end(slot)
                self._on_failed_load(message)

    def _on_exit(self, slot: Slot, how: str) -> None:
        if self._closed or slot not in self.slots:
            return
        self.slots.remove(slot)
        if not slot.ready:
            self._on_failed_load(f"{self._target.path} cannot be loaded: its process {how}")
            return
        logger.warning("scorer process ended", scorer=self._name, how=how)
        self._owner.on_death(slot, how)
        self.fill()

    def _on_failed_load(self, message: str) -> None:
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(ConfigurationError(message))
            return
        self._failed_loads += 1
        logger.error("scorer process not loaded", scorer=self._name, error=message)
        if self._failed_loads >= _MAX_FAILED_LOADS and not any(slot.ready for slot in self.slots):
            self._owner.on_unavailable(message)
        pause_s = min(_MAX_RESTART_PAUSE_S, 0.1 * 2**self._failed_loads)
        asyncio.get_running_loop().call_later(pause_s, self.fill)
