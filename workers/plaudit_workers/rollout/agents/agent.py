"""Turn a prompt into a trajectory by calling ``generate`` any number of times: the protocol of agents.

Called by ``sample_run``; implemented by ``single_turn``, ``tools``, ``endpoint`` and (``kind: custom``) by users' own
classes, which run in processes of their own (``custom``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from plaudit_wire.messages import Prompt
from plaudit_workers.agent_processes.trajectory import FinishedSample
from plaudit_workers.agent_processes.trajectory import Trajectory as Trajectory


class Generate(Protocol):
    """Continue a sample; passed to ``Agent.run``.

    The n-th call of a sample has its own seed, so a repeated run gives the same trajectory. Time spent in ``generate``
    counts as generation; the rest of ``run`` counts as tools.
    """

    async def __call__(
        self, ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> FinishedSample:
        """Continue ``ids`` with the prompt's sampling parameters.

        Args:
            max_tokens: most tokens of this turn; at most, and by default, the prompt's own limit.
            stop: texts that end this turn, beside the prompt's own; they stay part of it.
        """
        ...


class Agent(Protocol):
    """Generate one sample of a prompt. One instance serves all samples of a process, many at a time."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Return the trajectory; an exception fails this sample only.

        Raises:
            AgentError: the sample has no trajectory; it ends without a score, for this reason.
        """
        ...


class AgentError(Exception):
    """Report that what holds a sample failed before there was a trajectory: a user's code, or its server."""

    def __init__(self, reason: str, outcome: Literal["data_error", "infra_error", "timeout"] = "data_error") -> None:
        super().__init__(reason)
        self.outcome = outcome
