"""Our losses are TRL's on the same tensors: value and gradient, from the table that make_table.py wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plaudit_job.spec.algorithm import LossSpec
from plaudit_workers.training.model.losses import TokenInputs, policy_loss, token_weights

TABLE = json.loads(Path(__file__).with_name("table.json").read_text())


def name(row):
    weighted = "-weighted" * row["kl_importance_weight"]
    return f"{row['kind']}-{row['aggregation']}-{row['correction']}-kl{row['kl_coefficient']}{weighted}"


@pytest.mark.parametrize("row", TABLE["rows"], ids=name)
def test_loss_and_gradient_are_trls(row):
    trained = torch.tensor(row["mask"], dtype=torch.bool)
    lengths = trained.sum(dim=1)
    logprobs = torch.tensor(row["logprobs"], requires_grad=True)
    weights = torch.tensor(token_weights(row["aggregation"], lengths.tolist(), trained.shape[1]))
    tokens = TokenInputs(
        logprobs=logprobs[trained],
        proximal=torch.tensor(row["proximal"])[trained],
        behaviour=torch.tensor(row["behaviour"])[trained],
        advantages=torch.tensor(row["advantages"]).repeat_interleave(lengths),
        lengths=lengths,
        weights=weights.repeat_interleave(lengths),
        reference=torch.tensor(row["reference"])[trained],
    )
    # TRL's CISPO bounds the ratio itself, and from above only.
    clips = {"clip_low": TABLE["clip_low"], "clip_high": TABLE["clip_high"]}
    if row["kind"] == "cispo":
        clips = {"clip_low": 1 - 1e-9, "clip_high": TABLE["cispo_cap"] - 1}
    settings = LossSpec(
        kind=row["kind"],
        **clips,
        aggregation=row["aggregation"],
        correction=row["correction"],
        correction_cap=TABLE["correction_cap"],
        clip_ratio_c=0.0,
        kl_coefficient=row["kl_coefficient"],
        kl_importance_weight=row["kl_importance_weight"],
    )
    loss = policy_loss(tokens, settings).total
    loss.backward()
    assert loss.item() == pytest.approx(row["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.tensor(row["gradient"]), rtol=1e-4, atol=1e-6)
