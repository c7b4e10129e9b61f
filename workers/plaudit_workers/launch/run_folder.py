"""The folder of a run: ``runs/<run>/`` with everything that the run leaves behind."""

from __future__ import annotations

import secrets
from pathlib import Path

from plaudit_workers.process import RefusedError

PARTS = ("samples", "checkpoints", "weights", "logs")


def new_run(runs: Path, job_name: str, run: str | None) -> Path:
    """Makes the folder of a new run.

    Raises:
        RefusedError: the name is taken, or the folder cannot be written.
    """
    folder = (runs / (run or f"{job_name}-{secrets.token_hex(3)}")).resolve()
    if (folder / "job.yaml").exists():
        raise RefusedError(f"{folder} holds a run already: give another --run, or --resume to go on with it")
    try:
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be written: {error.strerror}. Name another place with --runs-folder"
        ) from error
    return folder


def resumed_run(runs: Path, job_name: str, run: str | None) -> Path:
    """Finds the folder of the run to go on with: ``run``, or the job's newest.

    Raises:
        RefusedError: there is none.
    """
    if run is not None:
        found = [runs / run] if (runs / run / "job.yaml").exists() else []
    else:
        found = [path.parent for path in runs.glob(f"{job_name}-*/job.yaml")]
    if not found:
        raise RefusedError(f"--resume: {runs}/ holds no run {run or f'of job {job_name}'}. Start one without --resume")
    return max(found, key=lambda folder: (folder / "job.yaml").stat().st_mtime).resolve()
