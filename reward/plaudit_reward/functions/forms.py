"""Recognise the calling convention of a user's function by the names of its parameters, and call it so.

| form | parameters | scope |
| --- | --- | --- |
| ``verl`` | any of ``data_source, solution_str, ground_truth, extra_info``, ``solution_str`` among them | sample |
| ``verl batch`` | the same in the plural, ``solution_strs`` among them | group; sample: lists of one |
| ``trl`` | ``completions``, usually ``prompts``, and columns | group; sample: lists of one |
| ``sample`` | one parameter, any other name | sample |
| ``samples`` | one parameter, any other name | group |
| ``values`` | one parameter ``rewards``, ``scores`` or ``values`` (#2854's ``post_process_scores``) | group |
| ``combine`` | ``values``, then perhaps the sample | combine |
| ``answer`` | a judge's answer, then perhaps ``sample`` | answer |
| ``answers`` | a judge's answer, then perhaps ``samples`` | answers |

Every other parameter gets its value from the job's ``arguments`` or has a default. A function also gets what verl and
TRL pass besides: a served model, the environments of the samples, and loggers.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from plaudit_reward.functions.result import CallingConvention, Scope, ServedModel, extra_of
from plaudit_reward.scorer import Score
from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.records import Sample

ADDRESS, TOKENIZER = "reward_router_address", "reward_model_tokenizer"
SERVED_PARAMETERS = (ADDRESS, TOKENIZER)
"""verl's names. The address is ``host:port``; ``http://{reward_router_address}/v1/chat/completions`` answers."""


def served_arguments(served: ServedModel, accepted: Iterable[str]) -> dict[str, Any]:
    """Return a served model as verl passes its reward model: the address of its router, and its tokenizer.

    Loads the tokenizer only where the function accepts it; raises ``ConfigurationError`` if that fails.
    """
    return {name: served.address if name == ADDRESS else _tokenizer(served) for name in accepted}


def _tokenizer(served: ServedModel) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            served.source, revision=served.revision, trust_remote_code=served.trust_remote_code
        )
    except Exception as error:  # transformers raises errors of many kinds
        raise ConfigurationError(
            f"{TOKENIZER}: the tokenizer of {served.source} cannot be loaded: {type(error).__name__}: {error}. It is "
            "that of python.serve, and transformers must be installed where the reward workers run"
        ) from error


