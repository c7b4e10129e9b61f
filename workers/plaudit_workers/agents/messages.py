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
| ``UseMachine`` | sample | rollout | an environment's class uses the sample's machine |
| ``MachineReply`` | rollout | sample | the end of that |
| ``RunAgent`` | rollout | sample | run the agent's class on a prompt |
| ``GenerateTurn`` | sample | rollout | the agent asks for tokens |
| ``Generated`` | rollout | sample | the tokens, or the reason that there are none |
| ``AgentDone`` / ``AgentFailed`` | sample | rollout | the agent's trajectory, or what it raised |
| ``RunAgentProgram`` | rollout | sample | run the program |
| ``ProgramEnded`` | sample | rollout | its reward, or the reason that it failed |

Frames are those of ``plaudit_wire.frames``. An agent gets ``FinishedSample`` and returns a ``Trajectory``. No heavy
imports.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from plaudit_wire.errors import ConfigurationError
from plaudit_wire.messages import PolicyVersion, Prompt
from plaudit_wire.plain import PlainDataError, plain, plain_text
from plaudit_wire.printable import shown
from plaudit_wire.records import AgentReward, CallRecord, SandboxRecord


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
    """Name a class in a file in the form of TRL, SkyRL or verl; ``load`` recognises the form."""

    path: str
    class_name: str
    arguments: dict[str, Any] = {}
    max_turns: int = 8
    timeout_s: float = 60.0
    model: dict[str, Any] = {}
    """``spec.model``, for verl's agent loops, which tokenise themselves."""
    sandbox: bool = False
    """It gets the sample's machine as its argument ``sandbox``."""


class EnvironmentServer(msgspec.Struct, frozen=True, tag=True):
    """Name an environment behind a URL: a server of OpenEnv, NeMo Gym or the Open Reward Standard."""

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
    files: dict[str, bytes] = {}
    """The content of the sources' Python files when the first template started."""


class Tool(msgspec.Struct, frozen=True):
    """Describe a tool as the model sees it."""

    name: str
    schema: dict[str, Any]
    """In OpenAI's format: ``{type: function, function: {name, description, parameters}}``."""
    timeout_s: float

    @classmethod
    def of(cls, schema: dict[str, Any], timeout_s: float) -> Tool:
        """Return the tool that a schema describes; raise ``ConfigurationError`` if it is none."""
        try:
            checked = plain(schema, "schema")
        except PlainDataError as error:
            raise ConfigurationError(f"a tool's description cannot be passed on: {error}") from error
        function = checked.get("function") if isinstance(checked, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
            raise ConfigurationError(
                f"a tool's description is {shown(schema)}; give {{type: function, function: {{name: …}}}}"
            )
        for part, kind, form in (("description", str, "a text"), ("parameters", dict, "a JSON schema")):
            if not isinstance(function.get(part), kind | None):
                raise ConfigurationError(f"tool {shown(name)} has the {part} {shown(function[part])}; give {form}")
        return cls(name, checked, timeout_s)


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
    seed: int = 0
    """Of the sample: it begins all random sequences of the process."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a process; without effect if it has ended."""

    number: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Report that a process ended, or never began."""

    number: int
    status: int = 0
    """Exit code, negative for a signal."""
    reason: str = ""
    """What the template did to it, such as ``was killed: …``, or why it never began; empty: the status tells."""


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


class UseMachine(msgspec.Struct, frozen=True, tag=True):
    """Use the sample's machine."""

    id: int
    method: Literal["exec", "upload", "download"]
    text: str
    """The command, or the path of the file."""
    content: bytes = b""
    """For ``upload``."""
    timeout_s: float = 60.0


class MachineReply(msgspec.Struct, frozen=True, tag=True):
    """Return what became of it."""

    id: int
    exit_code: int = 0
    output: str = ""
    content: bytes = b""
    """After ``download``."""
    problem: str = ""
    """The reason that nothing was done; empty: it was."""
    failed: bool = False
    """The machine failed, through no fault of the caller."""


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
    """The fields of ``FinishedSample``."""
    error: str = ""


class AgentDone(msgspec.Struct, frozen=True, tag=True):
    """Report that the agent returned."""

    trajectory: dict[str, Any]
    """The fields of ``Trajectory``."""


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
    hidden: list[str] = []
    """Folders that it must not read."""


class ProgramEnded(msgspec.Struct, frozen=True, tag=True):
    """Report that the program ended."""

    reward: AgentReward | None = None
    """The reward that it gave; None: it gave none."""
    failure: AgentReward | None = None
    """The reason that it failed; None: it ended by itself."""


ToTemplate = Load | Fork | Kill
FromTemplate = Loaded | Refused | Ended
ToSample = CallTool | AskEnvironment | MachineReply | RunAgent | RunAgentProgram | Generated
FromSample = ToolResult | EnvironmentReply | UseMachine | GenerateTurn | AgentDone | AgentFailed | ProgramEnded
to_template = msgspec.msgpack.Decoder(list[ToTemplate])
from_template = msgspec.msgpack.Decoder(list[FromTemplate])
to_sample = msgspec.msgpack.Decoder(list[ToSample])
from_sample = msgspec.msgpack.Decoder(list[FromSample])


def prompt_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the prompt as chat messages; a data row that holds text becomes a user's message."""
    return [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.prompt}]


