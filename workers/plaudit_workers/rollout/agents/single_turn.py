"""``agent.kind: singleTurn``: the prompt in, one response out."""

from __future__ import annotations

import numpy as np

from plaudit_wire.messages import Prompt
from plaudit_workers.rollout.agents.agent import Generate, Trajectory


class SingleTurn:
    """Asks the policy once."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Returns the policy's response as it is."""
        trajectory = Trajectory()
        trajectory.add_turn(await generate(np.frombuffer(prompt.prompt_ids, "<i4").tolist()))
        return trajectory
