"""The search that says that the protocol keeps I1-I7 (test_acl) finds a bug in each when there is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import seed

from plaudit_wire.redis import RedisAddress
from stream_protocol.machine import Machine
from stream_protocol.watched_machine import machine_of, violations_found
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
    return seed(SEED)(machine_of(Machine, World, *arguments))


@pytest.mark.long
@pytest.mark.parametrize("bug", SEEDED_BUGS)
def test_the_search_finds_a_seeded_bug(address: RedisAddress, bug: str) -> None:
    assert violations_found(machine, address, SEEDED_BUGS[bug], bug.partition(" ")[0], examples=600)
