"""The passes that ``plaudit plan`` counts are those that the trainer makes."""

from __future__ import annotations

import pytest
import torch

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.commands.plan import update_passes
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model

PENALTY = {"klIn": "reward", "klCoefficient": 0.1}


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"epochs": 4},
        {"miniBatchesPerStep": 2},
        {"epochs": 3, "miniBatchesPerStep": 2},
        {"epochs": 3, "loss": {"correction": "none"}},
        {"epochs": 2, "loss": {"klCoefficient": 0.1}},
        {"loss": PENALTY},
        {"epochs": 3, "miniBatchesPerStep": 2, "loss": PENALTY},
        {"epochs": 2, "loss": PENALTY | {"correction": "none"}},
    ],
    ids=str,
)
def test_the_plan_counts_the_passes_of_a_step(make_job, make_groups, tmp_path, algorithm):
    job = make_job({"algorithm": algorithm, "trainer": {"activationCheckpointing": "none"}})
    backend = TorchBackend(job, build_model(job), tmp_path)
    backend.publish(PolicyVersion(1, 0))
    computed = {True: 0, False: 0}

    def count(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            computed[torch.is_grad_enabled()] += arguments[0].numel()

    num_parts = job.spec.algorithm.mini_batches_per_step
    parts = [make_groups([[0.0, 1.0, 0.5, 0.25]], seed=seed) for seed in range(num_parts)]
    tokens = sum(each.num_tokens for part in parts for each in make_batch(part, "grpo", 1.0).sequences)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        for part in parts:
            backend.update(part)
    finally:
        hook.remove()
        backend.close()
    # A backward pass costs two forward passes. Mini-batches differ a little in their tokens.
    assert update_passes(job.spec) == pytest.approx((3 * computed[True] + computed[False]) / tokens, rel=0.05)
