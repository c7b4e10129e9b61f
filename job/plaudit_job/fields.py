"""Describe errors of single fields with a remedy, and resolve the paths of a job against the job file's folder.

Settings of verl and TRL are known by name: a job that uses one is told the field that does the same here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from plaudit_job.problem import Problem, did_you_mean, nearest
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.section import (
    BYTE_QUANTITY,
    DNS_LABEL,
    PYTHON_NAME,
    SCORER_NAME,
    JobPath,
    choices,
    written_fields,
)
from plaudit_wire.printable import shown

_PATTERNS = {
    DNS_LABEL: ("is not a valid name", "Use a-z, 0-9 and '-', for example my-job"),
    SCORER_NAME: ("is not a valid name", "Use a-z, 0-9, '-' and '_', for example accuracy_reward"),
    BYTE_QUANTITY: ("is not a number of bytes", "Write it like 512Mi or 4Gi"),
    PYTHON_NAME: ("is not the name of a Python function", "Give the name as the file defines it"),
    r"^(https?://.+)?$": ("is not a URL", "Start it with http:// or https://"),
    r"^https?://": ("is not a URL", "Start it with http:// or https://"),
    r"^rediss?://": ("is not the URL of a Redis", "Write redis://host:port/0, or rediss:// for TLS"),
    r"^(rediss?://.+)?$": ("is not the URL of a Redis", "Write redis://host:port/0, or rediss:// for TLS"),
    r"^/": ("is not an absolute path", "Start it with /"),
    r"^[^/]": ("is not a relative path", "Remove the leading /"),
}
_MAPPING = ("a mapping", "Write {key: value}, or one indented 'key: value' line for each")
_TYPES = {
    "int_type": ("a whole number", "Write digits without quotes"),
    "int_from_float": ("a whole number", "Remove the fraction"),
    "float_type": ("a number", "Write it without quotes"),
    "string_type": ("text", "Put it in quotes"),
    "bool_type": ("true or false", "Write true or false without quotes"),
    "list_type": ("a list", "Write [a, b], or one '- ' line for each entry"),
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
FIELDS_OF_TRL = {
    "adam_beta1": "algorithm.optimizer.beta1",
    "adam_beta2": "algorithm.optimizer.beta2",
    "beta": "algorithm.loss.klCoefficient",
    "bf16": "model.dtype",
    "chat_template_kwargs": "model.chatTemplateArguments",
    "entropy_coef": "algorithm.loss.entropyCoefficient",
    "epsilon": "algorithm.loss.clipLow",
    "epsilon_high": "algorithm.loss.clipHigh",
    "eval_steps": "data.validation.everySteps",
    "generation_batch_size": "algorithm.promptsPerStep",
    "gradient_checkpointing": "trainer.activationCheckpointing",
    "learning_rate": "algorithm.optimizer.learningRate",
    "loss_type": "algorithm.loss.aggregation",
    "lr_scheduler_type": "algorithm.optimizer.schedule",
    "mask_truncated_completions": "algorithm.maskTruncated",
    "max_completion_length": "rollout.sampling.maxTokens",
    "max_grad_norm": "algorithm.optimizer.maxGradNorm",
    "max_steps": "algorithm.steps",
    "max_tool_calling_iterations": "rollout.agent.maxTurns",
    "num_generations": "algorithm.samplesPerPrompt",
    "num_generations_eval": "data.validation.samplesPerPrompt",
    "num_iterations": "algorithm.epochs",
    "report_to": "trainer.sinks",
    "reward_weights": "reward.scorers[].weight",
    "save_steps": "trainer.checkpoint.everySteps",
    "save_total_limit": "trainer.checkpoint.keep",
    "shuffle_dataset": "data.train.shuffle",
    "steps_per_generation": "algorithm.miniBatchesPerStep",
    "stop_token_ids": "rollout.sampling.stopTokenIds",
    "temperature": "rollout.sampling.temperature",
    "top_k": "rollout.sampling.topK",
    "top_p": "rollout.sampling.topP",
    "use_bias_correction_kl": "algorithm.loss.klImportanceWeight",
    "vllm_enable_sleep_mode": "rollout.sleepDuringUpdates",
    "vllm_gpu_memory_utilization": "rollout.engine.gpuMemoryUtilization",
    "vllm_max_model_length": "rollout.engine.maxModelLength",
    "vllm_tensor_parallel_size": "rollout.engine.tensorParallelSize",
    "warmup_steps": "algorithm.optimizer.warmupSteps",
    "weight_decay": "algorithm.optimizer.weightDecay",
}
"""Fields of TRL's ``GRPOConfig`` → the field here; docs/coming-from-trl.md says more of each."""
FIELDS_OF_VERL = {
    "actor_rollout_ref": "rollout",
    "adv_estimator": "algorithm.advantage",
    "clip_ratio_c": "algorithm.loss.clipRatioC",
    "clip_ratio_high": "algorithm.loss.clipHigh",
    "clip_ratio_low": "algorithm.loss.clipLow",
    "custom_reward_function": "reward.scorers[].python",
    "entropy_coeff": "algorithm.loss.entropyCoefficient",
    "gpu_memory_utilization": "rollout.engine.gpuMemoryUtilization",
    "grad_clip": "algorithm.optimizer.maxGradNorm",
    "ignore_eos": "rollout.sampling.ignoreEos",
    "kl_loss_coef": "algorithm.loss.klCoefficient",
    "logger": "trainer.sinks",
    "loss_agg_mode": "algorithm.loss.aggregation",
    "lr": "algorithm.optimizer.learningRate",
    "lr_warmup_steps": "algorithm.optimizer.warmupSteps",
    "max_prompt_length": "data.train.maxPromptLength",
    "max_response_length": "rollout.sampling.maxTokens",
    "n": "algorithm.samplesPerPrompt",
    "ppo_epochs": "algorithm.epochs",
    "prompt_key": "data.columns.prompt",
    "reward_fn_key": "data.columns.dataSource",
    "save_freq": "trainer.checkpoint.everySteps",
    "tensor_model_parallel_size": "rollout.engine.tensorParallelSize",
    "test_freq": "data.validation.everySteps",
    "total_training_steps": "algorithm.steps",
    "train_batch_size": "algorithm.promptsPerStep",
    "train_files": "data.train.path",
    "val_files": "data.validation.path",
}
"""Settings of verl → the field here; docs/coming-from-verl.md says more of each."""
_PEERS = (("TRL", FIELDS_OF_TRL), ("verl", FIELDS_OF_VERL))
_OF_VALIDATION = ("minP", "repetitionPenalty", "minTokens")
"""Settings that sample from another distribution than the one whose log-probabilities the trainer computes."""
Location = tuple[str | int, ...]
"""Keys and indices from the root of the job to a part of it."""
MessageOf = Callable[[Any, dict[str, Any], type[BaseModel], Location], tuple[str, str]]


