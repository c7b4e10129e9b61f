"""``agent.kind: singleTurn``: one response to the prompt."""

from __future__ import annotations

import numpy as np

from plaudit_wire.messages import Prompt
from plaudit_workers.rollout.agents.agent import Generate, Trajectory


class SingleTurn:
    """Call the policy once."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Return the policy's response unchanged."""
        trajectory = Trajectory()
        response = await generate(np.frombuffer(prompt.prompt_ids, "<i4").tolist())
        trajectory.prompt_ids = response.prompt_ids
        trajectory.add_turn(response)
        return trajectory