VERL_PARAMETERS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
_OF_BATCH = {f"{name}s": name for name in VERL_PARAMETERS}
"""The parameters of a function for verl's ``batch`` reward manager: each a list of what its singular stands for."""
_VALUES_PARAMETERS = frozenset({"rewards", "scores", "values"})
_TRL_UNAVAILABLE = frozenset({"completion_ids", "completions_ids", "trainer_state"})
"""Arguments that only TRL's trainer can pass: accepted with a default, refused without."""
_ONE_FORM: dict[Scope, CallingConvention] = {"combine": "combine", "answer": "answer", "answers": "answers"}
"""Scopes with a single form."""
_SECOND: dict[CallingConvention, str] = {"combine": "sample", "answer": "sample", "answers": "samples"}
"""Forms whose second parameter, if it has this name, is filled as well."""
_FORMS = (
    "verl's (data_source, solution_str, ground_truth, extra_info), TRL's (prompts, completions, **columns), "
    "or Plaudit's (sample); with scope: group TRL's, verl's in the plural (data_sources, solution_strs, …), (samples), "
    "or (rewards)"
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
    """Find the form of ``function``; raise ``ConfigurationError`` if there is none, or the job's arguments do not fit.

    ``where`` is the function, for messages: ``compute_score in rewards.py``.
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
    if "solution_strs" in names:
        return "verl batch"
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
    passed_in_order = frozenset() if form in {"verl", "verl batch", "trl"} else filled
    for name, parameter in names.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and name not in passed_in_order:
            raise ConfigurationError(
                f"{where}: parameter {name!r} is positional-only, and Plaudit passes it by name: remove the '/' from "
                "the parameters"
            )
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
    if form == "verl batch":
        return frozenset(_OF_BATCH)
    if form == "trl":
        return frozenset({"prompts", "completions"})
    num_positional = 2 if form in _SECOND and list(names)[1:2] == [_SECOND[form]] else 1
    return frozenset(list(names)[:num_positional])


class PlayedEnvironment:
    """Hold the public attributes of an environment's instance at the end of its episode.

    TRL passes the instances themselves. Here the instance ended with the process of its sample; its public attributes
    of plain data came along.
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        """Explain why an attribute is missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the environment of this sample has no {name!r}: its instance has ended, so methods cannot be called, "
            "and only its public attributes of plain data (what JSON holds, 64 KiB together) travel with the sample. "
            f"It has {', '.join(sorted(self.__dict__)) or 'none'}. Store what the reward needs in such an attribute, "
            "or return the reward from get_reward (scorer of kind environment)"
        )

    def __repr__(self) -> str:
        return f"PlayedEnvironment({self.__dict__!r})"


LOGGERS = ("log_extra", "log_metric")
"""The parameters through which a function logs."""


class LoggedResult(NamedTuple):
    """Hold the result of a function, and the values that it logged."""

    result: Any
    columns: dict[str, list[Any]]
    """Name → one value for each sample."""
    metrics: dict[str, float]

    def add_to(self, scores: Sequence[Score]) -> list[Score]:
        """Return the scores with the logged values as extras; raise ``DataError`` for a column of another length."""
        for name, values in self.columns.items():
            if len(values) != len(scores):
                raise DataError(f"log_extra({name!r}, …) got {len(values)} values for {len(scores)} samples")
        rows = ({name: values[i] for name, values in self.columns.items()} for i in range(len(scores)))
        return [
            msgspec.structs.replace(score, extra={**score.extra, **extra_of({**row, **self.metrics})})
            for score, row in zip(scores, rows, strict=True)
        ]


def _call_with_loggers(function: Callable[..., Any], passed: dict[str, Any], loggers: Sequence[str]) -> Any:
    """Call a function with TRL's ``log_extra`` and ``log_metric``: what it logs becomes extras of its scores.

    Returns a ``LoggedResult``; for an async function a coroutine of it.
    """
    columns: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}

    def log_extra(column: str, values: Sequence[Any]) -> None:
        columns.setdefault(str(column), []).extend(values)

    def log_metric(name: str, value: float) -> None:
        metrics[str(name)] = float(value)

    available = {"log_extra": log_extra, "log_metric": log_metric}
    returned = function(**passed, **{name: available[name] for name in loggers})
    if not inspect.isawaitable(returned):
        return LoggedResult(returned, columns, metrics)

    async def awaited() -> LoggedResult:
        return LoggedResult(await returned, columns, metrics)

    return awaited()


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
        columns = _verl_columns(sample)
        return function(**{name: columns[name] for name in accepted}, **arguments)

    return call


def _verl_batch(function: Function, arguments: dict[str, Any]) -> Caller:
    parameters = parameters_of(function)
    accepted = {plural: name for plural, name in _OF_BATCH.items() if plural in parameters or takes_any(parameters)}

    def call(samples: Sequence[Sample], values: Any) -> Any:
        columns = [_verl_columns(sample) for sample in samples]
        return function(**{plural: [each[name] for each in columns] for plural, name in accepted.items()}, **arguments)

    return call


def _verl_columns(sample: Sample) -> dict[str, Any]:
    return {
        "data_source": sample.data_source,
        "solution_str": sample.response,
        "ground_truth": sample.ground_truth,
        "extra_info": {**_added_by_verl(sample), **sample.extra_info},
    }


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
        return _call_with_loggers(function, passed, loggers) if loggers else function(**passed)

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


def _of_values(kind: type, second: str, function: Function, arguments: dict[str, Any]) -> Caller:
    """Pass values or an answer as ``kind``, and the samples if the second parameter is ``second``."""
    if list(named(parameters_of(function)))[1:2] != [second]:
        return lambda samples, values: function(kind(values), **arguments)
    seen: Callable[[Sequence[Sample]], Any] = list if second == "samples" else operator.itemgetter(0)
    return lambda samples, values: function(kind(values), seen(samples), **arguments)


_CALLERS: dict[CallingConvention, Callable[[Function, dict[str, Any]], Caller]] = {
    "verl": _verl,
    "verl batch": _verl_batch,
    "trl": _trl,
    "sample": lambda function, arguments: lambda samples, values: function(samples[0], **arguments),
    "samples": lambda function, arguments: lambda samples, values: function(list(samples), **arguments),
    "values": lambda function, arguments: lambda samples, values: function(list(values), **arguments),
    "combine": partial(_of_values, dict, _SECOND["combine"]),
    "answer": partial(_of_values, str, _SECOND["answer"]),
    "answers": partial(_of_values, str, _SECOND["answers"]),
}
