"""The learning rate follows the place in the run; operations and speed of an update."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from plaudit_job.model_shape import ModelShape
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.batch import make_batch, repeated_share
from plaudit_workers.training.model.optimizer import speed_figures, training_flops, work_figures
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


pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning")


def test_operations_are_those_that_torch_counts_in_the_matrices(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    shape = ModelShape.from_config(model.config.to_dict())
    ids = torch.zeros(1, 100, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    # Eager attention computes both halves of the matrix; causal attention needs one.
    attention = 6 * shape.layers * shape.heads * shape.head_size * 100**2
    # The first layer's inputs need no gradient, and norms and biases are no matrices.
    assert counter.get_total_flops() == pytest.approx(training_flops(shape, [100]) + attention, rel=0.05)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_operations_of_an_update_are_those_that_torch_counts(tmp_path, make_job, make_groups, model_folder, lora):
    """Frozen weights have no gradients of their own."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder)
    config.update(
        {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    trainer = {"microBatchTokens": 100_000} | ({"lora": lora} if lora else {})
    policy = build_model(make_job({"model": {"source": str(tmp_path)}, "trainer": trainer}))
    batch = make_batch(make_groups([[0.0, 1.0, 0.5, 0.25]]), "grpo", 1.0)
    with FlopCounterMode(display=False) as counter:
        figures = policy.update(batch)
    # The head is computed for trained tokens only, attention in blocks, and the first layer's inputs need no gradient.
    assert figures["training/tflops"] * 1e12 == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_speed_is_work_by_time():
    shape = ModelShape(2, 32, 64, 4, 2, 8, 16, tied=False)
    work = work_figures(shape, [100, 50])
    assert speed_figures(work, 2.0) == {"actor/tokens_per_s": 75.0}
    half = 2 * training_flops(shape, [100, 50]) / (2.0 * 4)
    assert speed_figures(work, 2.0, 4, half)["perf/mfu/actor"] == pytest.approx(0.5)
    assert "perf/mfu/actor" not in speed_figures(work_figures(None, [10]), 1.0, 1, 1e12)
    assert speed_figures({}, 1.0) == {}


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        (list(range(100)), 0.0),
        ([7] * 104, 100 / 101),
        ([1, 2, 3, 4] * 2, 1 / 5),
        (list(range(50)) * 2, 47 / 97),
    ],
)
def test_repetition_is_the_share_of_runs_of_four_that_occurred_before(ids, share):
    assert repeated_share(np.array(ids, np.int32)) == pytest.approx(share)


def test_runs_of_large_ids_are_kept_apart():
    ids = np.random.default_rng(0).integers(0, 250_000, 20_000).astype(np.int32)
    assert repeated_share(ids) == 0
