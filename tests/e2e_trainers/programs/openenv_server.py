"""Serve an OpenEnv environment, whose steps add to a counter, on the port that is given."""

import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    """Add a number to the counter."""

    number: int


class Counter(Observation):
    """The counter."""

    value: int = 0


class CounterEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.value = 0

    def reset(self, seed=None, **kwargs):
        self.value = 0
        return Counter(value=0)

    def step(self, action, **kwargs):
        self.value += action.number
        return Counter(value=self.value, reward=1.0 if self.value == 6 else 0.0, done=self.value >= 6)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    uvicorn.run(
        create_fastapi_app(CounterEnvironment, Add, Counter, max_concurrent_envs=8),
        port=int(sys.argv[1]),
        log_level="warning",
    )
