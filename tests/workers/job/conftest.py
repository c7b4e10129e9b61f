"""A small job as plain data, and the same with some fields changed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit_job.load import Document, parse_job
from plaudit_job.problem import JobError, Problem

SMALL_JOB = """
apiVersion: plaudit.dev/v1alpha1
kind: RLJob
metadata: {name: digits}
spec:
  model: {source: ./model}
  data:
    train: {path: data/train.parquet}
  algorithm: {steps: 100}
  rollout: {}
  reward:
    scorers:
      - {name: digits, kind: python, python: {path: reward.py}}
  trainer: {}
"""


@pytest.fixture
def small_job() -> str:
    """The smallest job that trains, as YAML text."""
    return SMALL_JOB


@pytest.fixture
def changed() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The small job as plain data, with fields of ``spec`` set by their dotted names (None takes one out)."""

    def change(fields: dict[str, Any]) -> dict[str, Any]:
        job: dict[str, Any] = yaml.safe_load(SMALL_JOB)
        for name, value in fields.items():
            *parents, last = name.split(".")
            section = job["spec"]
            for parent in parents:
                section = section[int(parent)] if isinstance(section, list) else section.setdefault(parent, {})
            if value is None:
                del section[last]
            else:
                section[last] = copy.deepcopy(value)
        return job

    return change


@pytest.fixture
def problems_of() -> Callable[[str | dict[str, Any]], list[Problem]]:
    """All problems of a job, given as YAML text or plain data; none for a valid one."""

    def problems(job: str | dict[str, Any]) -> list[Problem]:
        try:
            parse_job(job if isinstance(job, dict) else Document(job).data)
        except JobError as error:
            return error.problems
        return []

    return problems


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Writes text or plain data as a job file."""

    def write(job: str | dict[str, Any], name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
        return path

    return write
