"""Log-probabilities under the sampling temperature, and sampling that cannot be trained on."""

from __future__ import annotations

import pytest
import torch

from plaudit_job.spec.rollout import SamplingSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model.head import reduced, refuse_cut_sampling


def test_logits_are_divided_by_the_temperature():
    logits, targets = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]), torch.tensor([1, 2])
    expected = torch.log_softmax(logits / 0.5, -1)[[0, 1], targets]
    torch.testing.assert_close(reduced(logits, targets, 0.5)[:, 0], expected)


@pytest.mark.parametrize("use", ["figure", "loss"])
def test_entropy_is_that_of_the_scaled_distribution(use):
    logits = torch.tensor([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]], requires_grad=True)
    expected = torch.distributions.Categorical(logits=logits / 2.0).entropy()
    found = reduced(logits, torch.tensor([0, 1]), 2.0, entropy=use)
    torch.testing.assert_close(found[:, 1], expected)
    (own,) = torch.autograd.grad(found[:, 1].sum(), logits)
    (other,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(own, other if use == "loss" else torch.zeros_like(other))


def test_half_precision_logits_are_computed_in_float32():
    found = reduced(torch.tensor([[30.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1]), 1.0)[:, 0]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-30.0, abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.9}, "topP 0.9"),
        ({"top_k": 20}, "topK 20"),
    ],
)
def test_sampling_that_cannot_be_trained_on_is_refused(sampling, words):
    with pytest.raises(RefusedError, match=words):
        refuse_cut_sampling(SamplingSpec(**sampling))


def test_plain_sampling_is_accepted():
    refuse_cut_sampling(SamplingSpec(temperature=0.7))
