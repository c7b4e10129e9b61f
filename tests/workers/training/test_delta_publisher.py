"""Versions published as deltas: which are whole, what they restore to, what is kept of them."""

from __future__ import annotations

import os
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from plaudit_job.load import dump_job
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.cli import main
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.checkpoint import load_checkpoint
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.publish import prune_weights
from plaudit_workers.weights.deltas import restore_version
from plaudit_workers.weights.published import Probe, is_whole, weights_digest
from whole_state import full_state, save_checkpoint

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, 0.5]]


@pytest.fixture
def delta_job(make_job):
    """Bfloat16, and a rate that is as small against the tiny model's weights as usual ones are."""

    def make(full_every=3, learning_rate=1e-5, **algorithm):
        return make_job(
            {
                "model": {"dtype": "bfloat16"},
                "algorithm": {"optimizer": {"learningRate": learning_rate}, **algorithm},
                "trainer": {"weights": {"fullEvery": full_every}},
            }
        )

    return make


@pytest.fixture
def train(make_groups):
    """Makes an update and publishes a version."""

    def step(backend, number, incarnation=1):
        if number:
            backend.update(make_groups(SCORES, seed=number))
        return backend.publish(PolicyVersion(incarnation, number))

    return step


def form_of(folder):
    names = {path.name for path in folder.iterdir()}
    assert ("delta.json" in names) == ("model.safetensors.delta" in names)
    assert ("model.safetensors" in names) == ("config.json" in names)
    assert "probe.json" in names
    return "+".join(
        form for form, present in (("whole", is_whole(folder)), ("delta", "delta.json" in names)) if present
    )


def restored(folder, tmp_path):
    target = tmp_path / f"restored-{folder.name}"
    target.mkdir()
    restore_version(folder, target)
    return target


def test_every_version_is_restored_as_it_was_and_every_few_are_whole(delta_job, train, tmp_path):
    job = delta_job(full_every=3)
    policy = build_model(job)
    backend = TorchBackend(job, policy, tmp_path)
    announced, states = [], []
    for number in range(6):
        announced.append(train(backend, number))
        states.append(full_state(policy))
    folders = [tmp_path / "weights" / str(each.version) for each in announced]
    assert [form_of(folder) for folder in folders] == ["whole", "delta", "delta", "whole+delta", "delta", "delta"]
    for folder, announcement, state in zip(folders, announced, states, strict=True):
        whole = restored(folder, tmp_path)
        assert announcement.digest == weights_digest(whole)
        torch.testing.assert_close(load_file(whole / "model.safetensors"), state, atol=0, rtol=0)
    assert any(not torch.equal(states[1][name], states[2][name]) for name in states[1])
    small, large = (sum(path.stat().st_size for path in folders[n].glob("model.s*")) for n in (1, 0))
    assert small < large / 2


def test_a_version_of_which_most_changed_is_written_whole(delta_job, train, tmp_path):
    job = delta_job(learning_rate=0.1)
    backend = TorchBackend(job, build_model(job), tmp_path)
    assert [form_of(tmp_path / "weights" / str(train(backend, n).version)) for n in range(2)] == ["whole", "whole"]


def test_the_next_trainer_begins_with_a_whole_version(delta_job, train, tmp_path):
    job = delta_job()
    first = TorchBackend(job, build_model(job), tmp_path)
    for number in range(2):
        train(first, number)
    second = TorchBackend(job, build_model(job), tmp_path)
    assert form_of(tmp_path / "weights" / str(train(second, 0, incarnation=2).version)) == "whole"
    assert form_of(tmp_path / "weights" / str(train(second, 1, incarnation=2).version)) == "delta"


def test_a_step_resumed_in_its_middle_publishes_its_first_weights_and_then_the_difference(
    delta_job, make_groups, tmp_path
):
    job = delta_job(miniBatchesPerStep=4, loss={"correction": "decoupled"})
    stopped, resumed = build_model(job), build_model(job)
    first = full_state(stopped)
    stopped.hold_proximal(PolicyVersion(1, 0))
    stopped.update(make_batch(make_groups(SCORES), "grpo", 1.0))
    save_checkpoint(tmp_path / "checkpoints", 0, stopped, {})
    load_checkpoint(tmp_path / "checkpoints" / "step-000000", resumed)
    backend = TorchBackend(job, resumed, tmp_path)
    for number, expected in enumerate((first, full_state(stopped))):
        folder = tmp_path / "weights" / str(backend.publish(PolicyVersion(2, number)).version)
        stored = load_file(restored(folder, tmp_path) / "model.safetensors")
        torch.testing.assert_close(stored, expected, atol=0, rtol=0)
    assert form_of(folder) == "delta"


