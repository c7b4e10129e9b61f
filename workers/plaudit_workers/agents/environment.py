"""Run environments that are users' classes, in the processes of samples.

| form | what the class has |
| --- | --- |
| TRL (``environment_factory``) | ``reset``, public methods as tools, maybe ``get_reward`` |
| SkyRL (``BaseTextEnv``) | ``init(prompt)``, then ``step(action)`` for each turn |

``Environment`` is what both share with those behind a URL (``environment_servers``). An instance is created in the
sample's process, so it may open connections. That process has no way to the sample's machine: the rollout holds it, and
answers what a class asks of its ``SandboxHandle``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from plaudit_reward.functions.forms import named, parameters_of, takes_any
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError
from plaudit_wire.messages import Prompt
from plaudit_wire.plain import plain
from plaudit_wire.printable import shown
from plaudit_workers.agents.functions import (
    LoadedTool,
    ToolAnswer,
    describe,
    in_fork,
    run_user_code,
    to_answer,
    to_text,
)
from plaudit_workers.agents.messages import (
    AskEnvironment,
    EnvironmentClass,
    EnvironmentReply,
    MachineReply,
    Tool,
    UseMachine,
    prompt_messages,
)

Messages = list[dict[str, Any]]
MOST_BYTES = 64 << 10
"""Of all attributes of an instance together, as JSON."""
_NO_TOOLS = ("reset", "get_reward")
_MOST_UNITS = 16 * MOST_BYTES


class Observation(NamedTuple):
    """Hold what the environment shows after a step."""

    messages: Messages
    reward: float | None = None
    done: bool = False


class CommandResult(NamedTuple):
    """Hold the end of a command."""

    exit_code: int
    """128 + the number of the signal that ended it; 124 at a limit."""
    output: str
    """Standard output and error in the order of writing; of more than 32,000 bytes the first and the last half."""


class SandboxHandle:
    """Use the machine of one sample.

    Methods block, as plain methods of an environment may. An async method calls them by ``asyncio.to_thread``. They
    raise ``ValueError`` for what cannot be done, and ``InfrastructureError`` for a machine that broke: leave the latter
    to the rollout, and the sample ends without a score.
    """

    def __init__(self) -> None:
        self._send: Callable[[UseMachine], object] | None = None
        self._loop_thread: int | None = None
        self._numbers = itertools.count()
        self._awaited: dict[int, concurrent.futures.Future[MachineReply]] = {}

    def connect(self, send: Callable[[UseMachine], object]) -> None:
        """Send requests by ``send``, from any thread; call this on the thread that ``receive`` is called on."""
        self._send, self._loop_thread = send, threading.get_ident()

    def receive(self, reply: MachineReply) -> None:
        """Take the answer to a request."""
        self._awaited.pop(reply.id).set_result(reply)

    def exec(self, command: str, timeout_s: float = 60.0) -> CommandResult:
        """Run a command of bash in the task's working folder, to its end or ``timeout_s``; nothing of it runs on."""
        reply = self._ask("exec", command, timeout_s=timeout_s)
        return CommandResult(reply.exit_code, reply.output)

    def upload(self, path: str, content: bytes | str) -> None:
        """Write a file of the machine, with the folders above it; text as UTF-8."""
        self._ask("upload", path, content.encode() if isinstance(content, str) else content)

    def download(self, path: str) -> bytes:
        """Return the content of a file of the machine, of at most 1 MiB."""
        return self._ask("download", path).content

    def _ask(self, method: Any, text: str, content: bytes = b"", timeout_s: float = 60.0) -> MachineReply:
        if self._send is None:
            raise InfrastructureError("the machine can be used from reset on, and not before")
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError(f"sandbox.{method} blocks: in an async method use await asyncio.to_thread(…)")
        number = next(self._numbers)
        answer = self._awaited[number] = concurrent.futures.Future()
        self._send(UseMachine(number, method, str(text), bytes(content), float(timeout_s)))
        reply = answer.result()
        if reply.failed:
            raise InfrastructureError(reply.problem)
        if reply.problem:
            raise ValueError(reply.problem)
        return reply


