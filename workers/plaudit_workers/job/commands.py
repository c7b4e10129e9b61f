"""``plaudit validate`` and ``plaudit schema``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from plaudit_workers.job.checks.files import check_files
from plaudit_workers.job.checks.kubernetes import kubernetes_problems
from plaudit_workers.job.checks.support import ignored, unsupported
from plaudit_workers.job.loading.load import load_job, locate, read_job
from plaudit_workers.job.loading.schema import job_schema
from plaudit_workers.job.problem import JobError, Problem
from plaudit_workers.process import EXIT_DONE


def validate(arguments: argparse.Namespace) -> int:
    """Tells every problem of a job, or that there is none, and what ``plaudit run`` would say of it.

    Raises:
        JobError: with every problem.
    """
    path: Path = arguments.job
    job = load_job(path)
    problems = kubernetes_problems(read_job(path)) if arguments.kubernetes else check_files(job)
    if problems:
        raise JobError(locate(problems, path), path)
    print(f"{path}: valid ({job.metadata.name})")
    if not arguments.kubernetes:
        _print_notes(path, "refused", unsupported(job))
        _print_notes(path, "note", ignored(job))
    return EXIT_DONE


def _print_notes(path: Path, word: str, problems: list[Problem]) -> None:
    for problem in locate(problems, path):
        line = f":{problem.line}" if problem.line else ""
        print(f"{path}{line}: {word}: {problem}")


def schema(_: argparse.Namespace) -> int:
    """Prints the JSON Schema of a job."""
    print(json.dumps(job_schema(), indent=2))
    return EXIT_DONE
