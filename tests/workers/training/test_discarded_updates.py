"""Updates without a finite gradient: the log names the cause, and a run that does not learn fails."""

from __future__ import annotations

import pytest

from plaudit_wire.errors import JobFailedError
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.model.policy_model import build_model

SOURCE = """
from pathlib import Path

def mine(tokens, anchor, settings):
    good = -tokens.logprobs * tokens.advantages
    return {broken} if Path(__file__).with_name("broken").exists() else good
"""
LOSSES = {"nan": "good * float('nan')", "steep": "(tokens.logprobs - tokens.logprobs.detach()).abs().sqrt()"}
SCORES = [[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]]


def opened(make_job, folder, source, **algorithm):
    """A backend whose own loss passes its trial at the start and is broken from then on."""
    (folder / "loss.py").write_text(SOURCE.format(broken=LOSSES[source]))
    loss = {"kind": "python", "path": str(folder / "loss.py"), "function": "mine"}
    job = make_job({"algorithm": algorithm | {"loss": loss}})
    backend = TorchBackend(job, build_model(job), folder)
    (folder / "broken").touch()
    return backend


@pytest.mark.parametrize(("source", "cause"), [("nan", "the loss is not finite"), ("steep", "its gradient is not")])
def test_a_run_whose_own_loss_has_no_finite_gradient_fails_and_names_its_file(
    make_job, make_groups, tmp_path, source, cause, caplog
):
    backend = opened(make_job, tmp_path, source, steps=100)
    for _ in range(4):
        assert backend.update(make_groups(SCORES))["actor/skipped_updates"] == 1
    with pytest.raises(JobFailedError, match=rf"5 updates in a row were discarded.*{cause}.*loss\.path .*loss\.py"):
        backend.update(make_groups(SCORES))
    assert caplog.text.count("update discarded") == 5


def test_a_run_of_few_updates_cannot_end_without_any(make_job, make_groups, tmp_path):
    backend = opened(make_job, tmp_path, "nan", steps=1, miniBatchesPerStep=1, epochs=2)
    with pytest.raises(JobFailedError, match="2 updates in a row"):
        backend.update(make_groups(SCORES))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_an_update_that_is_applied_begins_the_count_anew(make_job, make_groups, tmp_path):
    job = make_job({"algorithm": {"steps": 100, "advantage": "drGrpo"}})
    backend = TorchBackend(job, build_model(job), tmp_path)
    huge = [[1e39, 1.0, 0.0]]
    for scores in [huge, huge, huge, huge, SCORES, huge, [[1.0, 1.0]], huge, huge, huge]:
        backend.update(make_groups(scores))
    with pytest.raises(JobFailedError, match=r"an advantage is not finite in float32 \(rewards from 0 to 1e\+39\)"):
        backend.update(make_groups(huge))