class Environment(ABC):
    """Run the environment of one sample: created before the fork, reset in the sample's process."""

    tools: Sequence[LoadedTool] = ()
    """The actions that the policy takes by tool calls."""
    reads_text = False
    """Each turn of the policy is an action (``step``)."""
    gives_reward = False
    """``finish`` returns a reward."""
    seed = 0
    """Of the sample; classes that have a parameter of this name get it, unless the data row or the job has another."""
    sandbox: SandboxHandle | None = None
    """The sample's machine, for a parameter of this name; None: the job gives it none."""

    @abstractmethod
    async def reset(self, prompt: Prompt) -> Messages | None:
        """Begin an episode; return the prompt's messages if they change."""

    async def step(self, action: str) -> Observation:
        """Take the policy's turn; called only if ``reads_text``."""
        raise NotImplementedError

    @abstractmethod
    async def finish(self, completion: Messages) -> float | None:
        """End the episode; return its reward, None for no reward."""

    async def attributes(self) -> dict[str, Any] | None:
        """Return what reward functions may read of the instance after ``finish``; None without an instance."""
        return None

    def _own_arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return seed and machine as arguments, where the function has parameters of these names."""
        own = {"seed": self.seed} | ({} if self.sandbox is None else {"sandbox": self.sandbox})
        return {name: value for name, value in own.items() if name in named(parameters_of(function))}

    def _take_sandbox(self, source: EnvironmentClass, *functions: Callable[..., Any]) -> None:
        """Make ready for the job's machine; raise ``ConfigurationError`` if none of the functions takes it."""
        if not source.sandbox:
            return
        if not any("sandbox" in named(parameters_of(function)) for function in functions):
            raise ConfigurationError(
                f"sandbox is true, and {source.class_name} in {source.path} has no parameter sandbox: add one to its "
                "constructor, or remove sandbox: true"
            )
        self.sandbox = SandboxHandle()


async def answer(environment: Environment, question: AskEnvironment) -> EnvironmentReply:
    """Answer one question of the rollout.

    Raises ``DataError`` for a reward that is not a finite number, and for messages that are none,
    ``PlainDataError`` for those that cannot travel.
    """
    if question.method == "reset":
        assert question.prompt is not None
        begun = await environment.reset(question.prompt)
        return EnvironmentReply(question.id, messages=None if begun is None else _chat(begun, "messages"))
    if question.method == "step":
        observation = await environment.step(question.action)
        reward = _number(observation.reward)
        messages = _chat(observation.messages, "observations")
        return EnvironmentReply(question.id, messages=messages, reward=reward, done=observation.done)
    reward = _number(await environment.finish(question.completion))
    if reward is None and environment.gives_reward:
        return EnvironmentReply(question.id, "skipped", "the environment gave no reward")
    return EnvironmentReply(question.id, reward=reward)


def _chat(value: Any, name: str) -> Messages:
    """Return chat messages that templates can render: each with a role, and with text or parts as its content."""
    messages: Any = plain(value, name)
    if not isinstance(messages, list):
        raise DataError(f"the environment's {name} are {shown(messages)}; give a list of messages")
    for place, message in enumerate(messages):
        where = f"the environment's {name}[{place}]"
        if not isinstance(message, dict):
            raise DataError(f"{where} is {shown(message)}; give {{role: …, content: …}}")
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if not isinstance(role, str) or not role:
            raise DataError(f"{where}.role is {shown(role)}; give a text such as user")
        if not (isinstance(content, str) or _are_objects(content) or (content is None and calls)):
            raise DataError(f"{where}.content is {shown(content)}; give a text, or a list of parts")
        if not (calls is None or _are_calls(calls)):
            raise DataError(f"{where}.tool_calls are {shown(calls)}; give [{{function: {{name: …, arguments: …}}}}]")
    return messages


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _are_calls(value: Any) -> bool:
    return _are_objects(value) and all(
        isinstance(call.get("function"), dict) and isinstance(call["function"].get("name"), str) for call in value
    )


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"the reward {shown(value)} is not a finite number")
    return number


class TRLEnvironment(Environment):
    """Run an environment of TRL.

    To describe its methods, a class is not instantiated; a factory function is called once in a fork.

    Args:
        factory: the class, or a function that returns an instance.
    """

    def __init__(self, factory: Callable[..., Any], source: EnvironmentClass) -> None:
        self._instance: Any = None
        self._create: Callable[[], Any] = lambda: factory(**{**self._own_arguments(factory), **source.arguments})
        self._take_sandbox(source, factory, getattr(factory, "reset", factory))
        if inspect.isclass(factory):
            schemas, self.gives_reward = _describe_methods(object.__new__(factory), source)
        else:
            schemas, self.gives_reward = in_fork(lambda: _describe_methods(self._create(), source))
        self.tools = [self._method(Tool.of(schema, source.timeout_s)) for schema in schemas]

    def _method(self, description: Tool) -> LoadedTool:
        async def call(arguments: dict[str, Any], _: dict[str, Any]) -> ToolAnswer:
            result = await run_user_code(getattr(self._instance, description.name), **arguments)
            # The policy reads ``str`` of a result, as in TRL's own loop.
            return to_answer(result) if isinstance(result, list) else ToolAnswer(str(result))

        return LoadedTool(description, call)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Create an instance and reset it with the data row's columns; append what it returns to the last message."""
        self._instance = await run_user_code(self._create)
        reset = self._instance.reset
        columns = {**self._own_arguments(reset), **_accepted_by(reset, columns_of(prompt))}
        observation = await run_user_code(reset, **columns)
        return None if observation is None else with_observation(prompt_messages(prompt), to_text(observation))

    async def finish(self, completion: Messages) -> float | None:
        """Return the reward of ``get_reward``."""
        reward: float | None = await run_user_code(self._instance.get_reward) if self.gives_reward else None
        return reward

    async def attributes(self) -> dict[str, Any] | None:
        """Return the instance's public attributes; TRL passes the instance itself to reward functions."""
        attributes: dict[str, Any] = await run_user_code(public_attributes, self._instance)
        return attributes


