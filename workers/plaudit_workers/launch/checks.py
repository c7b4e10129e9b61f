"""Check the files and folders that a resolved job names, before anything starts: models, data rows, code, templates."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from plaudit_job.checks import python_problems
from plaudit_job.data_row import (
    CHECKS,
    CHECKS_WITH_IMAGES,
    IMAGES_COLUMN,
    REMEDIES,
    REQUIRED_COLUMNS,
    extra_info_of,
    refused_media,
)
from plaudit_job.fields import is_hub_id
from plaudit_job.problem import Problem
from plaudit_job.spec.rewards import RewardModelSpec, ServedModelSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import ImagesSpec
from plaudit_reward.endpoint.judge import PromptTemplate
from plaudit_reward.rules.scorer import unknown_sources
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.images import ImageError, row_files

_ROWS_AT_A_TIME = 4096
_ROWS_WITH_IMAGES = 64
_NEEDED_COLUMNS = "Rows need data_source, prompt (messages or text) and reward_model: {ground_truth: …}"
_REWARD_CLASS = re.compile(r"(ForRewardModeling|(For(Process)?)?RewardModel)$")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_RELATIVE = "Correct the path: it is relative to the job file"


def check_files(job: RLJob) -> list[Problem]:
    """Find every problem of the files that the job names: models, data, Python files, templates, checkpoints."""
    training = (_model, _data, _loss, _rollout, _checkpoint) if job.spec.trains else ()
    return [problem for check in (*training, _scorers) for problem in check(job)]


def _model(job: RLJob) -> Iterator[Problem]:
    model = job.spec.model
    yield from _source("spec.model.source", model.source, ("config.json",))
    if model.tokenizer:
        yield from _source("spec.model.tokenizer", model.tokenizer, ())
    tokenizer = model.tokenizer or model.source
    if os.path.isdir(tokenizer) and not any(os.path.exists(os.path.join(tokenizer, name)) for name in _TOKENIZER_FILES):
        yield Problem(
            "spec.model.tokenizer", f"{tokenizer} has no tokenizer", "Name a folder with one, or save it there"
        )
    if model.chat_template:
        yield from _file_exists("spec.model.chatTemplate", model.chat_template)


def _source(field: str, source: str, needed: tuple[str, ...]) -> Iterator[Problem]:
    if is_hub_id(source):
        yield from _hub(field, source)
        return
    folder = Path(source)
    if not os.path.isdir(folder):
        yield Problem(field, f"there is no folder {source}", f"Create or download the model first. {_RELATIVE}")
        return
    for name in needed:
        if not os.path.isfile(folder / name):
            yield Problem(field, f"{source} has no {name}", "Name a folder written by save_pretrained")


def _hub(field: str, source: str) -> Iterator[Problem]:
    if not _HUB_ID.fullmatch(source):
        yield Problem(field, f"{source!r} is neither a folder nor a hub id", "Write a folder with ./ or /")
    elif os.environ.get("HF_HUB_OFFLINE") in {"1", "true", "True", "ON", "YES"} and not hub_cache(source).is_dir():
        yield Problem(
            field,
            f"{source!r} is not a folder next to the job file, and HF_HUB_OFFLINE is set",
            "Write the path of a folder with ./ or /, or unset HF_HUB_OFFLINE",
        )


def hub_cache(source: str) -> Path:
    """Return the folder of the hub's local cache for a model; it exists if some revision is there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return cache / f"models--{source.replace('/', '--')}"


def _data(job: RLJob) -> Iterator[Problem]:
    for field, path in data_files(job).items():
        problem = data_problem(field, path, job.spec.data.images)
        yield from [problem] if problem else _routes(job, field, path)


def data_files(job: RLJob) -> dict[str, str]:
    """Return the paths of a job's data files by the fields that name them."""
    data = job.spec.data
    validation = {"spec.data.validation.path": data.validation.path} if data.validation else {}
    return {"spec.data.train.path": data.train.path, **validation}


