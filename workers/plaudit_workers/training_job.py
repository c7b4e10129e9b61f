"""Load the job of a rollout worker or a trainer. Called when these processes start."""

from __future__ import annotations

from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.job.spec.rljob import RLJob


def load_training_job(path: Path) -> RLJob:
    """Load a job that generates and trains.

    Raises:
        RefusedError: the job is invalid, or it only scores.
    """
    job = load_job(path)
    if not job.spec.trains:
        raise RefusedError(
            f"{path}: spec.rollout and spec.trainer are missing, so this job only scores samples and has neither "
            "rollout workers nor a trainer. Start reward workers only, or add both sections"
        )
    return job