def prompt_tokens(prompt: Prompt) -> list[int]:
    """Return the token ids of the prompt."""
    return list(struct.unpack(f"<{len(prompt.prompt_ids) // 4}i", prompt.prompt_ids))


_MOST_IDS = 1 << 31
VersionSpan = tuple[int, int, int]
"""(first token, incarnation, number), as in ``SampleBody.version_spans``."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """Hold one response, ``T`` tokens long (the end-of-sequence token included)."""

    response_ids: list[int]
    """[T] token ids."""
    logprobs: list[float]
    """[T] natural log-probabilities under the distribution sampled from (temperature, top_p, top_k applied)."""
    version_spans: list[VersionSpan]
    """The policy version that sampled each range of tokens; begins with token 0 when ``T`` > 0."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the policy ended it. ``length``: it was cut at ``max_tokens`` or the model's length."""
    generate_s: float
    """Seconds from the call of ``generate`` to the last token."""
    engine_queue_s: float = 0.0
    """The part of ``generate_s`` before the engine first scheduled the request."""
    num_preempted: int = -1
    """Preemptions by the engine; -1 if the engine does not report them."""
    prompt_ids: list[int] = field(default_factory=list)
    """[P] of a request with images: the prompt that the engine computed, with the tokens of images repeated."""