def _routes(job: RLJob, field: str, path: str) -> Iterator[Problem]:
    """Report data sources without a rule now, not at sample 10,000."""
    by_source = [scorer.name for scorer in job.spec.reward.scorers if scorer.kind == "rule" and scorer.rule is None]
    if not by_source:
        return
    sources = data_sources(path)
    wrong = [source for source in sources if not isinstance(source, str)]
    if wrong:
        yield Problem(
            field, f"{path} has data_source {wrong[0]!r}, which is not text", REMEDIES["data_source"].capitalize()
        )
        return
    unknown = unknown_sources(sources)
    if unknown:
        yield Problem(
            field,
            f"{path} has data_source {', '.join(map(repr, unknown))}, for which scorer {by_source[0]!r} has no rule",
            "Name a rule in the scorer (rule: gsm8k), or score it with a function (kind: python)",
        )


def _scorers(job: RLJob) -> Iterator[Problem]:
    for index, scorer in enumerate(job.spec.reward.scorers):
        field = f"spec.reward.scorers[{index}]"
        if scorer.python:
            yield from python_problems(f"{field}.python", scorer.python.path, scorer.python.function)
        if scorer.judge:
            yield from _template(
                f"{field}.judge.promptTemplate.path", scorer.judge.prompt_template.path, group=scorer.scope == "group"
            )
        if scorer.judge and scorer.judge.parse.python:
            parse = scorer.judge.parse.python
            yield from python_problems(f"{field}.judge.parse.python", parse.path, parse.function)
        if scorer.served:
            yield from _served_model(f"{field}.{scorer.served_field}", scorer.served, is_judge=scorer.judge is not None)
    combine = job.spec.reward.combine
    if combine.kind == "python":
        yield from python_problems("spec.reward.combine", combine.path, combine.function)


def _template(field: str, path: str, *, group: bool) -> Iterator[Problem]:
    try:
        PromptTemplate(path, group=group)
    except ConfigurationError as error:
        yield Problem(field, str(error), "Fix the template. Its path is relative to the job file")


def _served_model(field: str, model: ServedModelSpec, *, is_judge: bool) -> Iterator[Problem]:
    problems = list(_source(f"{field}.source", model.source, ("config.json", "tokenizer_config.json")))
    yield from problems
    if problems or is_hub_id(model.source):
        return
    config, tokenizer = (_read_json(model.source, name) for name in ("config.json", "tokenizer_config.json"))
    files = (os.path.join(model.source, name) for name in ("chat_template.jinja", "chat_template.json"))
    for_chats = bool(tokenizer.get("chat_template")) or any(map(os.path.exists, files))
    if isinstance(model, RewardModelSpec):
        yield from _reward_model(field, model, config, for_chats=for_chats)
    else:
        yield from _chat_model(field, model, config, lacks_template=is_judge and not for_chats)


def _reward_model(field: str, model: RewardModelSpec, config: dict[str, Any], *, for_chats: bool) -> Iterator[Problem]:
    """Check for one output and, where needed, a chat template, now and not with every sample."""
    labels = len(config.get("id2label") or [1])
    if labels != 1:
        yield Problem(
            f"{field}.source",
            f"{model.source} has {labels} outputs (id2label in config.json); a reward model has one",
            "Name a classifier trained with num_labels=1",
        )
    wrong = class_problem(field, model, architecture_of(config))
    yield from [wrong] if wrong else []
    if model.input == "chat" and not for_chats:
        yield Problem(
            f"{field}.input",
            f"chat needs a chat template, but the tokenizer in {model.source} has none",
            "Set input to text, or save chat_template.jinja there",
        )


