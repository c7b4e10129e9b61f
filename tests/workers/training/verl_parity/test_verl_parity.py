"""Our losses, corrections, divergences, penalties and baselines are verl's, from the table of make_table.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from plaudit_job.spec.algorithm import AdaptiveKlSpec, LossSpec
from plaudit_workers.training.model.batch import ESTIMATORS, KlController, penalise
from plaudit_workers.training.model.losses import ESTIMATES, TokenInputs, policy_loss, token_weights

TABLE = json.loads(Path(__file__).with_name("table.json").read_text())
LENGTHS = torch.tensor(TABLE["lengths"])
TRAINED = torch.arange(TABLE["tokens"])[None] < LENGTHS[:, None]


def loss_of(row):
    """Our loss of a row, and its gradient by the padded log-probabilities."""
    low, high, ratio_c = TABLE["clips"][row["kind"]]
    settings = LossSpec(
        kind=row["kind"],
        clip_low=low,
        clip_high=high,
        clip_ratio_c=ratio_c,
        aggregation=row["aggregation"],
        correction=row["correction"],
        correction_level=row["level"],
        correction_cap=TABLE["cap"],
        correction_floor=TABLE["floor"],
    )
    weights = token_weights(row["aggregation"], TABLE["lengths"], TABLE["tokens"])
    logprobs = torch.tensor(row["logprobs"], requires_grad=True)
    terms = policy_loss(
        TokenInputs(
            logprobs=logprobs[TRAINED],
            proximal=torch.tensor(row["proximal"])[TRAINED],
            behaviour=torch.tensor(row["behaviour"])[TRAINED],
            advantages=torch.tensor(row["advantages"]).repeat_interleave(LENGTHS),
            weights=torch.tensor(weights).repeat_interleave(LENGTHS),
            lengths=LENGTHS,
        ),
        settings,
    )
    terms.total.backward()
    return terms, logprobs.grad


@pytest.mark.parametrize("kind", TABLE["clips"])
def test_losses_and_gradients_are_verls(kind):
    rows = [row for row in TABLE["rows"] if row["kind"] == kind]
    assert len(rows) > 40
    for row in rows:
        terms, gradient = loss_of(row)
        assert terms.total.item() == pytest.approx(row["loss"], rel=1e-4, abs=1e-5), row
        torch.testing.assert_close(gradient, torch.tensor(row["gradient"]), rtol=1e-3, atol=1e-5)
        if row["aggregation"] == "token":
            assert terms.sums["actor/pg_clipfrac"].item() == pytest.approx(row["clipped"], abs=1e-5)


def test_the_cases_reach_every_branch():
    clipped = {row["kind"] for row in TABLE["rows"] if 0 < row["clipped"] < 1}
    assert clipped == set(TABLE["clips"])
    capped = [loss_of(row)[0].sums["actor/importance_capped"].item() for row in TABLE["rows"]]
    assert min(capped) == 0 < max(capped)


@pytest.mark.parametrize("row", TABLE["divergences"], ids=lambda row: row["name"])
def test_estimates_of_the_divergence_are_verls(row):
    logprobs = torch.tensor(row["logprobs"], requires_grad=True)
    estimates = ESTIMATES[row["name"]](logprobs, torch.tensor(row["reference"]))
    estimates.sum().backward()
    torch.testing.assert_close(estimates.detach(), torch.tensor(row["estimates"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(row["gradient"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", TABLE["baselines"])
def test_reinforce_plus_plus_with_a_baseline_is_verls(row):
    arguments = (np.array(row["scores"]), np.array(row["group"]), np.array(row["lengths"]))
    found = ESTIMATORS["reinforcePlusPlusBaseline"](*arguments)
    np.testing.assert_allclose(found, row["advantages"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", TABLE["penalties"], ids=lambda row: row["name"])
def test_rewards_with_the_divergence_in_them_are_verls(row):
    estimates = ESTIMATES[row["name"]](torch.tensor(row["proximal"]), torch.tensor(row["reference"]))
    of_sequences = [own[: int(length)].numpy() for own, length in zip(estimates, LENGTHS, strict=True)]
    scores, group = np.array(row["scores"]), np.array(row["group"])
    penalised, figures = penalise(scores, range(len(scores)), of_sequences, row["coefficient"])
    np.testing.assert_allclose(penalised, row["rewards"], rtol=1e-4, atol=1e-5)
    assert figures == pytest.approx(row["figures"], rel=1e-4)
    advantages = ESTIMATORS["grpo"](penalised, group, np.array(TABLE["lengths"]))
    np.testing.assert_allclose(advantages, row["advantages"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row", TABLE["controllers"], ids=lambda row: f"target {row['target']}")
def test_the_adaptive_coefficient_is_verls(row):
    controller = KlController(row["first"], AdaptiveKlSpec(target=row["target"], horizon=row["horizon"]))
    for divergence, num_samples, expected in row["updates"]:
        controller.update(divergence, num_samples)
        assert controller.coefficient == pytest.approx(expected, rel=1e-4)
