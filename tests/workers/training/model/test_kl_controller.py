"""The adaptive coefficient: it follows its target in real updates, and a resumed run continues with it."""

from __future__ import annotations

import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.policy_model import build_model

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None]]
SCORED = 7
COEFFICIENT = "actor/reward_kl_penalty_coeff"


def backend(make_job, folder, adaptive):
    loss = {"klCoefficient": 0.05, "klIn": "reward", "klEstimator": "k2", "adaptiveKl": adaptive}
    job = make_job({"algorithm": {"loss": loss, "optimizer": {"learningRate": 0.05}}})
    return TorchBackend(job, build_model(job), folder)


def step(trainer, make_groups, number):
    figures = trainer.update(make_groups(SCORES, seed=number))
    trainer.publish(PolicyVersion(1, number))
    return figures


def test_it_falls_below_the_target_and_grows_above_it(make_job, make_groups, tmp_path):
    trainer = backend(make_job, tmp_path, {"target": 1e-3, "horizon": 70})
    figures = [step(trainer, make_groups, number) for number in range(1, 4)]
    used = [each[COEFFICIENT] for each in figures]
    # The first update samples nothing that differs from the starting weights; later ones are far above the target.
    assert figures[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert used[:2] == pytest.approx([0.05, 0.05 * (1 - 0.2 * SCORED / 70)], rel=1e-3)
    assert figures[1]["actor/reward_kl_penalty"] > 2e-3
    assert used[2] == pytest.approx(used[1] * (1 + 0.2 * SCORED / 70))


def test_without_it_the_coefficient_stays(make_job, make_groups, tmp_path):
    trainer = backend(make_job, tmp_path, None)
    assert {step(trainer, make_groups, number)[COEFFICIENT] for number in (1, 2)} == {0.05}


def test_a_resumed_run_continues_with_its_coefficient(make_job, make_groups, tmp_path):
    settings = {"target": 0.5, "horizon": 20}
    through = backend(make_job, tmp_path / "through", settings)
    step(through, make_groups, 1)
    path = through.save(1, {"step": 1, "incarnation": 1})
    through.finish_saving()
    resumed = backend(make_job, tmp_path / "resumed", settings)
    extra = resumed.load(path)
    assert (extra["step"], extra["incarnation"]) == (1, 1)
    expected, found = (trainer.update(make_groups(SCORES, seed=2)) for trainer in (through, resumed))
    assert found[COEFFICIENT] == expected[COEFFICIENT] != 0.05
    for trainer in (through, resumed):
        trainer.close()


def test_a_job_that_fixes_the_coefficient_again_ignores_the_stored_one(make_job, make_groups, tmp_path):
    adaptive = backend(make_job, tmp_path / "adaptive", {"target": 0.5, "horizon": 20})
    step(adaptive, make_groups, 1)
    path = adaptive.save(1, {"incarnation": 1})
    adaptive.finish_saving()
    fixed = backend(make_job, tmp_path / "fixed", None)
    fixed.load(path)
    assert fixed.update(make_groups(SCORES, seed=2))[COEFFICIENT] == 0.05
