"""Groups become sequences with advantages; what has no score or no token of the policy's stays out."""

from __future__ import annotations

import math
import statistics

import msgspec
import numpy as np
import pytest
import torch

from plaudit_wire.messages import Branch, PolicyVersion, decode_body, encode_body
from plaudit_workers.training.model.batch import (
    ESTIMATORS,
    RewardPenalty,
    degenerate_groups,
    make_batch,
)


def with_mask(group, index, mask):
    """The group with another loss mask at one sample."""
    samples = list(group.samples)
    body = msgspec.structs.replace(samples[index].body, loss_mask=np.array(mask, dtype=np.uint8).tobytes())
    samples[index] = msgspec.structs.replace(samples[index], body=body)
    return msgspec.structs.replace(group, samples=samples)


def test_a_sequence_carries_its_tokens_and_its_advantage(make_groups):
    groups = make_groups([[0.0, 1.0]])
    batch = make_batch(groups, "drGrpo", 0.7)
    body = groups[0].samples[1].body
    second = batch.sequences[1]
    assert batch.temperature == 0.7
    assert (second.group, second.index, second.advantage) == (groups[0].id, 1, 0.5)
    assert second.prompt_ids.tobytes() == groups[0].prompt.prompt_ids
    assert second.response_ids.tobytes() == body.response_ids
    assert second.behaviour_logprobs.tobytes() == body.logprobs
    assert second.version_spans == ((0, PolicyVersion(1, 0)),)
    assert second.num_tokens == second.prompt_ids.size + second.response_ids.size


def test_a_sample_without_a_score_is_left_out_and_does_not_count_as_zero(make_groups):
    batch = make_batch(make_groups([[0.4, None, 0.8]]), "drGrpo", 1.0)
    assert [sequence.index for sequence in batch.sequences] == [0, 2]
    assert [sequence.advantage for sequence in batch.sequences] == pytest.approx([-0.2, 0.2])
    assert batch.statistics["training/samples"] == 3
    assert batch.statistics["training/sequences"] == 2
    assert batch.statistics["critic/score/mean"] == pytest.approx(0.6)


def test_a_cut_response_counts_in_its_groups_advantages_and_is_not_trained(make_groups):
    group = make_groups([[0.4, 0.6, 0.8]])[0]
    samples = list(group.samples)
    generation = msgspec.structs.replace(samples[2].body.generation, finish_reason="length")
    samples[2] = msgspec.structs.replace(
        samples[2], body=msgspec.structs.replace(samples[2].body, generation=generation)
    )
    group = msgspec.structs.replace(group, samples=samples)
    masked, whole = (make_batch([group], "drGrpo", 1.0, mask_truncated=mask) for mask in (True, False))
    assert [sequence.index for sequence in masked.sequences] == [0, 1]
    assert [sequence.advantage for sequence in masked.sequences] == pytest.approx([-0.2, 0.0])
    assert [sequence.index for sequence in whole.sequences] == [0, 1, 2]
    filtered = make_batch([group], "drGrpo", 1.0, filter_truncated=True)
    assert [sequence.advantage for sequence in filtered.sequences] == pytest.approx([-0.1, 0.1])


def test_a_sample_that_was_never_generated_is_left_out(make_groups):
    group = make_groups([[0.4, 0.5, 0.8]])[0]
    lost = msgspec.structs.replace(group.samples[1], body=None)
    group = msgspec.structs.replace(group, samples=[group.samples[0], lost, group.samples[2]])
    assert [sequence.index for sequence in make_batch([group], "grpo", 1.0).sequences] == [0, 2]


def test_lengths_are_of_the_chosen_tokens_of_every_generated_sample(make_groups):
    group = make_groups([[0.0, 1.0, None, 0.5]])[0]
    group = with_mask(group, 0, [0] * len(group.samples[0].body.loss_mask))
    lengths = [len(sample.body.loss_mask) for sample in group.samples]
    group = with_mask(group, 1, [1] + [0] * (lengths[1] - 1))
    three, branch = np.array([3, 4, 5], "<i4").tobytes(), np.zeros(3, "<f4").tobytes()
    branches = [Branch(three, three, branch, b"\1\1\0", [(0, 1, 0)])]
    body = msgspec.structs.replace(group.samples[3].body, branches=branches)
    group = msgspec.structs.replace(
        group, samples=[*group.samples[:3], msgspec.structs.replace(group.samples[3], body=body)]
    )
    figures = make_batch([group], "grpo", 1.0).statistics
    chosen = [0, 1, lengths[2], lengths[3] + 2]  # the third has no score
    assert figures["response_length/mean"] == pytest.approx(np.mean(chosen))
    assert (figures["response_length/min"], figures["response_length/max"]) == (0, max(chosen))


