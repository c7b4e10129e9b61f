"""Serve an OpenEnv environment whose actions are MCP tools, on the port that is given.

``plain`` as the second argument: its action is the base class, as for a server that also takes other actions.
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Safe(MCPEnvironment):
    """A safe that opens at the second digit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("safe")
        self.turned = []

        @tools.tool()
        def turn(digit: int) -> str:
            """Turn the lock to a digit."""
            if digit > 9:
                raise ValueError("no such digit")
            self.turned.append(digit)
            return f"turned to {self.turned}"

        super().__init__(tools)

    def reset(self, seed=None, **kwargs):
        self.turned = []
        return Observation()

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 0.5 if len(self.turned) == 2 else 0.0
        observation.done = len(self.turned) == 2
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError(f"not an MCP action: {action}")

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    action = Action if sys.argv[2:] == ["plain"] else CallToolAction
    app = create_fastapi_app(Safe, action, CallToolObservation, max_concurrent_envs=8)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
