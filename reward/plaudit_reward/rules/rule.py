"""Define the protocol of a rule: an entry of ``routing.RULES`` that reads its arguments from a job and makes a scorer.

Most rules are plain functions ``rule(sample, *, option=default, …)`` that return a number or a ``Score``. Their options
are a job's ``ruleArguments``, in camelCase there; names, types and bounds are those of the function's signature.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from plaudit_reward.errors import ConfigurationError
from plaudit_reward.functions.target import Target
from plaudit_reward.isolation.function_scorer import FunctionScorer
from plaudit_reward.rules.child_rule import ChildRule
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt, Scorer
from plaudit_wire.sample import Sample

_ALWAYS_ROOM = 1_000_000


class Rule(Protocol):
    """An entry of ``routing.RULES``."""

    def read(self, given: Mapping[str, Any]) -> Any:
        """Read the rule's arguments from a job's ``ruleArguments``; their type is up to the rule.

        Raises:
            ConfigurationError: they do not fit; the message names the argument and the remedy.
        """
        ...

    def scorer(self, name: str, arguments: Any, processes: int) -> Scorer:
        """Return a scorer that is not opened yet; ``arguments`` is the result of ``read``."""
        ...


@dataclass(frozen=True)
class FunctionRule:
    """Make a rule of a plain function."""

    function: Callable[..., float | Score]
    isolated: bool = False
    """Run it in child processes, killed at the time limit, because it computes (SymPy, a user's regular expression)."""
    warm_up: tuple[str, str] | None = None
    """Response and ground truth of a sample for its children to score first; see ``ChildRule``."""
    check: Callable[..., None] | None = None
    """Validates the arguments; raises ``ConfigurationError`` if they contradict each other."""

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the function's keyword arguments; see ``Rule``."""
        parameters = _options(self.function)
        unknown = sorted(given.keys() - parameters.keys())
        if unknown:
            known = f"they are {', '.join(parameters)}" if parameters else "it has none"
            raise ConfigurationError(f"there is no argument {unknown[0]!r}: {known}")
        missing = [name for name, option in parameters.items() if option.required and name not in given]
        if missing:
            raise ConfigurationError(f"{missing[0]} is missing: give it a value")
        arguments = {parameters[name].python_name: _converted(name, parameters[name], given[name]) for name in given}
        if self.check is not None:
            self.check(**arguments)
        return arguments

    def scorer(self, name: str, arguments: Any, processes: int) -> Scorer:
        """Return a scorer that calls the function in this process or in child processes."""
        if not self.isolated:
            return InlineScorer(name, partial(self.function, **arguments))
        child_arguments = {
            "module": self.function.__module__,
            "function": self.function.__name__,
            "arguments": dict(arguments),
            "warm_up": self.warm_up,
        }
        target = Target(inspect.getfile(ChildRule), ChildRule.__name__, child_arguments)
        return FunctionScorer(name, target, processes=processes)


class InlineScorer:
    """Call a rule that only processes strings, in the pipeline's process."""

    def __init__(self, name: str, function: Callable[[Sample], float | Score]) -> None:
        self.name = name
        self._function = function

    async def open(self) -> None:
        """Do nothing."""

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score the sample at once."""
        result = self._function(sample)
        return result if isinstance(result, Score) else Score.scored(result)

    def room(self) -> int:
        """Return a number without a limit: the scorer never waits."""
        return _ALWAYS_ROOM

    async def close(self) -> None:
        """Do nothing: there are no processes."""


@dataclass(frozen=True)
class _Option:
    python_name: str
    type: Any
    required: bool


def _options(function: Callable[..., Any]) -> dict[str, _Option]:
    """Return the function's keyword-only parameters, by their names in a job."""
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        _camel_case(name): _Option(name, hints[name], parameter.default is parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _converted(name: str, option: _Option, value: Any) -> Any:
    try:
        return msgspec.convert(value, option.type)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name} is {value!r}: {str(error).lower()}") from error
