"""A small job as plain data, the same with some fields changed, and what is wrong with a job."""

from __future__ import annotations

import copy
from typing import Any

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
"""The smallest job that trains, as YAML text."""


def changed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the small job as plain data, with fields of ``spec`` set by their dotted names (None takes one out)."""
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


def problems_of(job: str | dict[str, Any]) -> list[Problem]:
    """Return all problems of a job, given as YAML text or plain data; none for a valid one."""
    try:
        parse_job(job if isinstance(job, dict) else Document(job).data)
    except JobError as error:
        return error.problems
    return []
