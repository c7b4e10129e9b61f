"""Make and find the folders of runs: ``runs/<run>/`` holds everything that a run leaves behind."""

from __future__ import annotations

import secrets
from pathlib import Path

from plaudit_wire.errors import RefusedError

PARTS = ("samples", "checkpoints", "weights", "logs")


def new_run(runs: Path, job_name: str, run: str | None) -> Path:
    """Make the folder of a new run.

    Raises:
        RefusedError: the name is taken, or the folder cannot be written.
    """
    folder = (runs / (run or f"{job_name}-{secrets.token_hex(3)}")).resolve()
    if (folder / "job.yaml").exists():
        raise RefusedError(f"{folder} holds a run already: choose another --run, or add --resume to continue it")
    try:
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be written: {error.strerror}. Choose another folder with --runs-folder"
        ) from error
    return folder


def resumed_run(runs: Path, job_name: str, run: str | None) -> Path:
    """Find the folder of the run to continue: ``run``, or the job's newest that closed a step, or else its newest."""
    if run is not None:
        found = [runs / run] if (runs / run / "job.yaml").exists() else []
    else:
        found = [path.parent for path in runs.glob(f"{job_name}-*/job.yaml")]
    if not found:
        raise RefusedError(
            f"--resume: {runs}/ holds no run {run or f'of job {job_name}'}. Leave --resume out to start one, or name "
            "the folder of the runs with --runs-folder"
        )
    return max(found, key=_last_step_closed).resolve()


def _last_step_closed(folder: Path) -> tuple[bool, float]:
    """Return a sort key: whether a run closed a step, and when it last did (else when it was started)."""
    steps = folder / "steps.jsonl"
    closed = steps.exists() and steps.stat().st_size > 0
    return closed, (steps if closed else folder / "job.yaml").stat().st_mtime
