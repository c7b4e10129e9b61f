"""Define the protocol of environments, and answer the rollout's questions. Runs in the processes of samples.

Collect the plain data that an environment's instance holds when its episode has ended, for reward functions.

Run environments in TRL's form (``environment_factory``): ``reset``, public methods as tools, maybe ``get_reward``.

An instance is created in the sample's process, so it may open connections. To describe its methods, a class is not
instantiated; a factory function is called once in a fork.

Run environments in SkyRL's form (``BaseTextEnv``): ``init(prompt)``, then ``step(action)`` for each turn.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from plaudit_reward.functions.forms import named, parameters_of, takes_any
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.messages import Prompt
from plaudit_workers.agents.functions import (
    LoadedTool,
    ToolAnswer,
    describe,
    in_fork,
    run_user_code,
    to_answer,
    to_text,
)
from plaudit_workers.agents.messages import AskEnvironment, EnvironmentClass, EnvironmentReply, Tool

Messages = list[dict[str, Any]]


class Observation(NamedTuple):
    """Hold what the environment shows after a step."""

    messages: Messages
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """Run the environment of one sample: created before the fork, reset in the sample's process."""

    @property
    def tools(self) -> Sequence[LoadedTool]:
        """Return the actions that the policy takes by tool calls."""
        ...

    @property
    def reads_text(self) -> bool:
        """Return True where each turn of the policy is an action (``step``)."""
        ...

    @property
    def gives_reward(self) -> bool:
        """Return True where ``finish`` returns a reward."""
        ...

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Begin an episode; return the prompt's messages if they change."""
        ...

    async def step(self, action: str) -> Observation:
        """Take the policy's turn; called only if ``reads_text``."""
        ...

    async def finish(self, completion: Messages) -> float | None:
        """End the episode; return its reward, None for no reward."""
        ...

    async def attributes(self) -> dict[str, Any] | None:
        """Return what reward functions may read of the instance after ``finish``; None without an instance."""
        ...


async def answer(environment: Environment, question: AskEnvironment) -> EnvironmentReply:
    """Answer one question of the rollout.

    Raises:
        DataError: the reward is not a finite number.
        InfrastructureError: the environment's server is broken or unreachable.
    """
    if question.method == "reset":
        assert question.prompt is not None
        return EnvironmentReply(question.id, messages=await environment.reset(question.prompt))
    if question.method == "step":
        observation = await environment.step(question.action)
        reward = _number(observation.reward)
        return EnvironmentReply(question.id, messages=observation.messages, reward=reward, done=observation.done)
    reward = _number(await environment.finish(question.completion))
    if reward is None and environment.gives_reward:
        return EnvironmentReply(question.id, "skipped", "the environment gave no reward")
    return EnvironmentReply(question.id, reward=reward)


def prompt_messages(prompt: Prompt) -> Messages:
    """Return the prompt as chat messages; a data row that holds text becomes a user's message."""
    return [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.prompt}]


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


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"the reward {value!r} is not a finite number")
    return number


MOST_BYTES = 64 << 10

"""Of all attributes of an instance together, as JSON."""

_DEEPEST = 32

_WHOLE = range(-(1 << 63), 1 << 64)

"""Integers that a message can hold."""


def public_attributes(instance: Any) -> dict[str, Any]:
    """Return the attributes that reward functions may read: public, no methods, what JSON holds.

    Attributes of the class and properties count too. One that is no plain data, raises when it is read, or exceeds
    what is left of ``MOST_BYTES`` is left out; small ones come first. Tuples become lists. Never raises.
    """
    found: dict[str, tuple[Any, int]] = {}
    for name in _names(instance):
        with contextlib.suppress(BaseException):  # the user's code: a property may raise anything
            value = plain(getattr(instance, name))
            found[name] = value, len(msgspec.json.encode({name: value}))
    kept, used = {}, 0
    for name, (value, size) in sorted(found.items(), key=lambda item: item[1][1]):
        if (used := used + size) > MOST_BYTES:
            break
        kept[name] = value
    return {name: kept[name] for name in found if name in kept}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON's types.

    Raises:
        TypeError: JSON has no such value: an object, a number that is not finite, a key that is no text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.encode(value).decode()
    if isinstance(value, int) and int(value) in _WHOLE:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if depth < _DEEPEST and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str.encode(key).decode(): plain(item, depth + 1) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is no plain data")


def _names(instance: Any) -> list[str]:
    """Return the names of public attributes without those that the class defines as methods."""
    try:
        names = [name for name in dir(instance) if not name.startswith("_")]
        return [name for name in names if not inspect.isroutine(inspect.getattr_static(instance, name, None))]
    except BaseException:  # the user's code: __dir__ may be its own
        return []


_NO_TOOLS = ("reset", "get_reward")


