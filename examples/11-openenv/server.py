"""An OpenEnv server: a lamp shows a number, and pressing the button of that number is right, twice in a row.

It listens on ``$HOST:$PORT``, as servers of ``spec.environments`` do.
"""

import os
import random

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

NUM_BUTTONS = 5
NUM_PRESSES = 2


class Press(Action):
    """Press a button."""

    button: int


class Lamp(Observation):
    """The number that the lamp shows."""

    number: int = 0


class Lamps(Environment):
    """One episode; each sample has its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.numbers = []
        self.presses = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        """Draw the numbers from the seed, which the samples of a group share, and show the first."""
        self.numbers = random.Random(seed).choices(range(NUM_BUTTONS), k=NUM_PRESSES)
        self.presses = 0
        return Lamp(number=self.numbers[0])

    def step(self, action, timeout_s=None, **kwargs):
        """Reward the right button with 0.5; show the next number, or end the episode."""
        reward = 0.5 if action.button == self.numbers[self.presses] else 0.0
        self.presses += 1
        done = self.presses == NUM_PRESSES
        return Lamp(number=self.numbers[0 if done else self.presses], reward=reward, done=done)

    @property
    def state(self):
        """Return the number of steps."""
        return State(step_count=self.presses)


if __name__ == "__main__":
    app = create_fastapi_app(Lamps, Press, Lamp, max_concurrent_envs=256)
    uvicorn.run(app, host=os.environ["HOST"], port=int(os.environ["PORT"]), log_level="warning")
