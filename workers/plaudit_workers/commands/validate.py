"""``plaudit validate`` and ``plaudit schema``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from plaudit_job.checks import kubernetes_problems, without_effect
from plaudit_job.load import examine_job, locate, read_job
from plaudit_job.problem import JobError, Problem
from plaudit_job.reference import job_schema
from plaudit_wire.printable import print_text
from plaudit_workers.commands.plan import known_problems
from plaudit_workers.launch.checks import short_model
from plaudit_workers.launch.code_checks import all_problems, ignored, lacking_gpus, lacking_packages, lacking_secrets
from plaudit_workers.process import EXIT_DONE


def validate(arguments: argparse.Namespace) -> int:
    """Report every problem of a job, or that it is valid and which fields ``plaudit run`` ignores."""
    path: Path = arguments.job
    notes: list[Problem] = []
    if arguments.kubernetes:
        job = read_job(path)
        problems = [*kubernetes_problems(job), *known_problems(job)]
    else:
        examination = examine_job(path)
        report = all_problems(examination, renders=True)
        if examination.job is None:
            raise JobError(locate(report.problems, path), path)
        job = examination.job
        problems = [*report.problems, *known_problems(job)]
        away = (*lacking_secrets(job), *lacking_packages(job), *lacking_gpus(job))
        notes = [*report.notes, *short_model(job), *away, *ignored(job), *without_effect(job)]
    if problems:
        raise JobError(locate(problems, path), path)
    print_text(f"{path}: valid ({job.metadata.name})")
    if job.spec.trains and job.spec.rollout.agent.kind != "singleTurn" and not arguments.kubernetes:
        print_text(f"{path}: play rows with its agent before a run: plaudit try {path} --url URL --model NAME")
    for note in locate(notes, path):
        print_text(f"{path}{f':{note.line}' if note.line else ''}: note: {note}")
    return EXIT_DONE


def schema(_: argparse.Namespace) -> int:
    """Print the JSON Schema of a job."""
    print(json.dumps(job_schema(), indent=2))
    return EXIT_DONE
