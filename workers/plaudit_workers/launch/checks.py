"""Check what a resolved job names, before anything starts: models, code, templates, servers elsewhere.

``data_checks`` reads the data.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plaudit_job.checks import python_problems, returns_nothing
from plaudit_job.fields import DOWNLOAD_FILE, is_address, is_hub_id
from plaudit_job.problem import Problem, did_you_mean, nearest
from plaudit_job.spec.rewards import RewardModelSpec, ServedModelSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.tasks import TaskError, read_tasks
from plaudit_reward.http import proxy_for
from plaudit_wire.errors import ConfigurationError

_REWARD_CLASS = re.compile(r"(ForRewardModeling|(For(Process)?)?RewardModel)$")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_GIT_LFS = b"version https://git-lfs"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_RELATIVE = "Correct the path: it is relative to the job file"
_ACCEPTED_WITHIN_S = 5.0
_ASKED_AT_ONCE = 16


def check_files(job: RLJob) -> list[Problem]:
    """Find every problem of the files that the job names but data: models, Python files, templates, checkpoints."""
    training = (_model, _tasks, _loss, _rollout, _checkpoint) if job.spec.trains else ()
    return [problem for check in (*training, _scorers) for problem in check(job)]


def _model(job: RLJob) -> Iterator[Problem]:
    model = job.spec.model
    data = [job.spec.data.train.path, *(entry.path for entry in job.spec.data.train.mixture)]
    yield from _source("spec.model.source", model.source, ("config.json",), [path for path in data if path])
    folder = Path(model.source)
    if (folder / "config.json").is_file() and any(e.engine.kind == "vllm" for e in job.spec.rollout.by_group.values()):
        yield from _weights(folder)
    if model.tokenizer:
        yield from _source("spec.model.tokenizer", model.tokenizer, ())
    tokenizer = model.tokenizer or model.source
    if os.path.isdir(tokenizer) and not any(os.path.exists(os.path.join(tokenizer, name)) for name in _TOKENIZER_FILES):
        yield Problem(
            "spec.model.tokenizer", f"{tokenizer} has no tokenizer", "Name a folder with one, or save it there"
        )
    if model.chat_template:
        yield from _file_exists("spec.model.chatTemplate", model.chat_template)


def _source(field: str, source: str, needed: tuple[str, ...], beside: Sequence[str] = ()) -> Iterator[Problem]:
    """Yield what a folder lacks, and a hub id that cannot be one.

    Args:
        beside: paths of the job: a folder near them may be what a mistyped name means.
    """
    if is_hub_id(source):
        yield from _hub(field, source, beside)
        return
    folder = Path(source)
    if not os.path.isdir(folder):
        if folder.is_file():
            yield Problem(field, f"{source} is a file", f"Name the folder that it is in, {folder.parent}")
            return
        meant = [str(folder.parent / near) for near in _near_folders(folder.name, [folder.parent])]
        remedy = did_you_mean(meant) or "Create or download the model first."
        yield Problem(field, f"there is no folder {source}", f"{remedy} {_RELATIVE}")
        return
    for name in needed:
        if not os.path.isfile(folder / name):
            yield Problem(field, f"{source} has no {name}", "Name a folder written by save_pretrained")


def _weights(folder: Path) -> Iterator[Problem]:
    """Yield that a folder with a configuration has no weights, or their places in Git LFS."""
    files = [file for pattern in _WEIGHT_FILES for file in sorted(folder.glob(pattern))]
    field = "spec.model.source"
    if not files:
        yield Problem(
            field,
            f"{folder} has config.json, but no weights ({' or '.join(_WEIGHT_FILES)})",
            "Save the model there with save_pretrained, or download all of its files",
        )
    for file in files[:1]:
        with suppress(OSError), file.open("rb") as content:
            if content.read(len(_GIT_LFS)) == _GIT_LFS:
                yield Problem(field, f"{file} is a pointer of Git LFS, not weights", f"Run git lfs pull in {folder}")


def _near_folders(name: str, beside: Iterable[Path]) -> list[str]:
    """Return the name of the folder in these that a mistyped one is similar to."""
    names = {each.name for folder in beside if folder.is_dir() for each in folder.iterdir() if each.is_dir()}
    return nearest(name, names, likeness=0.75)


def _hub(field: str, source: str, beside: Sequence[str]) -> Iterator[Problem]:
    around = {folder for path in beside for folder in list(Path(path).parents)[:2]}
    if page := _HUB_PAGE.match(source):
        yield Problem(field, f"{source!r} is the address of a page", f"Write the hub id {page[1]}")
    elif is_address(source):
        yield Problem(field, f"{source!r} is an address", "Download the model, and name its folder")
    elif not _HUB_ID.fullmatch(source):
        yield Problem(field, f"{source!r} is neither a folder nor a hub id", "Write a folder with ./ or /")
    elif "/" not in source and not hub_cache(source).is_dir() and (near := _near_folders(source, around)):
        yield Problem(field, f"there is no folder {source}", did_you_mean([f"./{near[0]}"], _RELATIVE))
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


def _tasks(job: RLJob) -> Iterator[Problem]:
    """Report the first task of each folder that machines of this job cannot run."""
    if not job.spec.uses_sandboxes or job.spec.has_broker:  # the broker's machines are not of this host
        return
    from plaudit_reward.machines import task_problem  # most jobs have no machines
    from plaudit_reward.providers import provider_of

    for name, section in job.spec.data.sections.items():
        if section.tasks:
            with suppress(TaskError):  # which the rows report
                provider = provider_of(job.spec.sandboxes, Path())
                problems = (task_problem(provider, task) for task in read_tasks(Path(section.tasks)))
                if problem := next(filter(None, problems), ""):
                    yield Problem(f"spec.data.{name}.tasks", problem, "plaudit tasks checks all of them")


def _scorers(job: RLJob) -> Iterator[Problem]:
    for field, scorer in job.spec.reward.by_field.items():
        if scorer.python:
            yield from _function(f"{field}.python", scorer.python.path, scorer.python.function)
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


def _function(field: str, path: str, name: str) -> Iterator[Problem]:
    problems = list(python_problems(field, path, name))
    yield from problems
    with suppress(OSError):
        if not problems and returns_nothing(Path(path).read_bytes(), name):
            told = f"{name} in {path} returns no value, so that no sample gets a score"
            yield Problem(f"{field}.function", told, "Return a number. See docs/rewards/python.md")


def _template(field: str, path: str, *, group: bool) -> Iterator[Problem]:
    from plaudit_reward.endpoint.judge import PromptTemplate  # needs Jinja; most jobs have no judge

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
    except (OSError, ValueError):
        return {}  # what loads the folder reports the error
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
    elif folder:
        extra, steps = _read_json(folder, "state.json").get("extra"), job.spec.algorithm.steps
        done = extra.get("step") if isinstance(extra, dict) else None
        if isinstance(done, int) and done >= steps:
            yield Problem(
                "spec.algorithm.steps",
                f"{steps:,} leaves nothing to train: the checkpoint of checkpoint.resumeFrom is of step {done:,}",
                f"Give more than {done:,}",
                also=("spec.trainer.checkpoint.resumeFrom",),
            )


def short_model(job: RLJob) -> Iterator[Problem]:
    """Yield that prompts and responses can be longer than the policy's positions: engines end samples there."""
    source, data, sampling = job.spec.model.source, job.spec.data, job.spec.rollout.sampling
    if not (job.spec.trains and os.path.isfile(os.path.join(source, "config.json"))):
        return
    config = _read_json(source, "config.json")
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    limit, needed = config.get("max_position_embeddings"), data.train.max_prompt_length + sampling.max_tokens
    if rope.get("rope_type", rope.get("type", "default")) == "default" and isinstance(limit, int) and limit < needed:
        yield Problem(
            "spec.rollout.engine.maxModelLength",
            f"the model has {limit} positions, fewer than maxPromptLength {data.train.max_prompt_length} + maxTokens "
            f"{sampling.max_tokens} = {needed}: longer prompts are refused, longer responses cut there",
            "Lower maxPromptLength or maxTokens, or take a model with more",
        )