def test_repetition_is_of_the_chosen_tokens(make_groups):
    group = make_groups([[0.0]])[0]
    ids = np.array([1, 2, 3, 4, 9, 9, 9, 9, 9, 9], "<i4")
    body = group.samples[0].body
    body = msgspec.structs.replace(body, response_ids=ids.tobytes(), logprobs=np.zeros(10, "<f4").tobytes())
    group = msgspec.structs.replace(group, samples=[msgspec.structs.replace(group.samples[0], body=body)])
    figures = make_batch([with_mask(group, 0, [1] * 4 + [0] * 6)], "grpo", 1.0).statistics
    assert figures["response_repetition/max"] == 0
    all_chosen = make_batch([with_mask(group, 0, [1] * 10)], "grpo", 1.0).statistics
    assert all_chosen["response_repetition/max"] == pytest.approx(2 / 7)


def test_a_group_of_equal_scores_has_a_signal_if_the_penalties_differ(make_groups):
    groups = make_groups([[1.0, 1.0], [0.5, 0.5]])

    def divergences(batch):
        return [
            np.full(sequence.response_ids.size, sequence.index * (sequence.group == groups[0].id), np.float32)
            for sequence in batch.sequences
        ]

    batch = make_batch(groups, "grpo", 1.0, RewardPenalty(0.1, divergences))
    assert [sequence.advantage != 0 for sequence in batch.sequences] == [True, True, False, False]
    assert batch.statistics["training/groups_zero_variance"] == 1


def test_a_group_that_lost_every_sample_is_no_group(make_groups):
    batch = make_batch(make_groups([[None, None], [0.0, 1.0], [None, 0.3]]), "grpo", 1.0)
    assert [sequence.group for sequence in batch.sequences] == ["t-1-1.0", "t-1-1.0", "t-2-1.0"]
    assert batch.statistics["training/groups_single"] == 1
    assert batch.statistics["training/groups_zero_variance"] == 0


def test_tool_output_is_masked_and_a_sample_of_nothing_else_only_counts_for_the_baseline(make_groups):
    group = make_groups([[0.0, 1.0, 0.5]])[0]
    lengths = [len(sample.body.loss_mask) for sample in group.samples]
    group = with_mask(with_mask(group, 0, [0] * lengths[0]), 1, [1] + [0] * (lengths[1] - 1))
    batch = make_batch([group], "drGrpo", 1.0)
    assert [sequence.index for sequence in batch.sequences] == [1, 2]
    assert [sequence.advantage for sequence in batch.sequences] == pytest.approx([0.5, 0.0])
    assert batch.sequences[0].num_trained_tokens == 1
    assert batch.num_trained_tokens == 1 + lengths[2]


def test_nothing_scored_makes_an_empty_batch(make_groups):
    batch = make_batch(make_groups([[None, None]]), "grpo", 1.0)
    assert batch.sequences == ()
    assert batch.statistics["training/samples"] == 2
    assert "critic/score/mean" not in batch.statistics


def test_a_sample_whose_agent_changed_the_prompt_is_trained_on_that_prompt(make_groups):
    group = make_groups([[0.0, 1.0]])[0]
    changed = np.array([7, 8, 9], "<i4").tobytes()
    encoded = encode_body(msgspec.structs.replace(group.samples[1].body, prompt_ids=changed))
    body = decode_body(encoded.tensors, encoded.sample, encoded.generation)
    samples = [group.samples[0], msgspec.structs.replace(group.samples[1], body=body)]
    first, second = make_batch([msgspec.structs.replace(group, samples=samples)], "grpo", 1.0).sequences
    assert first.prompt_ids.tobytes() == group.prompt.prompt_ids
    assert second.prompt_ids.tolist() == [7, 8, 9]


