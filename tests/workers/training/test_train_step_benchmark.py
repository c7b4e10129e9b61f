"""The benchmark of an update computes the same loss and gradients on both sides."""

from __future__ import annotations

import torch
from train_step import Case, ours, plain


def test_both_sides_of_the_benchmark_compute_the_same_update():
    found = []
    for side in (ours, plain):
        model, loss = side(Case("tiny", length=24, sequences=3, device=torch.device("cpu")))
        value = loss()
        value.backward()
        found.append((value.item(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert abs(found[0][0] - found[1][0]) < 1e-5
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)