def unreachable(job: RLJob) -> list[Problem]:
    """Return the servers of agents and scorers that accept no connection from this machine; another may reach them."""
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
        return [problem for problem in threads.map(_unreachable, _servers(job)) if problem]


def _servers(job: RLJob) -> Iterator[tuple[str, str]]:
    """Yield the field and the URL of each server that the job does not start itself."""
    if job.spec.trains:
        agent = job.spec.rollout.agent
        yield "spec.rollout.agent.url", agent.url
        for index, tool in enumerate(agent.tools):
            yield f"spec.rollout.agent.tools[{index}].mcp.url", tool.mcp.url if tool.mcp else ""
    for field, scorer in job.spec.reward.by_field.items():
        name = "judge.baseUrl" if scorer.judge else "http.url" if scorer.http else "service.url"
        yield f"{field}.{name}", scorer.url


def _unreachable(server: tuple[str, str]) -> Problem | None:
    field, url = server
    address = urlsplit(url)
    if not address.hostname or proxy_for(url):
        return None
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), _ACCEPTED_WITHIN_S).close()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        complaint = f"{url} accepts no connection from this machine ({reason})"
        return Problem(field, complaint, "Start the server before the run, or correct the URL")
    return None


def _file_exists(field: str, path: str) -> Iterator[Problem]:
    if not os.path.isfile(path):
        yield Problem(field, f"there is no file {path}", DOWNLOAD_FILE if is_address(path) else _RELATIVE)


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
