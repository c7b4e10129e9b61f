"""What ``plaudit run`` checks and writes before it starts a process: the job, its files, the run's folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from plaudit_workers.job.checks.preflight import preflight
from plaudit_workers.job.loading.dump import dump_job
from plaudit_workers.job.loading.load import load_job, locate
from plaudit_workers.job.problem import JobError
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.launch import run_folder
from plaudit_workers.process import RefusedError

_FIXED_ACROSS_A_RESUME = ("seed", "model", "data")


def prepare(arguments: argparse.Namespace) -> tuple[RLJob, Path]:
    """Loads and checks the job and makes (or finds) its run's folder with the resolved ``job.yaml`` in it.

    Raises:
        RefusedError: anything that would make the run fail later and can be known now.
    """
    job = _with_steps(load_job(arguments.job), arguments.steps)
    problems = preflight(job, imports=not arguments.address)  # the nodes of a cluster may have other packages
    if problems:
        raise JobError(locate(problems, arguments.job), arguments.job)
    runs = Path(arguments.runs_folder)
    if arguments.resume:
        folder = run_folder.resumed_run(runs, job.metadata.name, arguments.run)
        _refuse_another_job(job, folder)
    else:
        folder = run_folder.new_run(runs, job.metadata.name, arguments.run)
    (folder / "job.yaml").write_text(dump_job(job))
    return job, folder


def _with_steps(job: RLJob, steps: int | None) -> RLJob:
    """The job with ``--steps`` in place of ``algorithm.steps``."""
    if steps is None:
        return job
    if not job.spec.trains:
        raise RefusedError(f"--steps {steps}: a job without rollout and trainer has no steps. Leave it out")
    algorithm = job.spec.algorithm.model_copy(update={"steps": steps})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"algorithm": algorithm})})


def _refuse_another_job(job: RLJob, folder: Path) -> None:
    """A checkpoint continues one model on one order of prompts; anything else would be another run."""
    before = load_job(folder / "job.yaml")
    for field in _FIXED_ACROSS_A_RESUME:
        if getattr(before.spec, field) != getattr(job.spec, field):
            raise RefusedError(
                f"--resume: spec.{field} differs from the run in {folder}. Start a new run, or set it back to what "
                f"{folder / 'job.yaml'} says"
            )
