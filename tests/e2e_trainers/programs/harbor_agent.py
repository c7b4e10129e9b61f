"""An agent of Harbor that runs its task's instruction as a command."""

from __future__ import annotations

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class InstructionAgent(BaseAgent):
    """Run the instruction."""

    @staticmethod
    def name() -> str:
        """Return its name in results."""
        return "instruction"

    def version(self) -> str:
        """Return its version in results."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run the instruction in the task's machine, whatever its exit code."""
        await environment.exec(instruction)