class Method:
    """Call a public method of an environment as a tool."""

    def __init__(self, environment: TRLEnvironment, description: Tool) -> None:
        self.description = description
        self._environment = environment

    async def call(self, arguments: dict[str, Any], create_arguments: dict[str, Any]) -> ToolAnswer:
        """Call the method of this sample's instance; the policy reads ``str`` of its result, as in TRL's own loop."""
        result = await run_user_code(getattr(self._environment.instance, self.description.name), **arguments)
        return to_answer(result) if isinstance(result, list) else ToolAnswer(str(result))


class TRLEnvironment:
    """Run an environment of TRL.

    Args:
        factory: the class, or a function that returns an instance.
        schemas: in OpenAI's format.
        gives_reward: True if it has ``get_reward``.
    """

    reads_text = False

    def __init__(
        self, factory: Callable[..., Any], source: EnvironmentClass, schemas: list[dict[str, Any]], gives_reward: bool
    ) -> None:
        self.gives_reward = gives_reward
        self.instance: Any = None
        self._create = lambda: factory(**source.arguments)
        self.tools = [Method(self, Tool(schema["function"]["name"], schema, source.timeout_s)) for schema in schemas]

    @classmethod
    def load(cls, factory: Callable[..., Any], source: EnvironmentClass) -> TRLEnvironment:
        """Describe the environment's methods.

        Raises:
            ConfigurationError: it has no ``reset``, or a method lacks type hints or a docstring.
        """
        if inspect.isclass(factory):
            schemas, gives_reward = _describe(object.__new__(factory), source)
        else:
            schemas, gives_reward = in_fork(lambda: _describe(factory(**source.arguments), source))
        return cls(factory, source, schemas, gives_reward)

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Create an instance and reset it with the data row's columns; append what it returns to the last message."""
        self.instance = await run_user_code(self._create)
        columns, accepted = columns_of(prompt), parameters_of(self.instance.reset)
        if not takes_any(accepted):
            columns = {name: value for name, value in columns.items() if name in named(accepted)}
        observation = await run_user_code(self.instance.reset, **columns)
        return None if observation is None else with_observation(prompt_messages(prompt), to_text(observation))

    async def step(self, action: str) -> Observation:
        """Do nothing: the policy acts through tools."""
        raise NotImplementedError

    async def finish(self, completion: Messages) -> float | None:
        """Return the reward of ``get_reward``."""
        if not self.gives_reward:
            return None
        reward: float | None = await run_user_code(self.instance.get_reward)
        return reward

    async def attributes(self) -> dict[str, Any] | None:
        """Return the instance's public attributes; TRL passes the instance itself to reward functions."""
        attributes: dict[str, Any] = await run_user_code(public_attributes, self.instance)
        return attributes


def _describe(instance: Any, source: EnvironmentClass) -> tuple[list[dict[str, Any]], bool]:
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    if "reset" not in names:
        raise ConfigurationError(f"what {source.class_name} in {source.path} returns has no method reset")
    methods = [name for name in names if not name.startswith("_") and name not in _NO_TOOLS]
    where = f"in {source.path}"
    schemas = [describe(getattr(instance, name), f"{source.class_name}.{name}", where) for name in methods]
    return schemas, "get_reward" in names


class SkyRLEnvironment:
    """Run an environment of SkyRL, created for each sample as ``skyrl_gym.make`` does.

    ``source.arguments`` become ``env_config``.
    """

    reads_text = True
    gives_reward = False

    def __init__(self, factory: Callable[..., Any], source: EnvironmentClass) -> None:
        self.tools: list[LoadedTool] = []
        self._factory = factory
        self._source = source
        self._instance: Any = None

    async def reset(self, prompt: Prompt) -> Messages | None:
        """Create an instance with the data row as ``extras``; return the prompt that ``init`` returns."""
        self._instance = await run_user_code(self._create, prompt)
        given = prompt_messages(prompt)
        returned, _ = await run_user_code(self._instance.init, [dict(message) for message in given])
        return None if returned == given else [dict(message) for message in returned]

    async def step(self, action: str) -> Observation:
        """Take one turn."""
        output: Any = await run_user_code(self._instance.step, action)
        messages = [dict(message) for message in output["observations"]]
        return Observation(messages, output["reward"], bool(output["done"]))

    async def finish(self, completion: Messages) -> float | None:
        """Close the instance; its rewards came with its steps."""
        if hasattr(self._instance, "close"):
            await run_user_code(self._instance.close)
        return None

    async def attributes(self) -> dict[str, Any] | None:
        """Return None: SkyRL passes no instance to reward functions."""
        return None

    def _create(self, prompt: Prompt) -> Any:
        columns = {name: value for name, value in columns_of(prompt).items() if name != "prompt"}
        given: dict[str, Any] = {
            "env_config": AttributeDict(self._source.arguments),
            "extras": {
                "max_turns": self._source.max_turns,
                "reward_spec": {"method": "rule", "ground_truth": prompt.ground_truth},
                **columns,
            },
        }
        accepted = parameters_of(self._factory)
        if not takes_any(accepted):
            given = {name: value for name, value in given.items() if name in named(accepted)}
        return self._factory(**given)