def test_a_requested_version_is_written_whole_also_after_the_next_update(delta_job, train, make_groups, tmp_path):
    job = delta_job()
    policy = build_model(job)
    backend = TorchBackend(job, policy, tmp_path)
    older, announced = [train(backend, number) for number in range(2)]
    folder, state = tmp_path / "weights" / "1.1", full_state(policy)
    probe = (folder / "probe.json").read_bytes()
    (folder / "model.safetensors.delta").write_bytes(b"damaged")
    backend.update(make_groups(SCORES, seed=9))
    backend.write_whole(announced)
    assert form_of(folder) == "whole+delta"
    assert weights_digest(folder) == announced.digest
    assert (folder / "probe.json").read_bytes() == probe
    torch.testing.assert_close(load_file(folder / "model.safetensors"), state, atol=0, rtol=0)

    shutil.rmtree(tmp_path / "weights" / "1.0")
    backend.write_whole(older)  # rollouts follow the newest version
    assert not (tmp_path / "weights" / "1.0").exists()
    train(backend, 2)
    weights_before = full_state(policy)
    stored = load_file(restored(tmp_path / "weights" / "1.2", tmp_path) / "model.safetensors")
    torch.testing.assert_close(stored, weights_before, atol=0, rtol=0)


def test_the_versions_on_which_kept_ones_rest_are_kept(delta_job, train, tmp_path):
    job = delta_job(full_every=4)
    backend = TorchBackend(job, build_model(job), tmp_path)
    for number in range(8):  # whole: 0 and 4
        train(backend, number)
    weights = tmp_path / "weights"
    assert prune_weights(weights, ["1.2"]) == [PolicyVersion(1, 3)]
    assert sorted(os.listdir(weights)) == ["1.0", "1.1", "1.2", "1.4", "1.5", "1.6", "1.7"]
    (weights / "1.1" / "delta.json").write_text("damaged")
    prune_weights(weights, ["1.2"])  # nothing restores it
    assert sorted(os.listdir(weights)) == ["1.2", "1.4", "1.5", "1.6", "1.7"]


def test_a_full_disk_leaves_no_half_delta(delta_job, train, make_groups, small_files_only, tmp_path):
    job = delta_job()
    backend = TorchBackend(job, build_model(job), tmp_path)
    train(backend, 0)
    backend.update(make_groups(SCORES))
    with small_files_only(100), pytest.raises(RefusedError, match=r"no room for .*1\.1"):
        backend.publish(PolicyVersion(1, 1))
    assert os.listdir(tmp_path / "weights") == ["1.0"]


def test_a_delta_is_exported_as_a_whole_model(delta_job, train, tmp_path, capsys):
    job = delta_job()
    policy = build_model(job)
    backend = TorchBackend(job, policy, tmp_path / "run")
    for number in range(3):
        train(backend, number)
    (tmp_path / "run" / "job.yaml").write_text(dump_job(job))
    output = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), "--output", str(output)]) == 0
    torch.testing.assert_close(load_file(output / "model.safetensors"), full_state(policy), atol=0, rtol=0)
    assert not [path for path in output.iterdir() if "delta" in path.name or path.name == "probe.json"]
    assert (output / "tokenizer.json").exists()
    shutil.rmtree(tmp_path / "run" / "weights" / "1.0")
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "b")]) == 2
    assert "Export another version, or a checkpoint with --step" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_the_probe_of_a_delta_is_that_of_its_weights(delta_job, train, tmp_path):
    job = delta_job()
    policy = build_model(job)
    backend = TorchBackend(job, policy, tmp_path)
    for number in range(2):
        train(backend, number)
    written = (tmp_path / "weights" / "1.1" / "probe.json").read_bytes()
    assert msgspec.json.decode(written, type=Probe) == policy.probe()
