"""Operations and speed of an update, and how much a response repeats itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from plaudit_job.model_shape import ModelShape
from plaudit_workers.training.model.batch import make_batch, repeated_share
from plaudit_workers.training.model.optimizer import speed_figures, training_flops, work_figures
from plaudit_workers.training.model.policy_model import build_model

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
