"""The search that says that sessions keep S1-S7 (test_acl) finds a bug in each when there is one."""

from __future__ import annotations

from typing import Any

import pytest

from plaudit_wire.redis import RedisAddress
from stream_protocol.session_machine import SessionMachine
from stream_protocol.session_world import SessionWorld
from stream_protocol.watched_machine import machine_of, violations_found

SEEDED_BUGS = {
    "S1: what is acknowledged may be scored again": (
        "acknowledge",
        {"redis.call('ZADD', returned, now_text, ARGV[i])": ""},
    ),
    "S1: a group that has ended is forgotten": (
        "shared/group",
        {
            "call('HSET', session_key(g.session, 'groups'), id, g.admission .. ' ' .. result)": (
                "call('HDEL', session_key(g.session, 'groups'), id)"
            )
        },
    ),
    "S2: the score of other samples": ("commit", {"ARGV[10])": "'\\130\\167outcome\\166scored\\165value\\1')"}),
    "S3: a client that was replaced has a say": (
        "shared/session",
        {"if stored > tonumber(epoch) then return 'stale' end": ""},
    ),
    "S4: no bound": ("submit", {"if not take_room(n) then return 'full' end": ""}),
    "S4: a bound for each group of a call": ("shared/session", {"own, all = own + n, all + n": "return true"}),
    "S4: a bound for each name of an owner": (
        "shared/session",
        {"local part = most / sharing": "local part = most / sharing\n  all = own"},
    ),
    "S6: an ended session keeps its room": ("end_session", {"if n then count_in_work(session, -n) end": ""}),
    "S5: results go to the other session": (
        "shared/group",
        {"'XADD', session_key(g.session, 'results')": "'XADD', session_key('a', 'results')"},
    ),
    "S7: deadlines stay when the clock is stepped": ("overdue", {"{open_groups, sessions}": "{sessions}"}),
    "S6: groups of an ended session stay": ("end_session", {"redis.call('UNLINK', prefix .. 'group:' .. member)": ""}),
}


def machine(*arguments: Any) -> Any:
    return machine_of(SessionMachine, SessionWorld, *arguments)


@pytest.mark.long
@pytest.mark.parametrize("bug", SEEDED_BUGS)
def test_the_search_finds_a_seeded_bug(address: RedisAddress, bug: str) -> None:
    assert violations_found(machine, address, SEEDED_BUGS[bug], bug.partition(":")[0], examples=300)
