"""The version of a job's scoring: a short digest of everything that decides a score. Every result carries it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from plaudit_workers.job.loading.dump import job_data, section_data
from plaudit_workers.job.spec.rewards.scorers import ScorerSpec
from plaudit_workers.job.spec.rljob import RLJob

_DIGITS = 10
_SIZES = ("workers", "gateway", "networkPolicy")
"""Sections of ``spec.reward`` that decide where samples are scored, and not how."""


def scoring_version(job: RLJob) -> str:
    """Return the version of a resolved job: the same for equal scorers, and for equal contents of the files they name.

    The contents of models' folders, of modules that a file imports, and of images are not part of it; an operator
    therefore gives its workers a version of its own (``PLAUDIT_SCORING_VERSION``).
    """
    reward = job_data(job)["spec"]["reward"]
    parts = {name: section for name, section in reward.items() if name not in _SIZES}
    return hashlib.sha256(msgspec.json.encode(_with_contents(parts), order="sorted")).hexdigest()[:_DIGITS]


def scorer_version(scorer: ScorerSpec) -> str:
    """Return the version of one scorer of a resolved job, without what does not change its own value."""
    written = section_data(scorer)
    parts = {name: part for name, part in written.items() if name not in _NOT_OF_ITS_VALUE}
    return hashlib.sha256(msgspec.json.encode(_with_contents(parts), order="sorted")).hexdigest()[:_DIGITS]


_NOT_OF_ITS_VALUE = ("weight", "when", "limits", "cache", "retries", "timeoutSeconds", "onFailure")


def _with_contents(part: Any) -> Any:
    """Replace every ``path`` that is a readable file by a digest of its content."""
    if isinstance(part, Mapping):
        return {name: _content(value) if name == "path" else _with_contents(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_with_contents(item) for item in part]
    return part


def _content(path: Any) -> Any:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return path