def field_name(location: Iterable[str | int]) -> str:
    """Return the written name of a location: ``spec.reward.scorers[1].weight``."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def null_problem(location: Location) -> Problem:
    """Return the problem of a field without a value."""
    return Problem(
        field_name(location), "has no value", "Give one, or remove the field (for a section of defaults write {})"
    )


def problem_of(errors: Sequence[ErrorDetails], root: type[BaseModel], location: Location) -> Problem:
    """Turn pydantic's errors about one field into a problem: one error, or one for each type of a union."""
    kind, value = errors[0]["type"], errors[0]["input"]
    types = [_TYPES[error["type"]] for error in errors if error["type"] in _TYPES]
    if kind in _MESSAGES and len(types) < 2:
        message, remedy = _MESSAGES[kind](value, errors[0].get("ctx", {}), root, location)
    elif kind in _TYPES or len(types) > 1:
        message = f"{shown(value)} is not {' or '.join(wanted for wanted, _ in types)}"
        remedy = types[0][1] if len(types) == 1 else "Write it like 4, 500m or 16Gi"
    else:
        message, remedy = f"{shown(value)}: {errors[0]['msg'].lower()}", "See docs/rljob.md"
    return Problem(field_name(location), message, remedy)


def _answer_for(name: str) -> str | None:
    """Return the remedy for a setting of another trainer or another section; None for a name that none has."""
    if name in _OF_VALIDATION:
        return f"The trainer could not reproduce it; validation may use it: spec.data.validation.sampling.{name}"
    here = [(peer, fields[name]) for peer, fields in _PEERS if name in fields]
    if not here:
        return None
    peer, field = here[0]
    return f"{peer}'s {name} is spec.{field} here (docs/coming-from-{peer.lower()}.md)"


