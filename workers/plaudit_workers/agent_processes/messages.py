"""Define the messages between a rollout, the template process that loads users' files, and samples' processes.

| message | from | to | meaning |
| --- | --- | --- | --- |
| ``Load`` | rollout | template | the first message: what to load |
| ``Loaded`` / ``Refused`` | template | rollout | the answer |
| ``Fork`` | rollout | template | fork the process of one sample; comes with its end of a connection |
| ``Kill`` | rollout | template | kill that process and everything that it started |
| ``Ended`` | template | rollout | that process ended |
| ``CallTool`` | rollout | sample | call a tool; several may run at a time |
| ``ToolResult`` | sample | rollout | its result |
| ``AskEnvironment`` | rollout | sample | reset the environment, step it, or ask for its reward |
| ``EnvironmentReply`` | sample | rollout | its answer |
| ``RunAgent`` | rollout | sample | run the agent's class on a prompt |
| ``GenerateTurn`` | sample | rollout | the agent asks for tokens |
| ``Generated`` | rollout | sample | the tokens, or the reason that there are none |
| ``AgentDone`` / ``AgentFailed`` | sample | rollout | the agent's trajectory, or what it raised |
| ``RunAgentProgram`` | rollout | sample | run the program |
| ``ProgramEnded`` | sample | rollout | its reward, or the reason that it failed |

Frames are those of ``plaudit_reward.isolation.messages``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from plaudit_wire.messages import Prompt
from plaudit_wire.sample import AgentReward


class FunctionTool(msgspec.Struct, frozen=True, tag=True):
    """Name a Python function in a file; its signature and docstring describe it to the model."""

    path: str
    function: str
    timeout_s: float = 30.0


class VerlTools(msgspec.Struct, frozen=True, tag=True):
    """Name the classes that a YAML file in verl's format lists (``multi_turn.tool_config_path``)."""

    path: str
    timeout_s: float = 30.0


class McpServer(msgspec.Struct, frozen=True, tag=True):
    """Name all tools of an MCP server, by its URL or by the command that starts it."""

    url: str = ""
    command: list[str] = []
    timeout_s: float = 30.0
    headers: dict[str, str] = {}
    """Sent with every request to ``url``."""


class AgentClass(msgspec.Struct, frozen=True, tag=True):
    """Name a class in a file that runs whole samples."""

    path: str
    class_name: str


class Program(msgspec.Struct, frozen=True, tag=True):
    """Name a command, or a function in a file, that asks the rollout's HTTP endpoint for the policy's turns."""

    command: list[str] = []
    path: str = ""
    function: str = ""
    """Empty: run ``command``."""


class EnvironmentClass(msgspec.Struct, frozen=True, tag=True):
    """Name a class in a file in the form of TRL, SkyRL or verl; ``sources.environments.load`` recognises the form."""

    path: str
    class_name: str
    arguments: dict[str, Any] = {}
    max_turns: int = 8
    timeout_s: float = 60.0
    model: dict[str, Any] = {}
    """``spec.model``, for verl's agent loops, which tokenise themselves."""


class EnvironmentServer(msgspec.Struct, frozen=True, tag=True):
    """Name an environment behind a URL: an OpenEnv server or a resources server of NeMo Gym."""

    url: str
    arguments: dict[str, Any] = {}
    timeout_s: float = 60.0
    spread: str = ""
    """The job's field that spreads its connections over several servers; empty: one server has those of a session."""


Source = FunctionTool | VerlTools | McpServer | AgentClass | EnvironmentClass | EnvironmentServer | Program
EnvironmentKind = Literal["", "calls", "text", "loop"]
"""``calls``: the policy acts through tool calls. ``text``: each turn is an action. ``loop``: a class that runs whole
samples. Empty: there is no environment."""


class ProcessLimits(msgspec.Struct, frozen=True):
    """Limit what one sample's process and all that it starts may use."""

    memory_bytes: int = 0
    """0: half of the memory of the machine, or of the container."""
    threads: int = 1024
    """Threads of all its processes; a process has at least one."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Name the files to load."""

    sources: list[Source]
    limits: ProcessLimits = ProcessLimits()


