"""The shared base of the stream tests' state machines: runs work, judges violations, and ends the run."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, reject, settings
from hypothesis.stateful import RuleBasedStateMachine
from redis.exceptions import ResponseError

from plaudit_wire.redis import RedisAddress
from plaudit_workers.stream.libraries import Scripts

SEARCH = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


class WatchedMachine(RuleBasedStateMachine):
    """A world under rules; ``machine_of`` sets its Redis and the texts of the transitions."""

    world_type: Any
    address: RedisAddress
    scripts: Scripts
    watched: str
    """The invariant to watch, ignoring violations of all others; "" watches all."""
    found: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.world: Any = None

    def do(self, work: Any) -> None:
        with contextlib.closing(work):
            self.run(self.world.everybody_works())
            self.run(work)
            self.check()

    def run(self, work: Any) -> None:
        try:
            self.runner.run(work)
        except ResponseError:  # a seeded bug may also break a script that comes after it
            if not self.watched:
                raise
            reject()

    def check(self) -> None:
        broken = [violation for violation in self.world.violations if violation.startswith(self.watched)]
        self.found += broken
        assert not broken, "\n".join(broken)

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if not self.world.violations:
                self.run(self.world.finish())
                self.check()
        finally:
            self.runner.run(self.world.stop())
            self.runner.close()


M = TypeVar("M", bound=WatchedMachine)


def machine_of(
    machine: type[M],
    world_type: Any,
    address: RedisAddress,
    scripts: Scripts,
    watched: str = "",
    found: list[str] | None = None,
) -> type[M]:
    """``machine`` against one Redis, with these texts of the transitions; ``found`` collects violations."""
    about = {"world_type": world_type, "address": address, "scripts": scripts}
    return type(machine.__name__, (machine,), {**about, "watched": watched, "found": [] if found is None else found})