def _missing(_: Any, __: dict[str, Any], root: type[BaseModel], location: Location) -> tuple[str, str]:
    field = field_at(root, location)
    options = [str(option) for option in choices(field)] if field else []
    value = f"one of {', '.join(options)}" if len(options) > 1 else "".join(options) or "…"
    return "is missing", f"Add {location[-1]}: {value}"


def _unknown(_: Any, __: dict[str, Any], root: type[BaseModel], location: Location) -> tuple[str, str]:
    if answer := _answer_for(str(location[-1])):
        return "is not a field of this section", answer
    names = _names(root, location[:-1])
    meant = nearest(str(location[-1]), names) or _elsewhere(root, location)
    return "is not a field of this section", did_you_mean(meant, f"Fields here: {', '.join(names)}")


def meant_field(root: type[BaseModel], location: Location) -> Location | None:
    """Return the location of the field that an unknown one is a mistyped name of; None where none is near."""
    near = nearest(str(location[-1]), _names(root, location[:-1]))
    return (*location[:-1], near[0]) if near else None


def _names(root: type[BaseModel], location: Location) -> list[str]:
    section = _section(root, location)
    return list(written_fields(section)) if section else []


def _elsewhere(root: type[BaseModel], location: Location) -> list[str]:
    """Return the fields of this name in other sections: nearest to ``location`` first, at most two."""
    name, here = str(location[-1]), [part for part in location[:-1] if isinstance(part, str)]

    def distance(path: str) -> int:
        parts = path.replace("[]", "").split(".")[:-1]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, here, strict=False)))
        return len(parts) + len(here) - 2 * shared

    paths = sorted((path for path, _ in _fields_below(root) if path.rsplit(".", 1)[-1] == name), key=distance)
    nearest = [path for path in paths if distance(path) == distance(paths[0])]
    return nearest[:2]


