"""Sequence parallelism: ranks that compute the same rows together, and replicas, give the gradients of one rank.

Four gloo ranks start once and go through all cases, beside one rank alone.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, MistralConfig, PretrainedConfig

from forked_ranks import errors_in, exit_codes, start_ranks
from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.redis import free_port
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from rank_losses import run_cases

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None], [0.2, 0.4, 0.6, 0.8], [1.0, 1.0, 1.0]]
SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
MODELS: dict[str, PretrainedConfig] = {
    "windows": MistralConfig(**SIZES, sliding_window=4),
    # Its logits change behind the head, which then keeps them whole.
    "capped": Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=None, final_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
}
LORA = {"rank": 4, "alpha": 8.0}
CASES = {
    "ppo, two rows at a time": {
        "loss": {"correction": "decoupled", "correctionCap": 9.0},
        "trainer": {"sequenceParallelSize": 2, "activationCheckpointing": "layers"},
    },
    "gspo, divergence and entropy, one row at a time": {
        "loss": {"kind": "gspo", "aggregation": "sequence", "klCoefficient": 0.1, "entropyCoefficient": 0.05},
        "trainer": {"sequenceParallelSize": 4},
    },
    "cispo, adapters, in replicas": {
        "loss": {"kind": "cispo", "correction": "none", "klCoefficient": 0.1},
        "trainer": {"sequenceParallelSize": 2, "fsdpSize": 2, "lora": LORA, "activationCheckpointing": "layers"},
    },
    "sliding windows, one key/value head": {
        "model": "windows",
        "loss": {"correction": "none"},
        "trainer": {"sequenceParallelSize": 4, "activationCheckpointing": "selective"},
    },
    "logits changed behind the head, every rank a replica": {
        "model": "capped",
        "loss": {"correction": "none", "entropyCoefficient": 0.05},
        "trainer": {"sequenceParallelSize": 2, "fsdpSize": 1},
    },
}


@pytest.fixture(scope="module")
def models(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder / name)
    return folder


@pytest.mark.timeout(600)
def test_ranks_that_share_rows_compute_the_gradients_of_one(make_job, make_groups, models, tmp_path):
    # The second batch has a single sequence: with two rows at a time, one of them is empty.
    groups = [make_groups(SCORES, seed=3), make_groups([[0.0, 1.0]], seed=4)]
    cases: dict[int, dict] = {1: {}, 4: {}}
    for name, case in CASES.items():
        model = {"model": {"source": str(models / case["model"])}} if "model" in case else {}
        algorithm = {"promptsPerStep": 4, "miniBatchesPerStep": 2, "loss": case["loss"]}
        parallel = {"strategy": "fsdp2", "ranks": 4, "microBatchTokens": 24, **case["trainer"]}
        # Rows of the same sequences, since padding within a row changes the rounding.
        alone = {"lora": parallel.get("lora"), "microBatchTokens": 24 * parallel["sequenceParallelSize"]}
        for num_ranks, trainer in ((1, alone), (4, parallel)):
            job = make_job({**model, "algorithm": algorithm, "trainer": trainer})
            batches = [make_batch(each, job.spec.algorithm.advantage, 0.9) for each in groups]
            cases[num_ranks][name] = (job.model_dump_json(by_alias=True), batches, free_port())
    for num_ranks, own in cases.items():
        (tmp_path / str(num_ranks)).mkdir()
        (tmp_path / str(num_ranks) / "cases.pickle").write_bytes(pickle.dumps(own))
    ranks = [rank for number in cases for rank in start_ranks(run_cases, tmp_path / str(number), number)]
    assert exit_codes(ranks) == [0] * 5, [errors_in(tmp_path / str(number)) for number in cases]

    of_one, of_four = (
        pickle.loads((tmp_path / str(number) / f"results-{number}.pickle").read_bytes()) for number in cases
    )
    for name in CASES:
        assert len(of_one[name]) == len(of_four[name]) == 2
        for four, one in zip(of_four[name], of_one[name], strict=True):
            (figures, gradients, divergences), (expected_figures, expected, expected_divergences) = four, one
            assert figures == pytest.approx(expected_figures, rel=1e-4, abs=1e-5), name
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            assert largest > 0, name
            # Float32 sums in another order: a hundred-thousandth of the largest gradient.
            torch.testing.assert_close(
                gradients, expected, rtol=1e-4, atol=1e-5 * largest, msg=lambda found, name=name: f"{name}: {found}"
            )
            for mine, theirs in zip(divergences, expected_divergences, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_heads_that_ranks_cannot_share_are_refused_at_the_start(make_job):
    trainer = {"strategy": "fsdp2", "ranks": 6, "sequenceParallelSize": 6}
    with pytest.raises(RefusedError, match=r"sequenceParallelSize: 6 does not divide the model's 4 .* Set it to 2"):
        build_model(make_job({"trainer": trainer}), 0, 6)
