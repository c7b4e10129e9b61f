"""The policy that is trained: updates, log-probabilities, states. Called by the conductor, on rank 0.

``build_policy`` gives rank 0 a ``Policy`` and every other rank a ``Follower``, whose ``follow()`` takes part in
whatever rank 0's policy is asked, until that is closed. The conductor need not know how many ranks there are.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.training.backend.commands import Follower, Leader
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.model import load_model, load_tokenizer
from plaudit_workers.training.model.sharding import join_ranks
from plaudit_workers.training.model.temperature import refuse_cut_sampling
from plaudit_workers.training.model.trained_policy import Probe, TrainedPolicy


class Policy(Protocol):
    """What the conductor may ask. Every call is synchronous and belongs into one thread at a time."""

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Makes one optimizer step on a batch and returns its figures (verl's names where verl has one).

        A batch without sequences changes nothing and returns the batch's own figures.
        """
        ...

    def logprobs(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """Log-probabilities of each response's tokens at the batch's temperature: float32[T], 0 where masked."""
        ...

    def hold_proximal(self, version: PolicyVersion) -> None:
        """Remembers the present weights as the published ones, which ``correction`` clips around; see ``publish``."""
        ...

    def full_state(self) -> dict[str, Tensor]:
        """The weights as they are published: whole, on the CPU, in ``model.dtype``, tied ones once."""
        ...

    def probe(self) -> Probe:
        """A fixed sequence and its next-token log-probabilities, by which a rollout checks what it loaded."""
        ...

    def files(self) -> dict[str, bytes]:
        """What lies beside published weights: configuration and tokenizer, by file name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: weights in float32, optimizer, schedule, random state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, whatever the number of ranks was."""
        ...

    def close(self) -> None:
        """Lets the other ranks go."""
        ...


def build_policy(job: RLJob, rank: int = 0, world_size: int = 1) -> Policy | Follower:
    """Loads the model and takes this rank's part of it.

    Args:
        job: a resolved job.
        rank: this process's number.
        world_size: ``trainer.ranks``.

    Returns:
        Rank 0: the policy. Other ranks: what follows it (``Follower.follow`` blocks until rank 0 closes its policy).

    Raises:
        RefusedError: model or tokenizer cannot be loaded, or what the job wants cannot be trained.
    """
    refuse_cut_sampling(job.spec.rollout.sampling)
    torch.manual_seed(job.spec.seed)
    model, tokenizer = load_model(job.spec.model), load_tokenizer(job.spec.model)
    reference = load_model(job.spec.model) if job.spec.algorithm.loss.kl_coefficient else None
    ranks = join_ranks(rank, world_size)
    policy = TrainedPolicy(job.spec, ranks, model, tokenizer, reference)
    if world_size == 1:
        return policy
    return Leader(policy, ranks.commands) if rank == 0 else Follower(policy, ranks.commands)
