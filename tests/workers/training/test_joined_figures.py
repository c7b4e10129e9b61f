"""The figures of a step, joined from those of its updates, are those of all its samples, tokens and seconds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.schedule import join_epochs, join_mini_batches


def test_figures_of_samples_are_those_of_one_batch_of_all(make_groups):
    scores = [[0.0, 0.0, 0.25, None], [1.0, 1.0, 0.75, 1.0, 0.5], [None, 0.5]]
    groups = make_groups(scores)
    parts = [make_batch(groups[:1], "drGrpo", 1.0), make_batch(groups[1:], "drGrpo", 1.0)]
    joined = join_mini_batches([part.statistics for part in parts])
    assert joined == pytest.approx(make_batch(groups, "drGrpo", 1.0).statistics)
    assert (joined["critic/score/min"], joined["critic/score/max"]) == (0.0, 1.0)
    assert joined["training/scored"] == 9


def test_means_of_tokens_are_weighted_by_tokens_and_losses_by_updates():
    updates = [
        {"actor/entropy": 1.0, "actor/pg_loss": 1.0, "training/loss_tokens": 30.0},
        {"actor/entropy": 2.0, "actor/pg_loss": 2.0, "training/loss_tokens": 10.0},
        {"training/samples": 8.0},  # nothing in it had a gradient
    ]
    joined = join_mini_batches(updates)
    assert (joined["actor/entropy"], joined["actor/pg_loss"]) == (1.25, 1.5)


@pytest.mark.parametrize("join", [join_mini_batches, join_epochs])
def test_speeds_are_all_tokens_by_all_seconds(join):
    updates = [
        {"training/computed_tokens": 100.0, "actor/tokens_per_s": 100.0, "perf/mfu/actor": 0.1},
        {"training/computed_tokens": 900.0, "actor/tokens_per_s": 300.0, "perf/mfu/actor": 0.3},
        {},
    ]
    joined = join(updates)
    assert joined["actor/tokens_per_s"] == pytest.approx(1000 / 4)
    assert joined["perf/mfu/actor"] == pytest.approx((0.1 + 3 * 0.3) / 4)
    assert joined["training/computed_tokens"] == 1000


def test_discarded_updates_are_counted_and_what_they_lack_is_of_the_others():
    updates = [{"actor/skipped_updates": number, "actor/pg_loss": loss} for number, loss in [(0, 2.0), (1, math.nan)]]
    assert join_mini_batches(updates) == {"actor/skipped_updates": 1, "actor/pg_loss": 2.0}


def test_epochs_compute_their_tokens_again_and_have_the_same_samples(make_job, make_groups, tmp_path):
    job = make_job({"algorithm": {"epochs": 3}})
    groups = make_groups([[0.0, 1.0], [1.0, 1.0]])
    batch = make_batch(groups, "grpo", 1.0)
    figures = TorchBackend(job, build_model(job), tmp_path).update(groups)
    assert (figures["training/samples"], figures["training/tokens"]) == (4, batch.num_trained_tokens)
    computed = sum(sequence.num_tokens for sequence in batch.sequences if sequence.has_signal)
    assert figures["training/computed_tokens"] == 3 * computed
    trained = [sequence.num_trained_tokens for sequence in batch.sequences if sequence.has_signal]
    assert figures["training/loss_tokens"] == np.sum(trained)
