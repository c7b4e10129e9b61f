"""Check a job and write its run's folder, before ``plaudit run`` starts a process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.checks.preflight import all_problems, preflight
from plaudit_workers.job.loading.dump import dump_job
from plaudit_workers.job.loading.load import examine_job, load_job, locate
from plaudit_workers.job.problem import JobError
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.launch.preflight import run_folder
from plaudit_workers.launch.preflight.hub_models import check_hub_models
from plaudit_workers.launch.preflight.job_changes import job_changes
from plaudit_workers.launch.terminal.waiting import reported_wait


def prepare(arguments: argparse.Namespace, console: Console) -> tuple[RLJob, Path] | None:
    """Load and check the job and make (or find) its run's folder with the resolved ``job.yaml`` in it.

    Returns:
        None when there is nothing to do: the run to resume has finished.

    Raises:
        RefusedError: anything that would make the run fail later and can be found out now.
    """
    job = _with_steps(_loaded(arguments), arguments.steps)
    runs = Path(arguments.runs_folder)
    resumed = run_folder.resumed_run(runs, job.metadata.name, arguments.run) if arguments.resume else None
    if resumed and _is_finished(job, resumed, console):
        return None
    _check(job, arguments, console)
    if resumed:
        _report_changes(job, resumed, console, accepted=arguments.accept_changes)
    folder = resumed or run_folder.new_run(runs, job.metadata.name, arguments.run)
    (folder / "job.yaml").write_text(dump_job(job))
    return job, folder


def _loaded(arguments: argparse.Namespace) -> RLJob:
    """Load the job; if its file is wrong, report also what the files that it names show."""
    examination = examine_job(arguments.job)
    if examination.job is None or examination.problems:
        problems = all_problems(examination, imports=not arguments.address)
        raise JobError(locate(problems, arguments.job), arguments.job)
    return examination.job


def _check(job: RLJob, arguments: argparse.Namespace, console: Console) -> None:
    imports = not arguments.address  # the nodes of a cluster may have other packages; its workers check
    files = sorted({scorer.python.path for scorer in job.spec.reward.scorers if scorer.python})
    with reported_wait(console, f"the import of {', '.join(files)}" if files and imports else "the job's files"):
        problems = preflight(job, imports=imports)
    if not problems:
        with reported_wait(console, "the model hub"):
            problems = check_hub_models(job)
    if problems:
        raise JobError(locate(problems, arguments.job), arguments.job)


def _with_steps(job: RLJob, steps: int | None) -> RLJob:
    """Return the job with ``--steps`` in place of ``algorithm.steps``."""
    if steps is None:
        return job
    if not job.spec.trains:
        raise RefusedError(f"--steps {steps}: a job without rollout and trainer has no steps. Leave it out")
    algorithm = job.spec.algorithm.model_copy(update={"steps": steps})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"algorithm": algorithm})})


def _is_finished(job: RLJob, folder: Path, console: Console) -> bool:
    """Report where a resumed run stands; return True when it has trained all its steps."""
    if not job.spec.trains:
        return False
    step, steps = _checkpointed_step(folder / "checkpoints"), job.spec.algorithm.steps
    if step >= steps:
        console.out(
            f"run {folder.name} has finished its {steps} steps. To train further, set a larger --steps. "
            f"Its folder: {folder}",
            highlight=False,
        )
        return True
    console.out(
        f"run {folder.name}: continuing after step {step} of {steps}"
        if step
        else f"run {folder.name} has no checkpoint yet: starting at step 1 of {steps}",
        highlight=False,
    )
    return False


def _checkpointed_step(folder: Path) -> int:
    """Return the step from which the trainer will continue: that of the newest incarnation's newest checkpoint."""
    found = [(0, 0)]
    for state in folder.glob("step-*/state.json"):
        try:
            extra = json.loads(state.read_text())["extra"]
            found.append((int(extra["incarnation"]), int(extra["step"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the trainer reports a checkpoint that it cannot read
    return max(found)[1]


def _report_changes(job: RLJob, folder: Path, console: Console, *, accepted: bool) -> None:
    """Print how the job differs from the run's; refuse what the run cannot take or the user has not accepted."""
    before = folder / "job.yaml"
    changes = job_changes(load_job(before), job)
    for change in changes:
        if change.refused:
            raise RefusedError(
                f"--resume: {change} differs from the run in {folder}. Start a new run, or set the field back to what "
                f"{before} has"
            )
    for change in changes:
        console.out(f"changed: {change}", highlight=False)
    meant = [change.field for change in changes if change.changes_meaning]
    if meant and not accepted:
        raise RefusedError(
            f"--resume: {', '.join(meant)} changed since the run in {folder}, so its next steps would be trained "
            "differently. Add --accept-changes to continue with them, or set them back"
        )
