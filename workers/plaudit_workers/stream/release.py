"""What releasing an overdue group says: its samples are given up, or its group-scope scorers came to nothing."""

from __future__ import annotations

import msgspec

from plaudit_wire.records import ScoringRecord
from plaudit_workers.stream.group import Group
from plaudit_workers.stream.group_hash import without_group_scorers
from plaudit_workers.stream.transitions.scripts import Argument, Call, new_call

_GIVEN_UP = msgspec.msgpack.encode(ScoringRecord(outcome="given_up", reason="the group's deadline passed"))


def release_call(group: Group, incarnation: int) -> Call:
    """The transition ``release`` of one group.

    Args:
        group: as it was read when its deadline had passed.
        incarnation: of the trainer; 0 for a session's group, which has none.
    """
    arguments: list[Argument] = [group.id, new_call(), incarnation, _GIVEN_UP]
    if group.phase == "group_scoring":
        for scoring in without_group_scorers(group, "timeout", "the group-scope scorers' deadline passed"):
            arguments += [scoring.outcome, msgspec.msgpack.encode(scoring)]
    return Call("release", arguments)
