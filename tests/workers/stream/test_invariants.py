"""The protocol under random faults keeps I1-I7; and the search that says so finds a bug in each when there is one."""

from __future__ import annotations

from types import ModuleType

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from plaudit_workers.stream.connection import RedisAddress
from plaudit_workers.stream.scripts import Scripts


def test_every_invariant_holds_under_random_faults(address: RedisAddress, protocol_test: dict[str, ModuleType]) -> None:
    machine = protocol_test["machine"]
    run_state_machine_as_test(
        machine.machine_of(protocol_test["world"].World, address, Scripts()),
        settings=settings(machine.SEARCH, max_examples=100),
    )
