"""Turn the captured turns of a sample into token sequences: one for each conversation that was not continued further.

A turn that continues the last turn of a sequence is appended to it. Every other turn begins a sequence of its own,
whose prompt holds all tokens before it: a token that the policy sampled is in the loss of exactly one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from plaudit_workers.agent_processes.trajectory import Trajectory
from plaudit_workers.rollout.agents.endpoint.history import Turn


def trajectory_of(turns: Sequence[Turn]) -> Trajectory:
    """Return the sequence with the newest turn; the others are its ``branches``. There is at least one turn."""
    branches: list[Trajectory] = []
    ends: dict[int, Trajectory] = {}
    """Number of the last turn of a sequence → the sequence."""
    places: list[tuple[Trajectory, int]] = []
    """The sequence of each turn and the index of its first token there."""
    for turn in turns:
        branch = ends.pop(turn.parent.number, None) if turn.parent is not None else None
        if branch is None:
            branch = Trajectory(prompt_ids=turn.prompt_ids, prompt_messages=turn.messages)
            branches.append(branch)
        else:
            branch.add_observation(turn.prompt_ids[len(branch.prompt_ids) + len(branch.response_ids) :])
            branch.messages += turn.messages[len(branch.prompt_messages) + len(branch.messages) :]
        places.append((branch, len(branch.response_ids)))
        branch.add_turn(turn.finished)
        branch.messages.append(turn.answer)
        ends[turn.number] = branch
    newest = ends[turns[-1].number]
    newest.branches = [branch for branch in branches if branch is not newest]
    newest.turns = _first_tokens([newest, *newest.branches], places)
    return newest


def _first_tokens(sequences: list[Trajectory], places: list[tuple[Trajectory, int]]) -> list[int]:
    """Return the first token of each turn, counted over all responses, one after the other."""
    offsets = accumulate((len(sequence.response_ids) for sequence in sequences), initial=0)
    offset_of = {id(sequence): offset for sequence, offset in zip(sequences, offsets, strict=False)}
    return [offset_of[id(sequence)] + first for sequence, first in places]
