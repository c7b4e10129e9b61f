"""Release an overdue group: used by the trainer and by clients of a scoring service."""

from __future__ import annotations

from plaudit_workers.stream.group import Group
from plaudit_workers.stream.group_hash import without_group_scorers
from plaudit_workers.stream.transitions.call import Call
from plaudit_workers.stream.transitions.trainer import release


def release_call(group: Group, incarnation: int) -> Call[bool]:
    """Return the transition that releases an overdue group; a session's group has no trainer and incarnation 0."""
    if group.phase != "group_scoring":
        return release(group.id, incarnation)
    scorings = without_group_scorers(group, "timeout", "the group-scope scorers' deadline passed")
    return release(group.id, incarnation, scorings)