class Tool(msgspec.Struct, frozen=True):
    """Describe a tool as the model sees it."""

    name: str
    schema: dict[str, Any]
    """In OpenAI's format: ``{type: function, function: {name, description, parameters}}``."""
    timeout_s: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Report that everything is loaded."""

    tools: list[Tool]
    environment: EnvironmentKind = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Report that a file cannot be used; ``message`` has the reason and the remedy."""

    message: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process."""

    number: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a process; without effect if it has ended."""

    number: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Report that a process ended."""

    number: int
    status: int
    """Exit code, negative for a signal."""
    reason: str = ""
    """The limit for which the template killed it; empty: it did not."""


class CallTool(msgspec.Struct, frozen=True, tag=True):
    """Call a tool once."""

    id: int
    tool: str
    arguments: dict[str, Any]
    create_arguments: dict[str, Any] = {}
    """Arguments of ``create`` of a verl tool, from the data row's ``tools_kwargs``."""


class ToolResult(msgspec.Struct, frozen=True, tag=True):
    """Report the end of a tool call."""

    id: int
    outcome: Literal["ok", "error", "killed"]
    """``killed``: the environment's server is gone."""
    text: str
    """The text that the model sees."""
    seconds: float
    reward: float | None = None
    """The reward that the tool returned."""
    done: bool = False
    """The environment ended the episode."""


class AskEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Ask the sample's environment."""

    id: int
    method: Literal["reset", "step", "finish"]
    prompt: Prompt | None = None
    """For ``reset``."""
    action: str = ""
    """For ``step``: the text of the policy's turn."""
    completion: list[dict[str, Any]] = []
    """For ``finish``: the messages after the prompt."""


class EnvironmentReply(msgspec.Struct, frozen=True, tag=True):
    """Return the environment's answer."""

    id: int
    outcome: Literal["ok", "data_error", "infra_error", "timeout", "skipped"] = "ok"
    """``skipped``: asked for its reward, the environment gave none."""
    reason: str = ""
    messages: list[dict[str, Any]] | None = None
    """After ``reset`` the whole prompt, after ``step`` the new messages; None: unchanged."""
    reward: float | None = None
    done: bool = False
    attributes: dict[str, Any] | None = None
    """After ``finish``: those of the environment's instance, where it has one."""


class RunAgent(msgspec.Struct, frozen=True, tag=True):
    """Run the agent's class."""

    prompt: Prompt


class GenerateTurn(msgspec.Struct, frozen=True, tag="Generate"):
    """Ask for the policy's next turn."""

    id: int
    ids: list[int]
    max_tokens: int | None = None


class Generated(msgspec.Struct, frozen=True, tag=True):
    """Return the policy's turn."""

    id: int
    sample: dict[str, Any] | None = None
    """The fields of ``engines.protocol.FinishedSample``."""
    error: str = ""


class AgentDone(msgspec.Struct, frozen=True, tag=True):
    """Report that the agent returned."""

    trajectory: dict[str, Any]
    """The fields of ``agents.agent.Trajectory``."""


class AgentFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that the agent raised, or returned something else than a trajectory."""

    reason: str


class RunAgentProgram(msgspec.Struct, frozen=True, tag="RunProgram"):
    """Run the program on one prompt."""

    document: dict[str, Any]
    """What the program reads about its prompt."""
    environment: dict[str, str]
    """Variables beside those of the process."""
    folder: str
    """Its working directory, of this sample alone."""


class ProgramEnded(msgspec.Struct, frozen=True, tag=True):
    """Report that the program ended."""

    reward: AgentReward | None = None
    """The reward that it gave; None: it gave none."""
    failure: AgentReward | None = None
    """The reason that it failed; None: it ended by itself."""


ToTemplate = Load | Fork | Kill
FromTemplate = Loaded | Refused | Ended
ToSample = CallTool | AskEnvironment | RunAgent | RunAgentProgram | Generated
FromSample = ToolResult | EnvironmentReply | GenerateTurn | AgentDone | AgentFailed | ProgramEnded

to_template = msgspec.msgpack.Decoder(list[ToTemplate])
from_template = msgspec.msgpack.Decoder(list[FromTemplate])
to_sample = msgspec.msgpack.Decoder(list[ToSample])
from_sample = msgspec.msgpack.Decoder(list[FromSample])
