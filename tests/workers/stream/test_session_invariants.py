"""Sessions under random faults keep S1-S6; and the search that says so finds a bug in each when there is one."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from plaudit_workers.stream.connection import RedisAddress
from plaudit_workers.stream.transitions.scripts import Scripts

SEEDED_BUGS = {
    "S1: what is acknowledged may be scored again": (
        "acknowledge",
        {"redis.call('ZADD', returned, stamp(now), ARGV[i])": ""},
    ),
    "S1: a group that has ended is forgotten": (
        "shared/group",
        {
            "call('HSET', session_key(g.session, 'groups'), id, digest .. ' ' .. result)": (
                "call('HDEL', session_key(g.session, 'groups'), id)"
            )
        },
    ),
    "S2: the score of other samples": ("commit", {"ARGV[10])": "'\\130\\167outcome\\166scored\\165value\\1')"}),
    "S3: a client that was replaced has a say": (
        "shared/session",
        {"if stored > tonumber(epoch) then return 'stale' end": ""},
    ),
    "S4: no bound": ("submit", {"if in_work > 0 and in_work + n > tonumber(ARGV[4]) then return 'full' end": ""}),
    "S5: results go to the other session": (
        "shared/group",
        {"'XADD', session_key(g.session, 'results')": "'XADD', session_key('a', 'results')"},
    ),
    "S6: groups of an ended session stay": ("end_session", {"redis.call('UNLINK', prefix .. 'group:' .. member)": ""}),
}


def machine(protocol_test: dict[str, ModuleType], *arguments: Any) -> Any:
    world = protocol_test["session_world"].SessionWorld
    machine = protocol_test["session_machine"].SessionMachine
    return protocol_test["watched_machine"].machine_of(machine, world, *arguments)


def test_every_invariant_holds_under_random_faults(address: RedisAddress, protocol_test: dict[str, ModuleType]) -> None:
    search = protocol_test["watched_machine"].SEARCH
    run_state_machine_as_test(
        machine(protocol_test, address, Scripts()), settings=settings(search, max_examples=settings().max_examples // 4)
    )


@pytest.mark.parametrize("bug", SEEDED_BUGS)
def test_the_search_finds_a_seeded_bug(address: RedisAddress, protocol_test: dict[str, ModuleType], bug: str) -> None:
    file, edits = SEEDED_BUGS[bug]
    text = Scripts().files[file]
    for sound, broken in edits.items():
        assert text.count(sound) == 1, f"the seeded bug no longer fits lua/{file}.lua"
        text = text.replace(sound, broken)
    found: list[str] = []
    search, buggy = protocol_test["watched_machine"].SEARCH, Scripts(overrides={file: text})
    with contextlib.suppress(AssertionError, Flaky):
        run_state_machine_as_test(
            machine(protocol_test, address, buggy, bug.partition(":")[0], found),
            settings=settings(search, max_examples=300),
        )
    assert found
