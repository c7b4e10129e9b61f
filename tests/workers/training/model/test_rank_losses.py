"""Every loss, correction, aggregation and advantage, and adapters: two sharded ranks compute the gradients of one.

Two gloo ranks start once and go through all cases. The second update of a case begins with moved weights, so its
proximal policy is another one than the policy that is trained.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from forked_ranks import errors_in, exit_codes, start_ranks
from plaudit_job.spec.algorithm import AlgorithmSpec, LossSpec
from plaudit_job.spec.section import choices
from plaudit_workers.launch.redis import free_port
from plaudit_workers.training.model.batch import make_batch
from rank_losses import run_cases

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None], [0.2, 0.4, 0.6, 0.8], [1.0, 1.0, 1.0]]
OWN_LOSS = "def mine(tokens, anchor, settings):\n    return -(tokens.logprobs - anchor).tanh() * tokens.advantages\n"

CASES = {
    "ppo": {"loss": {"correction": "none", "clipRatioC": 0.0}},
    "ppo, dual clip": {"loss": {"correction": "none", "clipRatioC": 1.3}},
    "ppo, tis by token": {"loss": {"correction": "tis"}, "advantage": "rloo"},
    "ppo, tis by sequence": {"loss": {"correction": "tis", "correctionLevel": "sequence", "aggregation": "sequence"}},
    "ppo, decoupled": {"loss": {"correction": "decoupled", "correctionCap": 9.0, "correctionFloor": 0.1}},
    "ppo, decoupled by geometric mean": {
        "loss": {"correction": "decoupled", "correctionLevel": "geometric", "correctionCap": 9.0}
    },
    "ppo, reject": {
        "loss": {"correction": "reject", "correctionLevel": "geometric", "correctionCap": 9.0, "correctionFloor": 0.1}
    },
    "Dr. GRPO": {"loss": {"aggregation": "constant"}, "advantage": "drGrpo"},
    "REINFORCE++": {"loss": {"correction": "none"}, "advantage": "reinforcePlusPlus"},
    "REINFORCE++ with a baseline": {"loss": {"correction": "none"}, "advantage": "reinforcePlusPlusBaseline"},
    "gspo": {"loss": {"kind": "gspo", "aggregation": "sequence", "clipLow": 3e-4, "clipHigh": 4e-4}},
    "cispo": {"loss": {"kind": "cispo", "correction": "none"}},
    "dppo": {"loss": {"kind": "dppo", "correction": "none", "clipLow": 0.05, "clipHigh": 0.05}},
    "k1": {"loss": {"klCoefficient": 0.1, "klEstimator": "k1", "aggregation": "sequence"}},
    "k2": {"loss": {"klCoefficient": 0.1, "klEstimator": "k2", "entropyCoefficient": 0.05}},
    "k3": {"loss": {"klCoefficient": 0.1, "klEstimator": "k3", "aggregation": "constant"}},
    "own": {"loss": {"kind": "python", "function": "mine"}},
    "adapters": {"loss": {"correction": "decoupled"}},
    "adapters, gspo and divergence": {"loss": {"kind": "gspo", "klCoefficient": 0.1, "entropyCoefficient": 0.05}},
}


def algorithm(name: str, own_loss: Path) -> dict:
    case = {"promptsPerStep": 4, "miniBatchesPerStep": 2, **CASES[name]}
    return case | {"loss": case["loss"] | ({"path": str(own_loss)} if name == "own" else {})}


def trainer(name: str) -> dict:
    return {"strategy": "fsdp2", "ranks": 2, "microBatchTokens": 24} | (
        {"lora": {"rank": 4, "alpha": 8.0}} if "adapters" in name else {}
    )


def test_the_cases_are_all_that_a_job_can_choose():
    def chosen(section: str, field: str, default: object) -> set:
        cases = [case["loss"] if section == "loss" else case for case in CASES.values()]
        return {case.get(field, default) for case in cases}

    for field, alias in (("kind", "kind"), ("correction", "correction"), ("correction_level", "correctionLevel")):
        options = LossSpec.model_fields[field]
        assert chosen("loss", alias, options.default) == set(choices(options))
    for field, alias in (("aggregation", "aggregation"), ("kl_estimator", "klEstimator")):
        options = LossSpec.model_fields[field]
        assert chosen("loss", alias, options.default) == set(choices(options))
    options = AlgorithmSpec.model_fields["advantage"]
    assert chosen("algorithm", "advantage", options.default) == set(choices(options))


@pytest.mark.timeout(600)
def test_two_ranks_compute_the_gradients_of_one(make_job, make_groups, tmp_path):
    own_loss = tmp_path / "own.py"
    own_loss.write_text(OWN_LOSS)
    # The second batch gives each rank a single sequence.
    groups = [make_groups(SCORES, seed=3), make_groups([[0.0, 1.0]], seed=4)]
    cases = {}
    for name in CASES:
        job = make_job({"algorithm": algorithm(name, own_loss), "trainer": trainer(name)})
        batches = [make_batch(each, job.spec.algorithm.advantage, 0.9) for each in groups]
        cases[name] = (job.model_dump_json(by_alias=True), batches, free_port())
    (tmp_path / "cases.pickle").write_bytes(pickle.dumps(cases))
    ranks = [rank for number in (2, 1) for rank in start_ranks(run_cases, tmp_path, number)]
    assert exit_codes(ranks, within_s=570) == [0, 0, 0], errors_in(tmp_path)  # every loss: minutes beside a cluster

    of_two, of_one = (pickle.loads((tmp_path / f"results-{number}.pickle").read_bytes()) for number in (2, 1))
    clipped = set()
    for name in CASES:
        assert len(of_one[name]) == len(of_two[name]) == 2
        for two, one in zip(of_two[name], of_one[name], strict=True):
            (figures, gradients, divergences), (expected_figures, expected, expected_divergences) = two, one
            assert figures == pytest.approx(expected_figures, rel=1e-4, abs=1e-5), name
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            assert largest > 0, name
            # Float32 sums in another order: a hundred-thousandth of the largest gradient.
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5 * largest)
            for mine, theirs in zip(divergences, expected_divergences, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
            clipped |= {name} if figures["actor/pg_clipfrac"] else set()
    assert clipped >= {"ppo", "gspo", "cispo", "dppo"}
