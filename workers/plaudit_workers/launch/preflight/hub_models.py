"""Check that the model hub has a model, before a run starts processes that would only find out minutes later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from http import HTTPStatus

from plaudit_reward.errors import CallTimeoutError
from plaudit_reward.http.client import HttpClient
from plaudit_reward.http.errors import NoResponseError
from plaudit_reward.http.proxy import proxy_for
from plaudit_workers.job.checks.files import is_in_hub_cache
from plaudit_workers.job.loading.paths import is_hub_id
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob

_RESPONSE_WITHIN_S = 5.0
_HUB = "https://huggingface.co"
_LOCAL = "If it is a folder, write its path with ./ or /"


def check_hub_models(job: RLJob) -> list[Problem]:
    """Return a problem for each model that is neither in the hub's local cache nor on the hub.

    Args:
        job: resolved; its files are checked (``check_files``).
    """
    looked_up = [each for each in _models(job) if is_hub_id(each[1]) and not is_in_hub_cache(each[1])]
    found = (asyncio.run(_problem(*each)) for each in looked_up)
    return [problem for problem in found if problem]


def _models(job: RLJob) -> Iterator[tuple[str, str, str]]:
    if job.spec.trains:
        model = job.spec.model
        yield "spec.model.source", model.source, model.revision
        if model.tokenizer:
            yield "spec.model.tokenizer", model.tokenizer, model.tokenizer_revision
    for index, scorer in enumerate(job.spec.reward.scorers):
        if served := scorer.served:
            yield f"spec.reward.scorers[{index}].{scorer.served_field}.source", served.source, served.revision


async def _problem(field: str, source: str, revision: str) -> Problem | None:
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
    return None
