"""Packing: bins within the budget, equally many on each rank, and rows that mean what single sequences mean."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from plaudit_reward.attention import PACKED_ATTENTION, PackedLayout, UnsupportedAttentionError, packed_attention
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.head import forward_logits
from plaudit_workers.training.model.packing import assign_bins, pack

LENGTHS = [20, 3, 11, 11, 1, 19, 7, 7, 15, 2]


@pytest.mark.parametrize("budget", [1, 20, 25, 40, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_sequence_lies_in_one_bin_within_the_budget(budget, num_ranks):
    ranks = assign_bins(LENGTHS, budget, num_ranks)
    bins = [members for rank in ranks for members in rank]
    assert sorted(itertools.chain(*bins)) == list(range(len(LENGTHS)))
    assert len({len(rank) for rank in ranks}) == 1
    for members in bins:
        assert len(members) <= 1 or sum(LENGTHS[number] for number in members) <= budget
        lengths = [LENGTHS[number] for number in members]
        assert lengths == sorted(lengths, reverse=True)


def test_bins_are_balanced_and_few():
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 200, 300).tolist()
    bins = [members for rank in assign_bins(lengths, 2000, 2) for members in rank]
    filled = [sum(lengths[number] for number in members) for members in bins]
    assert max(filled) - min(filled) < 0.05 * max(filled)
    assert len(bins) <= sum(lengths) / 2000 + 4


def test_fewer_sequences_than_ranks_leave_empty_bins_that_can_be_packed(make_groups):
    ranks = assign_bins([5], 100, 3)
    assert sorted(ranks) == [[[]], [[]], [[0]]]
    batch = make_batch(make_groups([[1.0]]), "grpo", 1.0)
    idle = pack(batch.sequences, [0.5], [])
    assert idle.input_ids.numel() == batch.sequences[0].num_tokens
    assert idle.weights.abs().sum() == 0
    assert idle.members == ()


def test_a_row_holds_its_sequences_one_behind_another(make_groups):
    batch = make_batch(make_groups([[0.0, 1.0, 0.5]]), "grpo", 1.0)
    members = sorted(range(3), key=lambda number: -batch.sequences[number].num_tokens)
    row = pack(batch.sequences, [0.1, 0.2, 0.3], members)
    ids, first = row.input_ids[0].tolist(), 0
    targets, weights = [], []
    for number in members:
        sequence = batch.sequences[number]
        whole = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
        assert ids[first : first + len(whole)] == whole
        assert row.position_ids[0, first : first + len(whole)].tolist() == list(range(len(whole)))
        targets += sequence.response_ids.tolist()
        weights += [[0.1, 0.2, 0.3][number]] * sequence.response_ids.size
        first += len(whole)
    assert row.targets.tolist() == targets
    assert [ids[source + 1] for source in row.sources.tolist()] == targets
    assert row.weights.tolist() == pytest.approx(weights)


def packed_logits(model, sequences):
    lengths = [sequence.numel() for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.cat(sequences)[None]
    with torch.no_grad():
        return forward_logits(model, ids, positions, PackedLayout.of(lengths), torch.arange(ids.numel())).split(lengths)


@pytest.mark.parametrize("lengths", [[12, 12, 12], [30, 29, 25, 24, 13, 12, 5, 1, 1], [40], [3, 2, 1]])
def test_packed_logits_are_those_of_single_sequences_in_transformers_own_attention(model_folder, lengths):
    single = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa")
    packed = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=PACKED_ATTENTION)
    torch.manual_seed(0)
    sequences = [torch.randint(0, 16, (length,)) for length in lengths]
    for sequence, found in zip(sequences, packed_logits(packed, sequences), strict=True):
        with torch.no_grad():
            expected = single(input_ids=sequence[None]).logits[0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_sliding_window_is_kept(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=16, num_key_value_heads=2, sliding_window=4, initializer_range=0.3, **sizes)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    single = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=PACKED_ATTENTION)
    sequences = [torch.randint(0, 16, (length,)) for length in (17, 15, 4)]
    for sequence, found in zip(sequences, packed_logits(packed, sequences), strict=True):
        with torch.no_grad():
            expected = single(input_ids=sequence[None]).logits[0]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_gradients_flow_through_padded_blocks_as_through_single_sequences(model_folder):
    packed = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=PACKED_ATTENTION)
    torch.manual_seed(0)
    sequences = [torch.randint(0, 16, (length,)) for length in (10, 9, 8, 4)]

    def gradients(rows):
        packed.zero_grad()
        for row in rows:
            lengths = [sequence.numel() for sequence in row]
            ids, positions = torch.cat(row)[None], torch.cat([torch.arange(length) for length in lengths])[None]
            logits = forward_logits(packed, ids, positions, PackedLayout.of(lengths), torch.arange(ids.numel()))
            logits.log_softmax(-1)[:, 0].sum().backward()
        return [parameter.grad.clone() for parameter in packed.parameters()]

    torch.testing.assert_close(gradients([sequences]), gradients([[one] for one in sequences]), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("further", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_attention_of_another_kind_is_refused_not_ignored(further):
    row = torch.zeros(1, 4, 6, 8)
    with pytest.raises(UnsupportedAttentionError):
        packed_attention(torch.nn.Identity(), row, row, row, None, packed_layout=PackedLayout.of([6]), **further)
