"""Checkpoints: exact resume through the disk, only whole ones count, a full disk and foreign files told in words."""

from __future__ import annotations

import os

import pytest
import torch

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.process import RefusedError
from plaudit_workers.stream.trainer.groups import StaleIncarnationError
from plaudit_workers.training.backend.checkpoint import (
    checkpoints,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)
from plaudit_workers.training.model.batches.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.run.lineage import Lineage

SCORES = [[0.0, 1.0, 0.5], [0.2, 0.4, None]]


def test_two_steps_and_a_resume_are_bit_equal_to_four_steps(make_job, make_groups, tmp_path):
    batches = [make_batch(make_groups(SCORES, seed=seed), "rloo", 1.0) for seed in range(4)]
    job = make_job({"algorithm": {"optimizer": {"warmupSteps": 3}}})
    through = build_model(job)
    for batch in batches[:2]:
        through.update(batch)
    extra = {"cursor": 8, "ledger": {"dropped": {"run_ended": 1}}, "version": [1, 2], "open": ["t-3-1.0"]}
    path = save_checkpoint(tmp_path, 2, through, extra)
    figures = [through.update(batch) for batch in batches[2:]]

    resumed = build_model(job)
    assert [path] == checkpoints(tmp_path) == [tmp_path / "step-000002"]
    assert load_checkpoint(path, resumed) == extra == read_extra(path)
    assert [resumed.update(batch) for batch in batches[2:]] == figures
    torch.testing.assert_close(resumed.full_state(), through.full_state(), atol=0, rtol=0)


def test_the_newest_are_kept_and_half_written_ones_are_ignored(make_job, tmp_path):
    policy = build_model(make_job({}))
    (tmp_path / ".incomplete-step-000099").mkdir(parents=True)
    (tmp_path / "step-000098").mkdir()
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, policy, {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000010"]
    assert sorted(os.listdir(tmp_path)) == ["step-000002", "step-000010", "step-000098"]


def test_a_step_that_is_saved_again_replaces_the_first(make_job, tmp_path):
    policy = build_model(make_job({}))
    for attempt in (1, 2):
        save_checkpoint(tmp_path, 5, policy, {"attempt": attempt})
    assert read_extra(tmp_path / "step-000005") == {"attempt": 2}


def test_the_checkpoint_of_a_later_incarnation_outlives_a_higher_step_of_an_earlier_one(make_job, tmp_path):
    policy = build_model(make_job({}))
    for step, incarnation in ((20, 1), (12, 2), (13, 2)):
        path = save_checkpoint(tmp_path, step, policy, {"incarnation": incarnation}, keep=1)
        assert checkpoints(tmp_path) == [path]


def test_a_replaced_trainer_neither_saves_nor_prunes_a_checkpoint(make_job, tmp_path):
    policy = build_model(make_job({}))
    path = save_checkpoint(tmp_path, 2, policy, {"incarnation": 1})
    Lineage({1: PolicyVersion(0, 0), 2: PolicyVersion(1, 2)}).write(tmp_path)
    with pytest.raises(StaleIncarnationError, match="later trainer than incarnation 1"):
        save_checkpoint(tmp_path, 4, policy, {"incarnation": 1}, keep=1)
    assert checkpoints(tmp_path) == [path]


def test_a_damaged_checkpoint_is_pruned_first(make_job, tmp_path):
    policy = build_model(make_job({}))
    damaged = save_checkpoint(tmp_path, 30, policy, {"incarnation": 1})
    (damaged / "state.json").write_text("{")
    path = save_checkpoint(tmp_path, 2, policy, {"incarnation": 1}, keep=1)
    assert checkpoints(tmp_path) == [path]


def test_a_folder_that_does_not_exist_has_no_checkpoints(tmp_path):
    assert checkpoints(tmp_path / "absent") == []


def test_a_full_disk_is_reported_and_older_checkpoints_stay(make_job, tmp_path, small_files_only):
    policy = build_model(make_job({}))
    save_checkpoint(tmp_path, 1, policy, {"cursor": 4})
    with small_files_only(10_000), pytest.raises(RefusedError, match=r"no room for .*step-000002"):
        save_checkpoint(tmp_path, 2, policy, {"cursor": 8}, keep=1)
    assert os.listdir(tmp_path) == ["step-000001"]
    assert load_checkpoint(tmp_path / "step-000001", policy) == {"cursor": 4}


def test_a_folder_that_is_no_checkpoint_is_refused(make_job, tmp_path):
    with pytest.raises(RefusedError, match="is not a checkpoint"):
        load_checkpoint(tmp_path, build_model(make_job({})))


def test_a_damaged_checkpoint_is_refused_by_name(make_job, tmp_path):
    policy = build_model(make_job({}))
    path = save_checkpoint(tmp_path, 3, policy, {})
    content = (path / "policy.pt").read_bytes()
    (path / "policy.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(RefusedError, match=r"step-000003 cannot be loaded.*resumeFrom"):
        load_checkpoint(path, policy)


def test_a_checkpoint_of_another_model_is_refused(make_job, model_folder, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model_folder)
    config.hidden_size, config.head_dim = 16, 8
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "other")
    other = build_model(make_job({"model": {"source": str(tmp_path / "other")}}))
    path = save_checkpoint(tmp_path / "checkpoints", 1, build_model(make_job({})), {})
    with pytest.raises(RefusedError, match="of this model"):
        load_checkpoint(path, other)
