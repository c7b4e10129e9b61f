"""The policy: one update whatever the packing, states that come back bit for bit."""

from __future__ import annotations

import torch

from plaudit_workers.training.batch import make_batch
from plaudit_workers.training.policy import build_policy

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None], [0.2, 0.4, 0.6, 0.8], [0.5, 0.5, 0.5, 0.5]]


def test_one_update_changes_weights(make_job, make_groups):
    policy = build_policy(make_job({}))
    before = policy.full_state()
    figures = policy.update(make_batch(make_groups(SCORES), "grpo", 1.0))
    after = policy.full_state()
    print(figures)
    assert any(not torch.equal(before[name], after[name]) for name in before)