def _chat_model(
    field: str, model: ServedModelSpec, config: dict[str, Any], *, lacks_template: bool
) -> Iterator[Problem]:
    """Check for a class that writes text and, for a judge, a chat template."""
    architecture = architecture_of(config)
    if writes_no_text(architecture):
        yield Problem(
            f"{field}.source",
            f"{model.source} has class {architecture}, which writes no text",
            "Name a generative model, or score with it as kind: model",
        )
    if lacks_template:
        yield Problem(
            f"{field}.source",
            f"a judge's prompt is a chat message, but the tokenizer in {model.source} has no chat template",
            "Save chat_template.jinja there, or name a model for chats",
        )


def _read_json(folder: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(folder, name).read_text(encoding="utf-8"))
    except ValueError:
        return {}  # the server reports the error when it loads the model
    return content if isinstance(content, dict) else {}


def _loss(job: RLJob) -> Iterator[Problem]:
    loss = job.spec.algorithm.loss
    if loss.kind == "python":
        yield from python_problems("spec.algorithm.loss", loss.path, loss.function)


def _rollout(job: RLJob) -> Iterator[Problem]:
    agent = job.spec.rollout.agent
    if agent.kind == "custom" or (agent.kind == "environment" and agent.path):
        yield from python_problems("spec.rollout.agent", agent.path, agent.class_name, "class")
    if agent.kind == "endpoint" and agent.function:
        yield from python_problems("spec.rollout.agent", agent.path, agent.function)
    elif agent.kind == "endpoint" and agent.path:
        yield from _file_exists("spec.rollout.agent.path", agent.path)
    for index, tool in enumerate(agent.tools):
        field = f"spec.rollout.agent.tools[{index}]"
        if tool.path:
            yield from python_problems(field, tool.path, tool.function)
        if tool.config:
            yield from _file_exists(f"{field}.config", tool.config)


def _checkpoint(job: RLJob) -> Iterator[Problem]:
    folder = job.spec.trainer.checkpoint.resume_from
    if folder and not os.path.isdir(folder):
        yield Problem("spec.trainer.checkpoint.resumeFrom", f"there is no folder {folder}", _RELATIVE)


def _file_exists(field: str, path: str) -> Iterator[Problem]:
    if not os.path.isfile(path):
        yield Problem(field, f"there is no file {path}", _RELATIVE)


class _RowError(Exception):
    """Report a file or a row that is not what the columns promise: the complaint, and the remedy."""

    def __init__(self, complaint: str, remedy: str = _NEEDED_COLUMNS) -> None:
        super().__init__(complaint)
        self.remedy = remedy


def data_problem(field: str, path: str, images: ImagesSpec | None = None) -> Problem | None:
    """Return the first problem of a data file, or None."""
    file = Path(path)
    if not os.path.isfile(file):
        message = f"{path} is a folder" if os.path.isdir(file) else f"there is no file {path}"
        return Problem(field, message, "Write the data first, or correct the path: it is relative to the job file")
    if file.suffix not in _READERS:
        return Problem(field, f"{path} ends with {file.suffix!r}", "Give a .parquet or a .jsonl file")
    num_rows = 0
    try:
        columns = (*REQUIRED_COLUMNS, "extra_info", *([IMAGES_COLUMN] if images else []))
        for num_rows, row in enumerate(data_rows(path, columns), 1):  # counted
            _check_row(num_rows, row, images=images is not None)
            if images:
                _check_images(num_rows, row, file.parent, images)
    except _RowError as error:
        return Problem(field, f"{path} {error}", error.remedy)
    except OSError as error:
        return Problem(field, f"cannot read {path}: {error.strerror or error}", "Write the file again")
    return None if num_rows else Problem(field, f"{path} has no rows", _NEEDED_COLUMNS)


def data_sources(path: str) -> set[Any]:
    """Return the data sources of all rows of a file without problems."""
    return {row["data_source"] for row in data_rows(path, ("data_source",))}


