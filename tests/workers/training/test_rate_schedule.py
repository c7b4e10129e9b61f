"""The learning rate follows the place in the run: steps without a signal, dropped groups, resumed and changed jobs."""

from __future__ import annotations

import hashlib
import json

import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.policy_model import build_model

SIGNAL, EQUAL, FAILED = [[0.0, 1.0, 0.5, 0.25]], [[1.0, 1.0, 1.0, 1.0]], [[None, None, None, None]]


@pytest.fixture
def backend(make_job, tmp_path):
    """A trainer of a job with a falling rate, in a run that all trainers of a test share."""

    def make(**algorithm):
        optimizer = {"learningRate": 1e-3, "schedule": "linear", "warmupSteps": 1}
        job = make_job({"algorithm": {"steps": 5, "optimizer": optimizer, **algorithm}})
        return TorchBackend(job, build_model(job), tmp_path)

    return make


@pytest.fixture
def rate(make_groups):
    """The rate of a trainer's next update."""
    return lambda backend: backend.update(make_groups(SIGNAL))["actor/lr"]


@pytest.mark.parametrize("scores", [EQUAL, FAILED], ids=["equal scores", "no scores"])
def test_steps_without_a_signal_count(backend, rate, make_groups, scores):
    trainer = backend(epochs=2)
    trainer.publish(PolicyVersion(1, 0))
    for step in (1, 2, 3, 4):
        trainer.update(make_groups(scores))
        trainer.publish(PolicyVersion(1, step))
    assert rate(trainer) == pytest.approx((0.25 + 0.125) / 2 * 1e-3)  # the mean of the step's two epochs


def test_updates_without_a_signal_count_within_a_step(backend, rate, make_groups):
    trainer = backend(miniBatchesPerStep=4)
    trainer.publish(PolicyVersion(1, 0))
    for _ in range(2):
        trainer.update(make_groups(EQUAL))
    assert [rate(trainer), rate(trainer)] == pytest.approx([0.75e-3, 1e-3])


def test_a_step_whose_mini_batches_were_dropped_is_a_whole_step(backend, rate):
    trainer = backend(miniBatchesPerStep=4)
    for step in range(4):
        trainer.publish(PolicyVersion(1, step))
        rate(trainer)  # one of four
    trainer.publish(PolicyVersion(1, 4))
    assert rate(trainer) == pytest.approx(0.25e-3)


def saved_after_two_steps(trainer, rate, tmp_path):
    for step in range(3):
        trainer.publish(PolicyVersion(1, step))
        if step < 2:
            rate(trainer)
    trainer.save(2, {"incarnation": 1})
    trainer.finish_saving()
    return tmp_path / "checkpoints" / "step-000002"


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("changed", [{}, {"miniBatchesPerStep": 4}, {"epochs": 4}])
def test_a_resumed_run_continues_at_its_place_whatever_its_updates_per_step(backend, rate, tmp_path, changed, earlier):
    path = saved_after_two_steps(backend(), rate, tmp_path)
    if earlier:
        forget_place(path)
    resumed = backend(**changed)
    resumed.load(path)
    resumed.publish(PolicyVersion(2, 2))
    # Linear over the four steps behind the warm-up, of which one is done: 0.75, in four epochs down to 0.5.
    expected = 0.65625e-3 if "epochs" in changed else 0.75e-3
    assert rate(resumed) == pytest.approx(expected)


def test_a_longer_run_stretches_the_schedule(backend, rate, tmp_path):
    path = saved_after_two_steps(backend(), rate, tmp_path)
    resumed = backend(steps=9)
    resumed.load(path)
    resumed.publish(PolicyVersion(2, 2))
    assert rate(resumed) == pytest.approx(0.875e-3)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_resumed_within_a_step_continues_at_its_place(backend, rate, tmp_path, earlier):
    trainer = backend(miniBatchesPerStep=3)
    trainer.publish(PolicyVersion(1, 0))
    rate(trainer)
    trainer.save(0, {"incarnation": 1})
    trainer.finish_saving()
    path = tmp_path / "checkpoints" / "step-000000"
    if earlier:
        forget_place(path)
    resumed = backend(miniBatchesPerStep=3)
    resumed.load(path)
    resumed.publish(PolicyVersion(2, 0))
    assert [rate(resumed) for _ in range(3)] == [rate(trainer) for _ in range(3)]  # to the last bit


def forget_place(checkpoint):
    """Leave what earlier versions stored: the number of updates alone."""
    index = json.loads((checkpoint / "policy.json").read_bytes())
    index["progress"].pop("place", None)
    (checkpoint / "policy.json").write_text(json.dumps(index))
    state = json.loads((checkpoint / "state.json").read_bytes())
    state["index"] = hashlib.sha256((checkpoint / "policy.json").read_bytes()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(state))
