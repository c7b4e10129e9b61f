"""Checkpoints: exact resume through the disk, only whole ones count, a full disk and foreign files told in words."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.files import remove_leftovers
from plaudit_workers.stream.trainer import StaleIncarnationError
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.checkpoint import (
    checkpoints,
    load_checkpoint,
    read_extra,
    recovered_checkpoints,
    write_checkpoint,
)
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.publish import offer_weights
from plaudit_workers.training.state import Lineage
from plaudit_workers.weights.files import ShardReader
from whole_state import full_state, save_checkpoint

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
    torch.testing.assert_close(full_state(resumed), full_state(through), atol=0, rtol=0)


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


def test_a_trainer_that_is_replaced_while_it_saves_leaves_its_successors_checkpoint_whole(make_job, tmp_path):
    older, newer = build_model(make_job({})), build_model(make_job({}))
    copy = older.copy_state()
    write = copy.write

    def replaced_while_it_writes(folder: Path) -> None:
        Lineage({1: PolicyVersion(0, 0), 2: PolicyVersion(1, 2)}).write(tmp_path)
        save_checkpoint(tmp_path, 4, newer, {"incarnation": 2}, keep=2)
        write(folder)

    copy.write = replaced_while_it_writes
    with pytest.raises(StaleIncarnationError, match="later trainer than incarnation 1"):
        write_checkpoint(tmp_path, 4, copy, {"incarnation": 1}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["incarnations.json", "step-000004"]
    assert load_checkpoint(tmp_path / "step-000004", older) == {"incarnation": 2}


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


@pytest.mark.parametrize("file", ["rank-00000-of-00001.safetensors", "policy.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name(make_job, tmp_path, file, damage):
    policy = build_model(make_job({}))
    path = save_checkpoint(tmp_path, 3, policy, {})
    content = bytearray((path / file).read_bytes())
    content[-200] ^= 1
    (path / file).unlink()
    if damage != "missing":
        (path / file).write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    with pytest.raises(RefusedError, match=r"step-000003 cannot be loaded.*resumeFrom"):
        load_checkpoint(path, policy)


def test_a_checkpoint_in_one_file_of_an_earlier_version_is_loaded(make_job, make_groups, tmp_path):
    """``policy.pt`` held the same tensors, by parameter, in torch's own format."""
    batches = [make_batch(make_groups(SCORES, seed=seed), "rloo", 1.0) for seed in range(3)]
    through = build_model(make_job({}))
    for batch in batches[:2]:
        through.update(batch)
    path = save_checkpoint(tmp_path, 2, through, {"cursor": 8})
    reader = ShardReader(path)
    names = [name.removeprefix("model/") for name in reader.index.tensors if name.startswith("model/")]
    progress = reader.index.progress
    moments = {name: {key: reader.whole(f"{key}/{name}") for key in ("exp_avg", "exp_avg_sq")} for name in names}
    state = {
        "model": {name: reader.whole(f"model/{name}") for name in names},
        "optimizer": {"updates": progress.updates, "steps": progress.steps, "moments": moments},
        "rng": torch.frombuffer(bytearray(progress.random_state), dtype=torch.uint8),
    }
    for file in ("policy.json", "rank-00000-of-00001.safetensors"):
        (path / file).unlink()
    torch.save(state, path / "policy.pt")
    (path / "state.json").write_text('{"step": 2, "extra": {"cursor": 8}}')
    resumed = build_model(make_job({}))
    assert load_checkpoint(path, resumed) == {"cursor": 8}
    assert resumed.update(batches[2]) == through.update(batches[2])
    torch.testing.assert_close(full_state(resumed), full_state(through), atol=0, rtol=0)


def killed_at(number: int, folder: Path, write: Callable[[], object]) -> bool:
    """Run ``write`` in a process that gets SIGKILL right before its nth operation in ``folder``; True if it was."""
    child = os.fork()
    if child == 0:
        seen = 0

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            touches = event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")
            if touches and any(str(folder) in str(argument) for argument in arguments):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        write()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.long
def test_sigkill_at_each_point_of_a_save_leaves_the_old_or_the_new_state_whole(make_job, make_groups, tmp_path):
    folder, backup = tmp_path / "checkpoints", tmp_path / "backup"
    policy, loaded = build_model(make_job({})), build_model(make_job({}))
    save_checkpoint(backup, 2, policy, {"incarnation": 1})
    states = [full_state(policy)]
    policy.update(make_batch(make_groups(SCORES), "rloo", 1.0))
    states.append(full_state(policy))
    copy, left, number, was_killed = policy.copy_state(), [], 0, True
    while was_killed:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(backup, folder)
        was_killed = killed_at(number, folder, lambda: write_checkpoint(folder, 2, copy, {"incarnation": 2}, keep=1))
        assert recovered_checkpoints(folder) == [folder / "step-000002"]
        left.append(load_checkpoint(folder / "step-000002", loaded)["incarnation"] - 1)
        torch.testing.assert_close(full_state(loaded), states[left[-1]], atol=0, rtol=0)
        remove_leftovers(folder)
        assert os.listdir(folder) == ["step-000002"]
    assert number > 12
    assert left == sorted(left)  # the old one up to some point, from there on the new one
    assert (left[0], left[-1]) == (0, 1)


def test_a_checkpoint_is_written_while_the_next_updates_run(make_job, make_groups, tmp_path):
    job = make_job({})
    model = build_model(job)
    backend = TorchBackend(job, model, tmp_path)
    before, held = full_state(model), threading.Event()
    backend._saver.submit(held.wait, 60)  # a volume that takes its time
    assert backend.save(2, {"incarnation": 1}) == tmp_path / "checkpoints" / "step-000002"
    backend.update(make_groups(SCORES))
    assert backend.checkpoints() == {}
    held.set()
    backend.finish_saving()
    assert backend.checkpoints() == {tmp_path / "checkpoints" / "step-000002": {"incarnation": 1}}
    assert any(not torch.equal(before[name], tensor) for name, tensor in full_state(model).items())
    backend.load(tmp_path / "checkpoints" / "step-000002")
    torch.testing.assert_close(full_state(model), before, atol=0, rtol=0)
    backend.close()


def test_a_checkpoint_that_could_not_be_written_ends_the_next_save(make_job, tmp_path, small_files_only):
    job = make_job({})
    backend = TorchBackend(job, build_model(job), tmp_path)
    with small_files_only(10_000):
        backend.save(1, {"incarnation": 1})
        with pytest.raises(RefusedError, match=r"no room for .*step-000001"):
            backend.finish_saving()
    with pytest.raises(RefusedError, match=r"no room for .*step-000001"):
        backend.save(2, {"incarnation": 1})
    backend.close()


def test_a_checkpoint_is_written_although_the_offered_weights_cannot_be_written_as_files(make_job, tmp_path):
    job = make_job({"trainer": {"weights": {"transfer": "direct"}}})
    model = build_model(job)
    backend = TorchBackend(job, model, tmp_path, "redis://127.0.0.1")
    backend.publish(PolicyVersion(1, 1))
    backend.save(1, {})
    backend.publish(PolicyVersion(1, 2))
    offer_weights(model, PolicyVersion(1, 3), "token", "redis://127.0.0.1")  # no rank offers 1.2 any more
    saved = backend.save(2, {})
    backend.finish_saving()
    assert saved in backend.checkpoints()
    assert os.listdir(tmp_path / "weights") == ["1.1"]
    backend.close()


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
