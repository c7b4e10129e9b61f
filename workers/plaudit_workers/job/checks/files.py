"""Check every file and folder that a resolved job names, before anything starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit_reward.judge.prompt import PromptTemplate
from plaudit_reward.rules.routing import unknown_sources
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.job.checks.data_files import data_problem, data_sources
from plaudit_workers.job.checks.python_files import python_problem
from plaudit_workers.job.checks.reward_classes import architecture_of, class_problem, writes_no_text
from plaudit_workers.job.data_row import REMEDIES
from plaudit_workers.job.loading.paths import is_hub_id
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rewards.scorers import RewardModelSpec, ServedModelSpec
from plaudit_workers.job.spec.rljob import RLJob

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
        yield from _exists("spec.model.chatTemplate", model.chat_template)


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
    elif os.environ.get("HF_HUB_OFFLINE") in {"1", "true", "True", "ON", "YES"} and not is_in_hub_cache(source):
        yield Problem(
            field,
            f"{source!r} is not a folder next to the job file, and HF_HUB_OFFLINE is set",
            "Write the path of a folder with ./ or /, or unset HF_HUB_OFFLINE",
        )


def is_in_hub_cache(source: str) -> bool:
    """Return True when the hub's local cache holds some revision of a model."""
    return hub_cache(source).is_dir()


def hub_cache(source: str) -> Path:
    """Return the folder of the hub's local cache for a model."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return cache / f"models--{source.replace('/', '--')}"


def _data(job: RLJob) -> Iterator[Problem]:
    data = job.spec.data
    files = {"spec.data.train.path": data.train.path}
    if data.validation:
        files["spec.data.validation.path"] = data.validation.path
    for field, path in files.items():
        problem = data_problem(field, path, data.images)
        yield from [problem] if problem else _routes(job, field, path)


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
            yield from _python(f"{field}.python", scorer.python.path, scorer.python.function)
        if scorer.judge:
            template = f"{field}.judge.promptTemplate.path"
            problem = _template_problem(template, scorer.judge.prompt_template.path, group=scorer.scope == "group")
            yield from [problem] if problem else []
        if scorer.judge and scorer.judge.parse.python:
            parse = scorer.judge.parse.python
            yield from _python(f"{field}.judge.parse.python", parse.path, parse.function)
        if scorer.model:
            yield from _reward_model(f"{field}.model", scorer.model)
        elif scorer.served:
            yield from _chat_model(f"{field}.{scorer.served_field}", scorer.served, template=scorer.judge is not None)
    combine = job.spec.reward.combine
    if combine.kind == "python":
        yield from _python("spec.reward.combine", combine.path, combine.function)


def _template_problem(field: str, path: str, *, group: bool) -> Problem | None:
    try:
        PromptTemplate(path, group=group)
    except ConfigurationError as error:
        return Problem(field, str(error), "Fix the template. Its path is relative to the job file")
    return None


def _reward_model(field: str, model: RewardModelSpec) -> Iterator[Problem]:
    """Check for one output and, where needed, a chat template, now and not with every sample."""
    problems = list(_source(f"{field}.source", model.source, ("config.json", "tokenizer_config.json")))
    yield from problems
    if problems or is_hub_id(model.source):
        return
    config, tokenizer = (_read_json(model.source, name) for name in ("config.json", "tokenizer_config.json"))
    labels = len(config.get("id2label") or [1])
    if labels != 1:
        yield Problem(
            f"{field}.source",
            f"{model.source} has {labels} outputs (id2label in config.json); a reward model has one",
            "Name a classifier trained with num_labels=1",
        )
    wrong = class_problem(field, model, architecture_of(config))
    yield from [wrong] if wrong else []
    if model.input == "chat" and not (tokenizer.get("chat_template") or _holds_template(model.source)):
        yield Problem(
            f"{field}.input",
            f"chat needs a chat template, but the tokenizer in {model.source} has none",
            "Set input to text, or save chat_template.jinja there",
        )


def _chat_model(field: str, model: ServedModelSpec, *, template: bool) -> Iterator[Problem]:
    """Check for a class that writes text and, for a judge, a chat template."""
    problems = list(_source(f"{field}.source", model.source, ("config.json", "tokenizer_config.json")))
    yield from problems
    if problems or is_hub_id(model.source):
        return
    config, tokenizer = (_read_json(model.source, name) for name in ("config.json", "tokenizer_config.json"))
    architecture = architecture_of(config)
    if writes_no_text(architecture):
        yield Problem(
            f"{field}.source",
            f"{model.source} has class {architecture}, which writes no text",
            "Name a generative model, or score with it as kind: model",
        )
    if template and not (tokenizer.get("chat_template") or _holds_template(model.source)):
        yield Problem(
            f"{field}.source",
            f"a judge's prompt is a chat message, but the tokenizer in {model.source} has no chat template",
            "Save chat_template.jinja there, or name a model for chats",
        )


def _holds_template(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in ("chat_template.jinja", "chat_template.json"))


def _read_json(folder: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(folder, name).read_text(encoding="utf-8"))
    except ValueError:
        return {}  # the server reports the error when it loads the model
    return content if isinstance(content, dict) else {}


def _loss(job: RLJob) -> Iterator[Problem]:
    loss = job.spec.algorithm.loss
    if loss.kind == "python":
        yield from _python("spec.algorithm.loss", loss.path, loss.function)


def _rollout(job: RLJob) -> Iterator[Problem]:
    agent = job.spec.rollout.agent
    if agent.kind == "custom" or (agent.kind == "environment" and agent.path):
        yield from _python("spec.rollout.agent", agent.path, agent.class_name, "class")
    if agent.kind == "endpoint" and agent.function:
        yield from _python("spec.rollout.agent", agent.path, agent.function)
    elif agent.kind == "endpoint" and agent.path:
        yield from _exists("spec.rollout.agent.path", agent.path)
    for index, tool in enumerate(agent.tools):
        field = f"spec.rollout.agent.tools[{index}]"
        if tool.path:
            yield from _python(field, tool.path, tool.function)
        if tool.config:
            yield from _exists(f"{field}.config", tool.config)


def _checkpoint(job: RLJob) -> Iterator[Problem]:
    folder = job.spec.trainer.checkpoint.resume_from
    if folder and not os.path.isdir(folder):
        yield Problem("spec.trainer.checkpoint.resumeFrom", f"there is no folder {folder}", _RELATIVE)


def _python(field: str, path: str, name: str, name_field: str = "function") -> Iterator[Problem]:
    problem = python_problem(field, path, name, name_field)
    if problem:
        yield problem


def _exists(field: str, path: str) -> Iterator[Problem]:
    if not os.path.isfile(path):
        yield Problem(field, f"there is no file {path}", _RELATIVE)
