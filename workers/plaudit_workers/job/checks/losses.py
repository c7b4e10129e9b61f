"""Check the loss of a job with ``loss.kind: python``: import its file and compute it once, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec

import msgspec

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.algorithm import LossSpec
from plaudit_workers.job.spec.rljob import RLJob

_FIELD = "spec.algorithm.loss"
_TRIAL = "plaudit_workers.training.model.losses.trial"
"""Module of the trainer, run by name: it needs torch, which a job's checks do not import."""
_TRIED_WITHIN_S = 120.0


def check_loss(job: RLJob, broken: Collection[str] = ()) -> Iterator[Problem]:
    """Find what would keep the user's loss from training; skip it if its field is ``broken`` (``check_files``).

    Such a loss raises, or returns no value with a gradient for each token.
    """
    loss = job.spec.algorithm.loss if job.spec.trains else None
    if loss is None or loss.kind != "python" or any(field.startswith(_FIELD) for field in broken):
        return
    if find_spec("torch") is not None and (problem := _tried(loss)):
        yield Problem(_FIELD, problem.removeprefix(f"{_FIELD}: ").rstrip("."), "See docs/training.md, An update")


def _tried(loss: LossSpec) -> str | None:
    """Return the problem of a loss; None where there is none, and where its import takes minutes."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _TRIAL],
            input=loss.model_dump_json(by_alias=True).encode(),
            capture_output=True,
            timeout=_TRIED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    try:
        return msgspec.json.decode(done.stdout, type=str | None)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        return (
            f"{loss.function} in {loss.path} ended its process (exit status {done.returncode}; {last}): neither the "
            "file nor the function may do that"
        )
