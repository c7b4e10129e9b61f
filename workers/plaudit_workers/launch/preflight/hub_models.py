"""Check that the model hub has a model, and that it can be served, before a run starts processes and downloads."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError
from plaudit_reward.http.proxy import proxy_for
from plaudit_wire.errors import CallTimeoutError
from plaudit_workers.job.checks.files import hub_cache, is_in_hub_cache
from plaudit_workers.job.checks.reward_classes import architecture_of, class_problem
from plaudit_workers.job.loading.paths import is_hub_id
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rewards.scorers import RewardModelSpec
from plaudit_workers.job.spec.rljob import RLJob

_RESPONSE_WITHIN_S = 5.0
_HUB = "https://huggingface.co"
_LOCAL = "If it is a folder, write its path with ./ or /"


def check_hub_models(job: RLJob) -> list[Problem]:
    """Return a problem for each model that is neither in the hub's local cache nor on the hub, or served wrongly."""
    on_hub = [each for each in _models(job) if is_hub_id(each.source)]
    found = (_cached_problem(each) if is_in_hub_cache(each.source) else asyncio.run(_problem(each)) for each in on_hub)
    return [problem for problem in found if problem]


class _Model(NamedTuple):
    field: str
    source: str
    revision: str
    reward: RewardModelSpec | None = None
    """The section of a reward model."""


def _models(job: RLJob) -> Iterator[_Model]:
    if job.spec.trains:
        model = job.spec.model
        yield _Model("spec.model.source", model.source, model.revision)
        if model.tokenizer:
            yield _Model("spec.model.tokenizer", model.tokenizer, model.tokenizer_revision)
    for index, scorer in enumerate(job.spec.reward.scorers):
        if served := scorer.served:
            field = f"spec.reward.scorers[{index}].{scorer.served_field}.source"
            yield _Model(field, served.source, served.revision, scorer.model)


def _cached_problem(model: _Model) -> Problem | None:
    """Return the problem of the class of a model in the local cache."""
    folder = hub_cache(model.source)
    try:
        commit = (folder / "refs" / (model.revision or "main")).read_text().strip()
        config = json.loads((folder / "snapshots" / commit / "config.json").read_text())
    except (OSError, ValueError):
        return None  # another revision, or a part of it: the server downloads the rest
    return _class_problem(model, config)


def _class_problem(model: _Model, config: Any) -> Problem | None:
    if model.reward is None or not isinstance(config, dict):
        return None
    return class_problem(model.field.removesuffix(".source"), model.reward, architecture_of(config))


async def _problem(model: _Model) -> Problem | None:
    field, source, revision, _ = model
    hub = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    url = f"{hub}/api/models/{source}/revision/{revision or 'main'}"
    token = os.environ.get("HF_TOKEN", "")
    client = HttpClient(max_connections=1, bearer_token=token, key_field="HF_TOKEN", proxy=proxy_for(url))
    try:
        response = await client.get(url, _RESPONSE_WITHIN_S)
    except (NoResponseError, CallTimeoutError) as error:
        return Problem(
            field,
            f"{source!r} is no folder beside the job file, and the model hub does not respond: {error}",
            f"{_LOCAL}. Otherwise check the network, or set HF_ENDPOINT",
        )
    finally:
        await client.close()
    if response.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}:
        return Problem(
            field,
            f"{source!r} is no folder beside the job file, and {hub} has no such model, or none that "
            f"{'the token in HF_TOKEN' if token else 'a caller without a token'} may read "
            f"(revision {revision or 'main'}, HTTP {response.status})",
            f"{_LOCAL}. Otherwise correct the name, or set HF_TOKEN",
        )
    return _class_problem(model, _config(response.body))


def _config(described: bytes) -> Any:
    """Return the part of the hub's description of a model that it takes from config.json."""
    try:
        description = json.loads(described)
    except ValueError:
        return None
    return description.get("config") if isinstance(description, dict) else None
