"""Read a job file, report every problem with its line, and resolve paths against the file's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit_workers.job.loading.document import Document
from plaudit_workers.job.loading.dump import dump_job
from plaudit_workers.job.loading.paths import resolve_paths
from plaudit_workers.job.loading.validation import Examination, examine, validate
from plaudit_workers.job.problem import JobError, Problem
from plaudit_workers.job.spec.reward_service import document_model, job_of
from plaudit_workers.job.spec.rljob import RLJob

__all__ = ["JobError", "Problem", "dump_job", "examine_job", "load_job", "locate", "parse_job", "read_job"]


def load_job(path: Path | str) -> RLJob:
    """Read the job of a file and make every path absolute; a RewardService is read as a job that only scores.

    Raises:
        JobError: with every problem of the file; the files that it names are not opened.
    """
    path = Path(path)
    document = Document(_text(path), path)
    _job(document, path)
    resolved = resolve_paths(document.data, path.resolve().parent)
    return job_of(document_model(resolved).model_validate(resolved, by_alias=True, by_name=False))


def examine_job(path: Path | str) -> Examination:
    """Read the job of a file, paths absolute, with every problem that the file alone shows.

    Raises:
        JobError: the file cannot be read, or is not a YAML mapping.
    """
    path = Path(path)
    document = Document(_text(path), path)
    return examine(resolve_paths(document.data, path.resolve().parent))


def read_job(path: Path | str) -> RLJob:
    """Read the job of a file with its paths as written, for Kubernetes; raise as ``load_job`` does."""
    return _job(Document(_text(Path(path)), path), path)


def parse_job(written: Mapping[str, Any]) -> RLJob:
    """Validate plain data with the names of the YAML form; raise ``JobError`` with every problem, without lines."""
    job, problems = validate(written)
    if job is None:
        raise JobError(problems)
    return job


def locate(problems: Sequence[Problem], path: Path | str) -> list[Problem]:
    """Add the line of each problem's field in the job file."""
    return _located(problems, Document(_text(Path(path)), path))


def _job(document: Document, path: Path | str) -> RLJob:
    job, problems = validate(document.data)
    if job is None:
        raise JobError(_located(problems, document), path)
    return job


def _located(problems: Sequence[Problem], document: Document) -> list[Problem]:
    return [replace(problem, line=document.line(problem.location)) for problem in problems]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise JobError([Problem("", "no such file", "Give the path of a job file")], path) from error
    except UnicodeDecodeError as error:
        raise JobError([Problem("", "not UTF-8 text", "Give the path of a YAML file")], path) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobError([Problem("", f"cannot read it: {reason}", "Give a file that you can read")], path) from error
