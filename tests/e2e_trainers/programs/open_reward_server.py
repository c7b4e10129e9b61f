"""A server of the package openreward: guess a number; and a conversation that a terminal tool judges."""

from __future__ import annotations

import sys

from openreward.environments import Environment, Server, TextBlock, ToolOutput, terminal, tool
from openreward.environments.types import Message, ReasoningBlock, ToolCallBlock, ToolResultBlock
from pydantic import BaseModel


class Number(BaseModel):
    """Arguments of ``guess``."""

    number: int


class Answer(BaseModel):
    """The argument of the terminal tool."""

    answer: str


class Guess(Environment):
    """Guess the number of the task; a near guess has a part of the reward."""

    @classmethod
    def list_splits(cls):
        """Return the splits."""
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split):
        """Return the tasks of a split."""
        return [{"number": number} for number in (range(3, 6) if split == "train" else (9,))]

    def __init__(self, task_spec=None, secrets=None):
        super().__init__(task_spec, secrets)
        self.secrets = secrets

    def get_prompt(self):
        """Return the prompt."""
        return [TextBlock(text="Guess."), TextBlock(text=f"Hint: {self.secrets.get('hint', 'none')}")]

    @tool
    async def guess(self, args: Number) -> ToolOutput:
        """Guess the number."""
        if args.number < 0:
            raise ValueError("below zero")
        right = args.number == self.task_spec["number"]
        near = 0.25 if abs(args.number - self.task_spec["number"]) == 1 else None
        text = "ä right " * 2000 if right else "wrong"  # the long one comes in several events
        return ToolOutput(blocks=[TextBlock(text=text)], reward=1.0 if right else near, finished=right)


class Talk(Environment):
    """Answer a question after a conversation; the answer itself ends the episode."""

    @classmethod
    def list_splits(cls):
        """Return the splits."""
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        """Return the tasks of a split."""
        return [{"answer": "blue"}]

    def get_messages(self):
        """Return the conversation."""
        call = ToolCallBlock(id="call_a", name="look", input={"at": "sky"})
        result = ToolResultBlock(tool_call_id="call_a", blocks=[TextBlock(text="blue")])
        return [
            Message(role="system", blocks=[TextBlock(text="Be short.")]),
            Message(role="user", blocks=[TextBlock(text="Look at the sky.")]),
            Message(role="assistant", blocks=[ReasoningBlock(text="I look."), call]),
            Message(role="user", blocks=[result, TextBlock(text="Which colour?")]),
        ]

    @tool
    async def look(self) -> ToolOutput:
        """Look at the sky."""
        return ToolOutput(blocks=[TextBlock(text="blue")], reward=0.5)

    @terminal
    @tool
    async def submit(self, args: Answer) -> ToolOutput:
        """Submit the answer."""
        return ToolOutput(blocks=[], reward=float(self.task_spec["answer"] in args.answer), finished=True)


Server([Guess, Talk]).run(host="127.0.0.1", port=int(sys.argv[1]))
