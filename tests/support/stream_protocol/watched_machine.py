"""The shared base of the stream tests' state machines: runs work, judges violations, and ends the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
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

    @rule(lossy=st.booleans())
    def replies_get_lost(self, lossy: bool) -> None:
        self.world.lossy = lossy

    @rule(rounds=st.integers(1, 2))
    def redis_loses_its_last_second(self, rounds: int) -> None:
        self.do(self.world.lose_last_second(rounds))

    @precondition(lambda self: not self.world.lost_everything)
    @rule()
    def redis_loses_everything(self) -> None:
        self.do(self.world.lose_everything())

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


def violations_found(
    machine: Callable[..., Any], address: RedisAddress, bug: tuple[str, Mapping[str, str]], watched: str, examples: int
) -> list[str]:
    """Search with a bug seeded into the code in Redis; return the violations of ``watched`` that it meets.

    Args:
        machine: makes the machine from what ``machine_of`` takes after the world's type.
        bug: a file of ``lua/``, and what replaces which text in it.
    """
    file, edits = bug
    text = Scripts().files[file]
    for sound, broken in edits.items():
        assert text.count(sound) == 1, f"the seeded bug no longer fits lua/{file}.lua"
        text = text.replace(sound, broken)
    found: list[str] = []
    with contextlib.suppress(AssertionError, Flaky):
        run_state_machine_as_test(
            machine(address, Scripts(overrides={file: text}), watched, found),
            settings=settings(SEARCH, max_examples=examples),
        )
    return found