@dataclass(slots=True)
class Trajectory:
    """Hold one finished sample: ``T`` tokens after the prompt, tool output included."""

    response_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprobs: list[float] = field(default_factory=list)
    """[T]; 0 where ``loss_mask`` is 0."""
    loss_mask: list[int] = field(default_factory=list)
    """[T]: 1 where the policy chose the token, 0 where a tool or the agent inserted it."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    """(first token, incarnation, number); begins with token 0 when ``T`` > 0."""
    finish_reason: str = "stop"
    prompt_ids: list[int] = field(default_factory=list)
    """[P] where the agent changed the prompt, or the engine repeated the tokens of images; empty: the prompt's own."""
    prompt_messages: list[dict[str, Any]] = field(default_factory=list)
    """The changed prompt as chat messages, for the scorers; empty: the prompt's own."""
    response: str | None = None
    """The text for the scorers; None: the decoded ``response_ids``."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The chat messages after the prompt, for the scorers; empty where the agent keeps none."""
    turns: list[int] = field(default_factory=list)
    """Index of the first token of each turn of the policy."""
    calls: dict[int, list[CallRecord]] = field(default_factory=dict)
    """Number of a turn → the tool calls that followed it."""
    tool_rewards: list[float] = field(default_factory=list)
    """Rewards that tools returned, in the order of the calls."""
    turn_rewards: list[float] = field(default_factory=list)
    """Rewards that an environment gave for each turn."""
    reward: AgentReward | None = None
    """The reward of the tools or the environment; None: they give no rewards."""
    environment: dict[str, Any] | None = None
    """Public attributes of the environment's instance at the end; None: there is none."""
    failure: AgentReward | None = None
    """The reason that the conversation broke off; the sample then gets no score."""
    branches: list[Trajectory] = field(default_factory=list)
    """Further token sequences of the sample, each with ``prompt_ids`` of its own; they train with its advantage."""
    replaced_parameters: list[str] = field(default_factory=list)
    """Names of request parameters in whose place the job's own values were used."""
    machine: str = ""
    """Name of the machine in which its tools ran; empty: none did."""
    sandbox: SandboxRecord | None = None
    """The times of that machine."""

    def add_turn(self, sample: FinishedSample) -> None:
        """Append a response of the policy."""
        offset = len(self.response_ids)
        self.turns.append(offset)
        self.response_ids += sample.response_ids
        self.logprobs += sample.logprobs
        self.loss_mask += [1] * len(sample.response_ids)
        for first, incarnation, number in sample.version_spans:
            if not self.version_spans or self.version_spans[-1][1:] != (incarnation, number):
                self.version_spans.append((offset + first if self.version_spans else 0, incarnation, number))
        self.finish_reason = sample.finish_reason

    def add_observation(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not choose: they carry no loss."""
        self.response_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [0] * len(ids)

    def add_calls(self, calls: Sequence[CallRecord]) -> None:
        """Record tool calls of the last turn."""
        self.calls.setdefault(len(self.turns) - 1, []).extend(calls)

    @property
    def versions(self) -> set[PolicyVersion]:
        """Return the policy versions that sampled its tokens, those of branches included."""
        spans = [span for part in (self, *self.branches) for span in part.version_spans]
        return {PolicyVersion(incarnation, number) for _, incarnation, number in spans}

    def problem(self) -> str:
        """Return why the trajectory cannot be published; empty if it can."""
        lengths = {len(self.response_ids), len(self.logprobs), len(self.loss_mask)}
        if len(lengths) > 1:
            return "response_ids, logprobs and loss_mask differ in length"
        if not self.response_ids:
            return "no tokens"
        if not self.version_spans or self.version_spans[0][0] != 0:
            return "version_spans do not begin with token 0"
        firsts = [first for first, _, _ in self.version_spans]
        if firsts != sorted(set(firsts)) or firsts[-1] >= len(self.response_ids):
            return "version_spans do not begin at growing places of the response"
        for name in ("prompt_ids", "response_ids"):
            ids: list[int] = getattr(self, name)
            if ids and (min(ids) < 0 or max(ids) >= _MOST_IDS):
                return f"{name} holds {min(ids) if min(ids) < 0 else max(ids)}, which is no token id"
        if not set(self.loss_mask) <= {0, 1}:
            return "loss_mask holds something else than 0 and 1"
        rewards = [each.value for each in (self.reward, self.failure) if each is not None and each.value is not None]
        for name, numbers in (
            ("logprobs", self.logprobs),
            ("rewards", [*self.tool_rewards, *self.turn_rewards, *rewards]),
        ):
            if not all(map(math.isfinite, numbers)):
                return f"{name} holds a number that is not finite"
        return ""

    def make_plain(self) -> None:
        """Make the parts that users' code wrote plain data; raise ``PlainDataError`` where there is no such form."""
        self.messages = plain(self.messages, "messages")
        self.prompt_messages = plain(self.prompt_messages, "prompt_messages")
        self.environment = plain(self.environment, "environment")
        self.response = None if self.response is None else plain_text(self.response)
        self.finish_reason = plain_text(self.finish_reason)
        self.replaced_parameters = [plain_text(name) for name in self.replaced_parameters]
        self.reward, self.failure = _plain_reward(self.reward), _plain_reward(self.failure)


def _plain_reward(reward: AgentReward | None) -> AgentReward | None:
    if reward is None or not reward.reason:
        return reward
    return msgspec.structs.replace(reward, reason=plain_text(reward.reason))
