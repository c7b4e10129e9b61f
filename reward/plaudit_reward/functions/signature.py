"""Recognise the calling convention of a user's function by the names of its parameters.

| form | parameters | scope |
| --- | --- | --- |
| ``verl`` | any of ``data_source, solution_str, ground_truth, extra_info``, ``solution_str`` among them | sample |
| ``trl`` | ``completions``, usually ``prompts``, and columns | group; sample: lists of one |
| ``sample`` | one parameter, any other name | sample |
| ``samples`` | one parameter, any other name | group |
| ``values`` | one parameter ``rewards``, ``scores`` or ``values`` (#2854's ``post_process_scores``) | group |
| ``combine`` | ``values``, then perhaps the sample | combine |
| ``answer`` | a judge's answer, then perhaps ``sample`` | answer |
| ``answers`` | a judge's answer, then perhaps ``samples`` | answers |

Every other parameter gets its value from the job's ``arguments`` or has a default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from plaudit_reward.functions.served_model import SERVED_PARAMETERS
from plaudit_reward.functions.target import CallingConvention, Scope
from plaudit_wire.errors import ConfigurationError

VERL_PARAMETERS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
_VALUES_PARAMETERS = frozenset({"rewards", "scores", "values"})
_TRL_UNAVAILABLE = frozenset({"completion_ids", "completions_ids", "trainer_state"})
"""Arguments that only TRL's trainer can pass: accepted with a default, refused without."""

_ONE_FORM: dict[Scope, CallingConvention] = {"combine": "combine", "answer": "answer", "answers": "answers"}
"""Scopes with a single form."""

_SECOND: dict[CallingConvention, str] = {"combine": "sample", "answer": "sample", "answers": "samples"}
"""Forms whose second parameter, if it has this name, is filled as well."""

_FORMS = (
    "verl's (data_source, solution_str, ground_truth, extra_info), TRL's (prompts, completions, **columns), "
    "or Plaudit's (sample); with scope: group TRL's, (samples), or (rewards)"
)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, without ``self``; none if the signature cannot be read."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return True if there is a ``**keywords`` parameter."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def named(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Return the named parameters (without ``*`` and ``**``)."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in parameters.items() if p.kind not in variable}


def recognise(
    function: Callable[..., Any], scope: Scope, arguments: Mapping[str, Any], where: str
) -> CallingConvention:
    """Find the form of ``function`` and check that the job's arguments complete it.

    Args:
        where: the function, for messages: ``compute_score in rewards.py``.

    Raises:
        ConfigurationError: no form fits, or parameters and arguments do not match.
    """
    parameters = parameters_of(function)
    form = _form(named(parameters), takes_any(parameters), scope, where)
    if form == "verl" and scope == "group":
        raise ConfigurationError(f"{where} has verl's signature, which scores one sample: remove 'scope: group'")
    if form == "values" and scope == "sample":
        raise ConfigurationError(f"{where} takes the scores of a group: set 'scope: group' for this scorer")
    _check_arguments(form, parameters, arguments, where)
    return form


def _form(names: Mapping[str, inspect.Parameter], any_keyword: bool, scope: Scope, where: str) -> CallingConvention:
    if scope in _ONE_FORM:
        return _ONE_FORM[scope]
    if "solution_str" in names:
        return "verl"
    if "completions" in names:
        return "trl"
    first = next(iter(names.values()), None)
    if first is None and any_keyword:
        return "verl" if scope == "sample" else "trl"
    if first is None or first.kind is inspect.Parameter.KEYWORD_ONLY:
        raise ConfigurationError(f"{where} takes no sample; its parameters must be {_FORMS}")
    if first.name in _VALUES_PARAMETERS:
        return "values"
    return "sample" if scope == "sample" else "samples"


def _check_arguments(
    form: CallingConvention, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], where: str
) -> None:
    names = named(parameters)
    filled = _filled_by_plaudit(form, names)
    for name in arguments:
        if name in filled:
            raise ConfigurationError(
                f"{where}: argument {name!r} is filled with the sample; remove it from python.arguments"
            )
        if name not in names and not takes_any(parameters):
            raise ConfigurationError(
                f"{where} has no parameter {name!r}: remove it from python.arguments, or add it to the function "
                f"(it has {', '.join(names) or 'none'})"
            )
    for name, parameter in names.items():
        missing = parameter.default is inspect.Parameter.empty and name not in filled and name not in arguments
        if missing and form == "trl" and name not in _TRL_UNAVAILABLE:
            continue  # a column of the data, looked up when the samples are there
        if missing and name in SERVED_PARAMETERS:
            raise ConfigurationError(
                f"{where}: parameter {name!r} is of a model that verl serves for the function: add "
                "python.serve: {source: …} to the scorer, and the job serves it"
            )
        if missing:
            raise ConfigurationError(
                f"{where}: nothing gives parameter {name!r} a value: set python.arguments.{name} in the job, give it a "
                f"default, or use one of the known signatures: {_FORMS}"
            )


def _filled_by_plaudit(form: CallingConvention, names: Mapping[str, inspect.Parameter]) -> frozenset[str]:
    if form == "verl":
        return VERL_PARAMETERS
    if form == "trl":
        return frozenset({"prompts", "completions"})
    num_positional = 2 if form in _SECOND and list(names)[1:2] == [_SECOND[form]] else 1
    return frozenset(list(names)[:num_positional])


def wants_sample(function: Callable[..., Any], name: str = "sample") -> bool:
    """Return True if a function of values or of an answer has ``sample`` (or ``samples``) as its second parameter."""
    return list(named(parameters_of(function)))[1:2] == [name]