def _describe_methods(instance: Any, source: EnvironmentClass) -> tuple[list[dict[str, Any]], bool]:
    """Return the schemas of an instance's methods, and True if it gives a reward."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    if "reset" not in names:
        raise ConfigurationError(f"what {source.class_name} in {source.path} returns has no method reset")
    methods = [name for name in names if not name.startswith("_") and name not in _NO_TOOLS]
    where = f"in {source.path}"
    schemas = [describe(getattr(instance, name), f"{source.class_name}.{name}", where) for name in methods]
    return schemas, "get_reward" in names


class SkyRLEnvironment(Environment):
    """Run an environment of SkyRL, created for each sample as ``skyrl_gym.make`` does.

    ``source.arguments`` become ``env_config``.
    """

    reads_text = True

    def __init__(self, factory: Callable[..., Any], source: EnvironmentClass) -> None:
        self._factory = factory
        self._source = source
        self._instance: Any = None
        self._take_sandbox(source, factory)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Create an instance with the data row as ``extras``; return the prompt that ``init`` returns."""
        columns = {name: value for name, value in columns_of(prompt).items() if name != "prompt"}
        reward = {"method": "rule", "ground_truth": prompt.ground_truth}
        extras = {"max_turns": self._source.max_turns, "reward_spec": reward, "seed": self.seed, **columns}
        settings = {"env_config": AttributeDict(self._source.arguments), "extras": extras}
        accepted = {**self._own_arguments(self._factory), **_accepted_by(self._factory, settings)}
        self._instance = await run_user_code(lambda: self._factory(**accepted))
        given = prompt_messages(prompt)
        returned, _ = await run_user_code(self._instance.init, [dict(message) for message in given])
        changed: Messages | None = None if returned == given else returned
        return changed

    async def step(self, action: str) -> Observation:
        """Take one turn."""
        output: Any = await run_user_code(self._instance.step, action)
        return Observation(output["observations"], output["reward"], bool(output["done"]))

    async def finish(self, completion: Messages) -> float | None:
        """Close the instance; its rewards came with its steps."""
        if hasattr(self._instance, "close"):
            await run_user_code(self._instance.close)
        return None


def _accepted_by(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments that a function accepts."""
    accepted = parameters_of(function)
    if takes_any(accepted):
        return arguments
    return {name: value for name, value in arguments.items() if name in named(accepted)}


def with_observation(messages: Messages, text: str) -> Messages:
    """Append an environment's first observation to the last message, as TRL does."""
    *before, last = messages
    return [*before, {**last, "content": f"{last.get('content') or ''}{text}"}]


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Return the data row as the trainers pass it: keys of ``extra_info`` are columns of their own."""
    return {
        "solution": prompt.ground_truth,
        "answer": prompt.ground_truth,
        **prompt.extra_info,
        "prompt": prompt_messages(prompt),
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


class AttributeDict(dict[str, Any]):
    """Hold a dictionary whose keys are attributes too, as users' files read OmegaConf's; a missing key is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        return AttributeDict(value) if type(value) is dict else value


def public_attributes(instance: Any) -> dict[str, Any]:
    """Return the attributes that reward functions may read: public, no methods, plain data (``plaudit_wire.plain``).

    Attributes of the class and properties count too. One that is no plain data, raises when it is read, or exceeds
    what is left of ``MOST_BYTES`` is left out; small ones come first. Never raises.
    """
    found: dict[str, tuple[Any, int]] = {}
    for name in _attribute_names(instance):
        with contextlib.suppress(BaseException):  # the user's code: a property may raise anything
            value = plain(getattr(instance, name), most_units=_MOST_UNITS)
            found[name] = value, len(msgspec.json.encode({name: value}))
    kept, used = {}, 0
    for name, (value, size) in sorted(found.items(), key=lambda item: item[1][1]):
        if (used := used + size) > MOST_BYTES:
            break
        kept[name] = value
    return {name: kept[name] for name in found if name in kept}


def _attribute_names(instance: Any) -> list[str]:
    """Return the names of public attributes without those that the class defines as methods."""
    try:
        names = [name for name in dir(instance) if not name.startswith("_")]
        return [name for name in names if not inspect.isroutine(inspect.getattr_static(instance, name, None))]
    except BaseException:  # the user's code: __dir__ may be its own
        return []