def test_branches_are_sequences_of_their_own_with_the_advantage_of_their_sample(make_groups):
    group = make_groups([[0.0, 1.0]])[0]
    prompt, response = np.array([7, 8], "<i4"), np.array([3, 4, 5], "<i4")
    mask, logprobs = np.array([1, 0, 1], "u1"), np.array([-1, 0, -2], "<f4")
    branch = Branch(prompt.tobytes(), response.tobytes(), logprobs.tobytes(), mask.tobytes(), [(0, 1, 4)])
    untrained = msgspec.structs.replace(branch, loss_mask=bytes(3))
    encoded = encode_body(msgspec.structs.replace(group.samples[1].body, branches=[branch, untrained]))
    body = decode_body(encoded.tensors, encoded.sample, encoded.generation)
    sample = msgspec.structs.replace(group.samples[1], body=body)
    batch = make_batch([msgspec.structs.replace(group, samples=[group.samples[0], sample])], "drGrpo", 1.0)
    assert [(sequence.index, sequence.advantage) for sequence in batch.sequences] == [(0, -0.5), (1, 0.5), (1, 0.5)]
    last = batch.sequences[2]
    assert (last.prompt_ids.tolist(), last.response_ids.tolist()) == ([7, 8], [3, 4, 5])
    assert (last.loss_mask.tolist(), last.num_trained_tokens) == ([True, False, True], 2)
    assert last.version_spans == ((0, PolicyVersion(1, 4)),)
    assert batch.statistics["training/samples"] == 2


GROUP_RELATIVE = ["grpo", "drGrpo", "rloo"]


def estimate(name, scores, group, num_tokens=None):
    tokens = np.ones(len(scores), dtype=np.int64) if num_tokens is None else np.array(num_tokens)
    return ESTIMATORS[name](np.array(scores, dtype=np.float64), np.array(group), tokens)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Scores 0, 1, 2, 5: mean 2, squared deviations 4 + 1 + 0 + 9 = 14, variance 14 / 3.
        ("grpo", [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 0, 3 / math.sqrt(14 / 3)]),
        ("drGrpo", [-2, -1, 0, 3]),
        # Against the mean of the others: 0 - 8/3, 1 - 7/3, 2 - 6/3, 5 - 3/3.
        ("rloo", [-8 / 3, -4 / 3, 0, 4]),
        # Over tokens of equal number: mean 2, variance 14 / 3.
        ("reinforcePlusPlus", [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 0, 3 / math.sqrt(14 / 3)]),
    ],
)
def test_one_group_by_hand(name, expected):
    assert estimate(name, [0, 1, 2, 5], [0, 0, 0, 0]) == pytest.approx(expected, abs=2e-6)


def test_grpo_equals_torch_group_by_group():
    scores, group = [0.3, 1.0, 0.1, 0.7, 0.0, 1.0], [0, 1, 0, 1, 0, 1]
    found = estimate("grpo", scores, group)
    for number in (0, 1):
        own = torch.tensor([score for score, of in zip(scores, group, strict=True) if of == number])
        expected = (own - own.mean()) / (own.std() + 1e-6)
        assert found[np.array(group) == number] == pytest.approx(expected.numpy(), abs=1e-6)


def test_reinforce_plus_plus_is_the_whitening_of_a_token_matrix():
    scores, lengths = [1.0, 0.0, 0.25], [3, 1, 6]
    tokens = [score for score, length in zip(scores, lengths, strict=True) for _ in range(length)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    expected = [(score - mean) / math.sqrt(variance + 1e-8) for score in scores]
    assert estimate("reinforcePlusPlus", scores, [0, 0, 1], lengths) == pytest.approx(expected)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_lone_survivor_teaches_nothing(name):
    assert estimate(name, [0.9, 0.0, 1.0], [0, 1, 1])[0] == 0.0


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_equal_scores_give_exactly_zero(name):
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert list(estimate(name, [0.1, 0.1, 0.1], [0, 0, 0])) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_no_samples_give_no_advantages(name):
    assert estimate(name, [], np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_advantages_of_a_group_sum_to_zero(name):
    found = estimate(name, [0.2, 0.9, 0.4, 1.0, 0.0], [0, 1, 0, 1, 0])
    assert found[[0, 2, 4]].sum() == pytest.approx(0, abs=1e-12)
    assert found[[1, 3]].sum() == pytest.approx(0, abs=1e-12)


def test_degenerate_groups_are_distinguished():
    scores, group = np.array([1.0, 0.5, 0.5, 0.0, 1.0]), np.array([0, 1, 1, 2, 2])
    assert degenerate_groups(scores, group) == (1, 1)
