"""Advantages of turns: the estimators at each turn, what was paid before a turn is none of its merit."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_wire.messages import Branch
from plaudit_wire.records import ScorerRecord, TurnRecord
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.batch import (
    ESTIMATORS,
    make_batch,
    turn_advantages,
    turn_returns,
    turn_starts,
    turn_tokens,
)
from plaudit_workers.training.model.packing import pack
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.model.state_copy import decode_command, encode_command

WEIGHTS = {"world": 1.0}
PER_TURN = {
    "algorithm": {"advantagePer": "turn", "advantage": "drGrpo"},
    "rollout": {"agent": {"kind": "environment", "path": "my_world.py", "class": "World"}},
    "reward": {"scorers": [{"name": "world", "kind": "environment"}]},
}


def conversation(sample, turn_rewards, firsts=(0,), mask=None, scorers=("world",)):
    """The sample as a conversation whose turns begin at these tokens."""
    turns = [TurnRecord(first, 1, 0.0, 0.1) for first in firsts]
    body = msgspec.structs.replace(
        sample.body,
        sample=msgspec.structs.replace(sample.body.sample, turn_rewards=list(turn_rewards)),
        generation=msgspec.structs.replace(sample.body.generation, turns=turns),
        **({} if mask is None else {"loss_mask": bytes(mask)}),
    )
    records = {name: ScorerRecord("scored", 0.0, call_s=0.1) for name in scorers}
    scoring = sample.scoring and msgspec.structs.replace(sample.scoring, scorers=records)
    return msgspec.structs.replace(sample, body=body, scoring=scoring)


def conversations(group, turn_rewards, **fields):
    samples = [conversation(each, own, **fields) for each, own in zip(group.samples, turn_rewards, strict=True)]
    return msgspec.structs.replace(group, samples=samples)


def with_tokens(group, num_tokens):
    """The group with responses of so many tokens."""
    samples = []
    for sample in group.samples:
        body = msgspec.structs.replace(
            sample.body,
            response_ids=np.arange(num_tokens, dtype="<i4").tobytes(),
            logprobs=np.full(num_tokens, -1.0, "<f4").tobytes(),
            loss_mask=bytes([1] * num_tokens),
        )
        samples.append(msgspec.structs.replace(sample, body=body))
    return msgspec.structs.replace(group, samples=samples)


REWARDS = st.one_of(st.sampled_from([0.0, 1.0, -0.5]), st.floats(-10, 10))
GROUPS = st.lists(st.lists(st.tuples(REWARDS, st.integers(0, 20)), min_size=1, max_size=6), min_size=1, max_size=5)


@given(GROUPS, st.sampled_from(sorted(ESTIMATORS)), REWARDS)
def test_with_one_turn_the_estimator_is_unchanged(groups, name, paid):
    samples = [(number, *sample) for number, own in enumerate(groups) for sample in own]
    group = np.array([number for number, _, _ in samples], dtype=np.int64)
    scores = np.array([score for _, score, _ in samples])
    tokens = np.array([count for _, _, count in samples], dtype=np.int64)
    returns = [turn_returns(score, [paid], 1.0, 1) for score in scores]
    found = turn_advantages(ESTIMATORS[name], returns, group, [np.array([count]) for count in tokens])
    assert [own.tolist() for own in found] == [[value] for value in ESTIMATORS[name](scores, group, tokens).tolist()]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(-3, 3), st.integers(0, 3), st.floats(-2, 2))
def test_the_returns_of_two_turns_differ_by_what_the_first_was_paid(rewards, rest, missing, weight):
    num_turns = len(rewards) + missing
    returns = turn_returns(rest, rewards, weight, num_turns)
    padded = [*rewards, *[0.0] * missing]
    assert returns[0] == rest
    assert -np.diff(returns) == pytest.approx(weight * np.array(padded[:-1]), abs=1e-9)


def test_each_trained_token_belongs_to_one_turn():
    starts = turn_starts([2, 5, 5, 9, 40], 12)
    assert starts.tolist() == [0, 5, 9]
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1], dtype=bool)
    assert turn_tokens(starts, mask).tolist() == [2, 1, 3]
    assert turn_starts([], 12).tolist() == [0]


def test_a_turn_is_compared_with_the_same_turn_of_its_group(make_groups):
    group = with_tokens(make_groups([[1.0, 0.5, 0.5]])[0], 6)
    group = conversations(group, [[0.5, 0.5], [0.5, 0.0], [0.0, 0.5]], firsts=(0, 4), mask=[1, 1, 0, 0, 1, 1])
    batch = make_batch([group], "drGrpo", 1.0, turn_weights=WEIGHTS)
    first, second = [1 / 3, -1 / 6, -1 / 6], [1 / 6, -1 / 3, 1 / 6]
    found = [sequence.trained_advantages.tolist() for sequence in batch.sequences]
    assert found == [pytest.approx([a, a, b, b]) for a, b in zip(first, second, strict=True)]
    row = pack(batch.sequences, [1.0] * 3, [2, 0])
    assert row.advantages.tolist() == pytest.approx([*found[2], *found[0]])


def test_a_turn_that_one_sample_reached_alone_has_no_advantage(make_groups):
    group = with_tokens(make_groups([[1.0, 0.0]])[0], 4)
    alone = conversation(group.samples[0], [0.0, 1.0], firsts=(0, 2))
    group = msgspec.structs.replace(group, samples=[alone, conversation(group.samples[1], [0.0])])
    first, second = make_batch([group], "grpo", 1.0, turn_weights=WEIGHTS).sequences
    assert first.trained_advantages.tolist() == pytest.approx([0.70710, 0.70710, 0, 0], abs=1e-4)
    assert second.trained_advantages.tolist() == pytest.approx([-0.70710] * 4, abs=1e-4)


def test_paid_rewards_count_with_their_scorers_weight_where_it_had_a_value(make_groups):
    group = with_tokens(make_groups([[1.0, 1.0]])[0], 4)
    scored, unscored = group.samples
    paid = conversation(scored, [1.0, 0.0], firsts=(0, 2))
    unpaid = conversation(unscored, [1.0, 0.0], firsts=(0, 2), scorers=())
    group = msgspec.structs.replace(group, samples=[paid, unpaid])
    first, second = make_batch([group], "drGrpo", 1.0, turn_weights={"world": 0.5}).sequences
    assert first.trained_advantages.tolist() == [0, 0, -0.25, -0.25]
    assert second.trained_advantages.tolist() == [0, 0, 0.25, 0.25]


def test_a_branch_has_the_advantage_of_the_first_turn(make_groups):
    group = with_tokens(make_groups([[1.0, 0.0]])[0], 4)
    group = conversations(group, [[1.0, 0.0], [0.0, 0.0]], firsts=(0, 2))
    ids, logprobs = np.array([3, 4], "<i4").tobytes(), np.zeros(2, "<f4").tobytes()
    body = msgspec.structs.replace(group.samples[0].body, branches=[Branch(ids, ids, logprobs, b"\1\1", [(0, 1, 0)])])
    samples = [msgspec.structs.replace(group.samples[0], body=body), group.samples[1]]
    own, branch, _ = make_batch(
        [msgspec.structs.replace(group, samples=samples)], "drGrpo", 1.0, turn_weights=WEIGHTS
    ).sequences
    assert own.trained_advantages.tolist() == [0.5, 0.5, 0, 0]
    assert branch.trained_advantages.tolist() == [0.5, 0.5]


def test_other_ranks_receive_the_advantages_of_turns(make_groups):
    group = conversations(with_tokens(make_groups([[1.0, 0.0]])[0], 4), [[1.0, 0.0], [0.0, 0.0]], firsts=(0, 2))
    batch = make_batch([group], "drGrpo", 1.0, turn_weights=WEIGHTS)
    _, received = decode_command(encode_command("update", batch))
    assert [each.turn_advantages for each in received.sequences] == [((2, 0.0),), ((2, 0.0),)]
    for mine, theirs in zip(batch.sequences, received.sequences, strict=True):
        assert mine.trained_advantages.tolist() == theirs.trained_advantages.tolist()


@pytest.mark.parametrize("per", ["sample", "turn"])
def test_equal_totals_with_different_turns_move_the_weights(make_job, make_groups, tmp_path, per):
    job = make_job({**PER_TURN, "algorithm": {**PER_TURN["algorithm"], "advantagePer": per}})
    group = with_tokens(make_groups([[1.0, 1.0]])[0], 6)
    group = conversations(group, [[1.0, 0.0], [0.0, 1.0]], firsts=(0, 3))
    policy = build_model(job)
    batch = make_batch([group], "drGrpo", 1.0)
    before = policy.logprobs(batch)
    figures = TorchBackend(job, policy, tmp_path).update([group])
    moved = max(np.abs(new - old).max() for new, old in zip(policy.logprobs(batch), before, strict=True))
    assert figures["training/sequences_skipped"] == (2 if per == "sample" else 0)
    assert (moved > 1e-5) == (per == "turn")
