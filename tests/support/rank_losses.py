"""One rank of ``test_rank_losses`` and ``test_sequence_parallel``: called with a folder.

The folder holds the cases and gets ``results-<number of ranks>.pickle``.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.policy_model import PolicyModel, build_model
from whole_state import gather

Outcome = tuple[dict[str, float], dict[str, torch.Tensor], list[NDArray[np.float32]]]


def keep_gradients(policy: PolicyModel, found: list[dict[str, torch.Tensor]]) -> None:
    """Collect each update's gradients, whole, before the optimizer clips and applies them."""
    step = policy._optimizer.step

    def collected() -> dict[str, float]:
        found.append(gather({name: each.grad for name, each in policy._parameters.items()}))
        return step()

    policy._optimizer.step = collected  # type: ignore[method-assign]


def updates(policy: PolicyModel, batches: list[TrainingBatch]) -> list[Outcome]:
    """Return figures and gradients of each batch's update, the weights published before the first.

    With a divergence in the loss, also its estimates before each update.
    """
    gradients: list[dict[str, torch.Tensor]] = []
    keep_gradients(policy, gradients)
    policy.hold_proximal(PolicyVersion(1, 1))
    figures, divergences = [], []
    for batch in batches:
        divergences.append(policy.divergences(batch) if policy._loss.kl_coefficient else [])
        figures.append(policy.update(batch))
    return list(zip(figures, gradients, divergences, strict=True))


def run_cases(folder: Path) -> None:
    """Be one rank, whose number the environment has, of every case."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cases = pickle.loads((folder / "cases.pickle").read_bytes())
    results = {}
    for name, (job, batches, port) in cases.items():
        os.environ["MASTER_PORT"] = str(port)
        policy = build_model(RLJob.model_validate_json(job), rank, world_size)
        if rank:
            keep_gradients(policy, [])  # gathering takes every rank
            policy.follow()
        else:
            results[name] = updates(policy, batches)
            policy.close()
    if rank == 0:
        (folder / f"results-{world_size}.pickle").write_bytes(pickle.dumps(results))
