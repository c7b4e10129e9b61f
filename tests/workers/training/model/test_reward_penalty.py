"""The divergence in the reward: which policies it compares, and what becomes of the advantages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.batch import RewardPenalty, make_batch, penalise
from plaudit_workers.training.model.policy_model import build_model

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None], [1.0, 1.0, 1.0]]


def settings(**loss):
    return {"algorithm": {"loss": {"klCoefficient": 0.05, "klIn": "reward", "klEstimator": "k1"} | loss}}


def test_a_sample_with_branches_pays_for_all_its_tokens():
    own = [np.array([1.0, 2.0], np.float32), np.array([-1.0], np.float32), np.array([4.0], np.float32)]
    scores, figures = penalise(np.array([1.0, 0.0]), [0, 1, 0], own, 0.1)
    assert scores.tolist() == pytest.approx([1 - 0.7, 0.1])
    assert figures["actor/reward_kl_penalty"] == pytest.approx((7 / 3 - 1) / 2)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
def test_divergences_compare_the_published_policy_with_the_starting_weights(make_job, make_groups, lora):
    own = settings(correction="tis")
    own["algorithm"] |= {"miniBatchesPerStep": 2, "optimizer": {"learningRate": 0.05}}
    job = make_job(own | ({"trainer": {"lora": lora}} if lora else {}))
    policy = build_model(job)
    batch = make_batch(make_groups(SCORES), "grpo", 0.8)
    start = policy.logprobs(batch)
    assert all(np.abs(each).max() < 1e-5 for each in policy.divergences(batch))
    policy.update(batch)
    policy.hold_proximal(PolicyVersion(1, 1))
    published = policy.logprobs(batch)
    for _ in range(2):  # the first and the second mini-batch of a step: the weights move, the published ones do not
        for found, old, new in zip(policy.divergences(batch), start, published, strict=True):
            np.testing.assert_allclose(found, new - old, atol=1e-5)
        policy.update(batch)
    assert max(np.abs(new - old).max() for old, new in zip(start, published, strict=True)) > 1e-3


def test_without_a_correction_the_sampling_policy_is_compared(make_job, make_groups):
    policy = build_model(make_job(settings(correction="none")))
    batch = make_batch(make_groups(SCORES), "grpo", 0.8)
    for found, sequence, start in zip(policy.divergences(batch), batch.sequences, policy.logprobs(batch), strict=True):
        np.testing.assert_allclose(found, sequence.behaviour_logprobs - start, atol=1e-5)


def test_an_update_learns_from_the_lowered_rewards_and_has_no_divergence_in_its_loss(make_job, make_groups, tmp_path):
    job = make_job(settings(correction="none"))
    groups = make_groups(SCORES)
    policy = build_model(job)
    plain = make_batch(groups, "drGrpo", 1.0)
    penalty = RewardPenalty(0.05, policy.divergences)
    batch = make_batch(groups, "drGrpo", 1.0, penalty)
    lowered = [
        -0.05 * float(own.sum()) for own in policy.divergences(dataclasses.replace(batch, temperature=1.0))
    ]  # one sequence a sample
    for name in {sequence.group for sequence in batch.sequences}:
        members = [number for number, sequence in enumerate(batch.sequences) if sequence.group == name]
        mean = sum(lowered[number] for number in members) / len(members)
        for number in members:
            expected = plain.sequences[number].advantage + lowered[number] - mean
            assert batch.sequences[number].advantage == pytest.approx(expected, abs=1e-5)
    assert batch.statistics["critic/score/mean"] == plain.statistics["critic/score/mean"]
    assert batch.statistics["critic/rewards/mean"] != batch.statistics["critic/score/mean"]

    figures = TorchBackend(job, policy, tmp_path).update(groups)
    assert figures["actor/reward_kl_penalty_coeff"] == 0.05
    assert "actor/kl_loss" not in figures
    # Equal scores, but not equal rewards: these samples teach something now.
    assert figures["training/sequences_skipped"] == 0


def test_an_update_without_samples_has_no_penalty(make_job, make_groups, tmp_path):
    job = make_job(settings())
    figures = TorchBackend(job, build_model(job), tmp_path).update(make_groups([[None, None]]))
    assert "actor/reward_kl_penalty" not in figures
