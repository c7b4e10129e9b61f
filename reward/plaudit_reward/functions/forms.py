"""Call a user's function in the form that ``signature`` recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plaudit_reward.functions.logged import LOGGERS, call_with_loggers
from plaudit_reward.functions.played_environment import PlayedEnvironment
from plaudit_reward.functions.signature import VERL_PARAMETERS, named, parameters_of, takes_any, wants_sample
from plaudit_reward.functions.target import CallingConvention
from plaudit_wire.errors import DataError
from plaudit_wire.sample import Sample

Function = Callable[..., Any]
Caller = Callable[[Sequence[Sample], Any], Any]
"""Takes the samples of one call and their values; returns the function's result."""

ONE_SCORE: frozenset[CallingConvention] = frozenset({"verl", "sample", "combine", "answer"})
"""Forms that return one score; the others return a list with one score for each sample."""

ENVIRONMENTS = "environments"
"""TRL's argument for the environments of the samples."""
_SOLUTION_COLUMNS = ("solution", "answer")
"""Names of the ground truth in TRL's datasets."""


def caller(form: CallingConvention, function: Function, arguments: Mapping[str, Any]) -> Caller:
    """Return the caller of ``function`` with the job's ``arguments``."""
    return _CALLERS[form](function, dict(arguments))


def _verl(function: Function, arguments: dict[str, Any]) -> Caller:
    parameters = parameters_of(function)
    accepted = VERL_PARAMETERS if takes_any(parameters) else VERL_PARAMETERS & named(parameters).keys()

    def call(samples: Sequence[Sample], values: Any) -> Any:
        (sample,) = samples
        columns = {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": {**_added_by_verl(sample), **sample.extra_info},
        }
        return function(**{name: columns[name] for name in accepted}, **arguments)

    return call


def _added_by_verl(sample: Sample) -> dict[str, Any]:
    """Return what verl adds to ``extra_info``, and reward files read; the last two only where an agent ran."""
    added: dict[str, Any] = {"num_turns": sample.num_turns, "rollout_reward_scores": {}}
    if sample.completion:
        added |= {"turn_scores": sample.turn_rewards, "tool_rewards": sample.tool_rewards}
    return added


def _trl(function: Function, arguments: dict[str, Any]) -> Caller:
    parameters = parameters_of(function)
    names, any_column = named(parameters), takes_any(parameters)
    needed = _without_default(function) - {*LOGGERS}
    loggers = [name for name in LOGGERS if name in names and name not in arguments]

    def call(samples: Sequence[Sample], values: Any) -> Any:
        columns = {**trl_columns(samples), **arguments}
        passed = columns if any_column else {n: c for n, c in columns.items() if n in names}
        missing = needed - passed.keys()
        if ENVIRONMENTS in missing:
            raise DataError(
                "environments: a sample has no environment in TRL's form, or its environment gave no answer at the "
                "end. Use agent kind environment with such a class, or give the parameter a default"
            )
        if missing:
            raise DataError(
                f"the data has no column {', '.join(sorted(missing))}; it has {', '.join(sorted(columns))}. Add it to "
                "extra_info of the data rows, or give the parameter a default"
            )
        return call_with_loggers(function, passed, loggers) if loggers else function(**passed)

    return call


def required_columns(function: Function, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns without which a function of TRL's form cannot be called.

    They are those of ``extra_info``, and ``environments``, which only some agents bring.
    """
    always = {*trl_columns([]), *LOGGERS, *arguments}
    return tuple(sorted(_without_default(function) - always))


def _without_default(function: Function) -> set[str]:
    return {name for name, parameter in named(parameters_of(function)).items() if parameter.default is parameter.empty}


def trl_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the keyword arguments that TRL's trainer would pass: lists with one item for each sample.

    Prompts and completions are chat messages if the data has messages, else text. The keys of ``extra_info`` that
    all samples have are columns of their own; ``solution`` and ``answer`` are the ground truth unless the data has
    columns of these names. ``environments`` is there if all samples were played in an environment of TRL's form.
    """
    played = [PlayedEnvironment(sample.environment) for sample in samples if sample.environment is not None]
    chat = all(sample.messages for sample in samples)
    shared = set.intersection(*(set(sample.extra_info) for sample in samples)) if samples else set()
    ground_truths = [sample.ground_truth for sample in samples]
    return {
        **{name: list(ground_truths) for name in _SOLUTION_COLUMNS},
        **{name: [sample.extra_info[name] for sample in samples] for name in sorted(shared)},
        "data_source": [sample.data_source for sample in samples],
        "ground_truth": ground_truths,
        "extra_info": [sample.extra_info for sample in samples],
        "prompts": [sample.messages if chat else sample.prompt for sample in samples],
        "completions": [
            (sample.completion or [{"role": "assistant", "content": sample.response}]) if chat else sample.response
            for sample in samples
        ],
        **({ENVIRONMENTS: played} if played and len(played) == len(samples) else {}),
    }


def _sample(function: Function, arguments: dict[str, Any]) -> Caller:
    return lambda samples, values: function(samples[0], **arguments)


def _samples(function: Function, arguments: dict[str, Any]) -> Caller:
    return lambda samples, values: function(list(samples), **arguments)


def _values(function: Function, arguments: dict[str, Any]) -> Caller:
    return lambda samples, values: function(list(values), **arguments)


def _combine(function: Function, arguments: dict[str, Any]) -> Caller:
    if wants_sample(function):
        return lambda samples, values: function(dict(values), samples[0], **arguments)
    return lambda samples, values: function(dict(values), **arguments)


def _answer(function: Function, arguments: dict[str, Any]) -> Caller:
    if wants_sample(function):
        return lambda samples, values: function(str(values), samples[0], **arguments)
    return lambda samples, values: function(str(values), **arguments)


def _answers(function: Function, arguments: dict[str, Any]) -> Caller:
    if wants_sample(function, "samples"):
        return lambda samples, values: function(str(values), list(samples), **arguments)
    return lambda samples, values: function(str(values), **arguments)


_CALLERS: dict[CallingConvention, Callable[[Function, dict[str, Any]], Caller]] = {
    "verl": _verl,
    "trl": _trl,
    "sample": _sample,
    "samples": _samples,
    "values": _values,
    "combine": _combine,
    "answer": _answer,
    "answers": _answers,
}
