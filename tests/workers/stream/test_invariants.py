"""The search that says that the protocol keeps I1-I7 (test_acl) finds a bug in each when there is one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from plaudit_wire.redis import RedisAddress
from plaudit_workers.stream.libraries import Scripts
from stream_protocol.machine import Machine
from stream_protocol.watched_machine import SEARCH, machine_of
from stream_protocol.world import World

SEEDED_BUGS = {
    "I1: a sample may become terminal twice": ("commit", {"if g.ended then": "if false then"}),
    "I2: a group that was trained stays, and so does its entry": (
        "close",
        {"redis.call('UNLINK', group)": "", "retire('ready', redis.call('HGET', group, 'entry'))": ""},
    ),
    "I3: a trainer that was replaced may close": ("close", {"if stale(incarnation) then return 'stale' end": ""}),
    "I4: nobody takes over the work of others": ("claim", {"if due() then": "if false then"}),
    "I5: entries are acked and stay": ("shared/run", {"redis.call('XDEL', prefix .. stream, entry)": ""}),
    "I6: taken before it was published": (
        "commit",
        {"math.max(tonumber(g.published[4]), now - ARGV[9])": "now - ARGV[9]"},
    ),
    "I7: the score of a body that is gone": ("commit", {" or g.published[2] ~= ARGV[6]": ""}),
}


SEED = 3
"""One with which the search finds the bugs early."""


def machine(*arguments: Any) -> Any:
    return machine_of(Machine, World, *arguments)


@pytest.mark.long
@pytest.mark.parametrize("bug", SEEDED_BUGS)
def test_the_search_finds_a_seeded_bug(address: RedisAddress, bug: str) -> None:
    file, edits = SEEDED_BUGS[bug]
    text = Scripts().files[file]
    for sound, broken in edits.items():
        assert text.count(sound) == 1, f"the seeded bug no longer fits lua/{file}.lua"
        text = text.replace(sound, broken)
    found: list[str] = []
    buggy = Scripts(overrides={file: text})
    with contextlib.suppress(AssertionError, Flaky):
        run_state_machine_as_test(
            seed(SEED)(machine(address, buggy, bug.partition(" ")[0], found)),
            settings=settings(SEARCH, max_examples=600),
        )
    assert found