def shared_extra_info(path: str) -> set[str]:
    """Return the keys of ``extra_info`` that every row of a file without problems has."""
    shared: set[str] | None = None
    for row in data_rows(path, ("extra_info",)):
        keys = extra_info_of(row.get("extra_info")).keys()
        shared = set(keys) if shared is None else shared & keys
    return shared or set()


def data_rows(path: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file without problems; a column that the file does not have is missing in them."""
    return _READERS[Path(path).suffix](Path(path), columns)


def _parquet_rows(file: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            _refuse_columns(names, columns)
            at_a_time = _ROWS_WITH_IMAGES if IMAGES_COLUMN in columns else _ROWS_AT_A_TIME
            for batch in opened.iter_batches(at_a_time, columns=[name for name in columns if name in names]):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise _RowError(f"is not a Parquet file ({error})", "Write the file again") from error


def _jsonl_rows(file: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    decode = msgspec.json.Decoder().decode
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _RowError(f"is not JSON in line {number}: {error}") from error
            if not isinstance(row, dict):
                raise _RowError(f"has no JSON object in line {number}")
            _refuse_columns(list(row), columns, f" in line {number}")
            yield row


_READERS = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}


def _refuse_columns(names: list[str], columns: tuple[str, ...], place: str = "") -> None:
    missing = [name for name in REQUIRED_COLUMNS if name in columns and name not in names]
    if missing:
        noun = "column" if len(missing) == 1 else "columns"
        raise _RowError(f"lacks {noun} {', '.join(missing)}{place} (it has {', '.join(names) or 'none'})")
    media = [(name, remedy) for name, remedy in refused_media(IMAGES_COLUMN in columns).items() if name in names]
    if media and "prompt" in columns:
        name, remedy = media[0]
        raise _RowError(f"has column {name}{place}", remedy)


def _check_row(number: int, row: dict[str, Any], *, images: bool) -> None:
    for column, is_valid in (CHECKS_WITH_IMAGES if images else CHECKS).items():
        value = row.get(column)
        if not is_valid(value):
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
            remedy = REMEDIES[column]
            raise _RowError(f"row {number}: column {column} is {shown}", remedy[0].upper() + remedy[1:])


def _check_images(number: int, row: dict[str, Any], folder: Path, images: ImagesSpec) -> None:
    try:
        row_files(row["prompt"], row.get(IMAGES_COLUMN), folder, images.max_per_prompt)
    except ImageError as error:
        raise _RowError(f"row {number}: column {IMAGES_COLUMN} {error.complaint}", error.remedy) from error


def writes_no_text(architecture: str) -> bool:
    """Return True for the class of a classifier or a reward model."""
    return architecture.endswith("ForSequenceClassification") or _REWARD_CLASS.search(architecture) is not None


def architecture_of(config: dict[str, Any]) -> str:
    """Return the class that a model's configuration names; empty for none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, Sequence) and names else ""


def class_problem(field: str, model: RewardModelSpec, architecture: str) -> Problem | None:
    """Return the problem of a model that vLLM would take for an embedder; None if there is none.

    vLLM goes by the end of the class's name. ``…RewardModel`` and ``…ForRewardModeling`` become embedders: loading
    fails at the head's weights, and ``--convert classify`` is refused.
    """
    base = _REWARD_CLASS.sub("", architecture)
    if model.engine != "vllm" or base == architecture or "hf_overrides" in model.arguments:
        return None
    if architecture.endswith("ProcessRewardModel"):
        return Problem(
            f"{field}.source",
            f"{model.source} has class {architecture}, which scores the steps of a response, not the response",
            "Name a classifier with one output, or ask it in a function (kind: python)",
        )
    return Problem(
        f"{field}.source",
        f"{model.source} has class {architecture}, which vLLM takes for an embedder",
        "If its head is one linear layer 'score', add arguments: {hf_overrides: {architectures: "
        f"[{base}ForSequenceClassification]}}}}; else set engine to plaudit",
    )