def _fields_below(section: type[BaseModel], name: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field below a section with its written name (``[]`` for lists), without the inside of pods."""
    for python_name, field in section.model_fields.items():
        written = f"{name}.{field.alias or python_name}".lstrip(".")
        yield written, field
        inner = section_of(field.annotation)
        if inner and python_name != "pod":
            yield from _fields_below(inner, f"{written}[]" if get_origin(field.annotation) is list else written)


def _pattern(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
    message, remedy = _PATTERNS.get(context["pattern"], ("is malformed", f"It must match {context['pattern']}"))
    return f"{shown(value)} {message}", remedy


def _bound(relation: str, key: str) -> MessageOf:
    def message(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
        return f"{shown(value)} is not {relation} {context[key]:,}", f"Give a number {relation} {context[key]:,}"

    return message


def _too_short(value: Any, context: dict[str, Any], root: type[BaseModel], location: Location) -> tuple[str, str]:
    if value:
        return f"{shown(value)} is too short", f"Give at least {context['min_length']}"
    field = field_at(root, location) if isinstance(value, list) else None
    section = section_of(field.annotation) if field else None
    if section is None:
        return "is empty", "Give a value"
    needed = (
        f"{name}: {'|'.join(map(str, choices(field))) or '…'}"
        for name, field in written_fields(section).items()
        if field.is_required()
    )
    return "is empty", f"Give at least one: - {{{', '.join(needed)}}}"


def _too_long(value: Any, context: dict[str, Any], *_: object) -> tuple[str, str]:
    most = context["max_length"]
    unit = "characters" if isinstance(value, str) else "entries"
    return f"{shown(value)} has {len(value)} {unit}", f"Give at most {most}"


_MESSAGES: dict[str, MessageOf] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "literal_error": lambda value, context, *_: (f"{shown(value)} is not supported", f"Give {context['expected']}"),
    "string_pattern_mismatch": _pattern,
    "greater_than_equal": _bound("at least", "ge"),
    "greater_than": _bound("above", "gt"),
    "less_than_equal": _bound("at most", "le"),
    "less_than": _bound("below", "lt"),
    "string_too_short": _too_short,
    "too_short": _too_short,
    "string_too_long": _too_long,
    "too_long": _too_long,
    "finite_number": lambda value, *_: (f"{shown(value)} is not a finite number", "Give a finite number"),
}


def _section(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for part in location:
        if section is None:
            return None
        if isinstance(part, int):
            continue
        field = written_fields(section).get(part)
        section = section_of(field.annotation) if field else None
    return section


def field_at(root: type[BaseModel], location: Location) -> FieldInfo | None:
    """Return the field at a location."""
    section = _section(root, location[:-1])
    return written_fields(section).get(str(location[-1])) if section else None


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field holds, alone, in a list or optionally."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part))), None)


def resolve_paths(written: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return plain data of a job with every path absolute; unknown fields and wrong types stay as they are."""
    return _resolved(written, RLJob, folder.resolve())


def path_fields(section: type[BaseModel]) -> Iterator[tuple[str, JobPath]]:
    """Yield every field below a section that is a path: its written name (``[]`` for lists) and its mark."""
    for written, field in _fields_below(section):
        mark = _mark(field)
        if mark and mark.kind != "command":
            yield written, mark


def is_hub_id(source: str) -> bool:
    """Return True for a hub id, False for a path (in a resolved job, every path is absolute)."""
    return not source.startswith(("/", ".", "~"))


_ADDRESS = re.compile(r"(^|/)(https?|s3|gs|hf|az|abfs|hdfs|file):/")
DOWNLOAD_FILE = "Download it: a run reads files of this machine"


def is_address(path: str) -> bool:
    """Return True for a path that was meant as an address, which normalising may have shortened to ``https:/``."""
    return _ADDRESS.search(path) is not None


def _mark(field: FieldInfo) -> JobPath | None:
    return next((mark for mark in field.metadata if isinstance(mark, JobPath)), None)


def _resolved(written: Mapping[str, Any], section: type[BaseModel], folder: Path) -> dict[str, Any]:
    fields = written_fields(section)
    return {
        key: _resolved_value(value, fields[key], folder) if key in fields else value for key, value in written.items()
    }


def _resolved_value(value: Any, field: FieldInfo, folder: Path) -> Any:
    mark, inner = _mark(field), section_of(field.annotation)
    if mark and isinstance(value, str):
        return _absolute(value, mark, folder)
    if mark and mark.kind == "command" and isinstance(value, list):
        return _command(value, mark, folder)
    if inner and isinstance(value, Mapping):
        return _resolved(value, inner, folder)
    if inner and isinstance(value, list):
        return [_resolved(item, inner, folder) if isinstance(item, Mapping) else item for item in value]
    return value


def _command(written: list[Any], mark: JobPath, folder: Path) -> list[Any]:
    """Resolve a program with a slash in its name, and arguments that name a file beside the job file."""
    if not written:
        return written
    program, *arguments = written
    # Not pathlib: its is_file raises for what is too long for a name, such as the text of a program.
    is_file = [isinstance(each, str) and each != "" and os.path.isfile(folder / each) for each in arguments]
    return [
        _absolute(program, mark, folder) if isinstance(program, str) and "/" in program else program,
        *(_absolute(each, mark, folder) if file else each for each, file in zip(arguments, is_file, strict=True)),
    ]


def _absolute(path: str, mark: JobPath, folder: Path) -> str:
    if not path or is_address(path):  # whoever looks for the file refuses it, as it was written
        return path
    # Not pathlib: its expanduser raises for a user whom this machine does not have.
    target = Path(os.path.normpath(folder / os.path.expanduser(path)))
    if mark.kind == "source" and is_hub_id(path) and not os.path.exists(target):
        return path
    return str(target)
