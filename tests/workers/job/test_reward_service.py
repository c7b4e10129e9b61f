"""A RewardService as a document: its sections are those of a job that only scores."""

from pathlib import Path
from typing import Any

import pytest

from plaudit_job.load import load_job, parse_job
from plaudit_job.problem import JobError


def service(**spec: Any) -> dict[str, Any]:
    reward = {"scorers": [{"name": "right", "kind": "rule", "rule": "gsm8k"}]}
    return {
        "apiVersion": "plaudit.dev/v1alpha1",
        "kind": "RewardService",
        "metadata": {"name": "scores"},
        "spec": {"reward": reward, **spec},
    }


def test_a_service_is_read_as_a_job_that_only_scores():
    job = parse_job(service(metrics={"traces": {"share": 0.5}}))
    assert not job.spec.trains
    assert job.kind == "RLJob"
    assert job.spec.metrics.traces.share == 0.5


@pytest.mark.parametrize("section", ["trainer", "rollout", "model", "lifecycle"])
def test_sections_of_a_training_job_are_refused(section: str):
    with pytest.raises(JobError, match=f"spec.{section}"):
        parse_job(service(**{section: {}}))


def test_rules_about_several_fields_apply(tmp_path: Path):
    scorer = {"name": "mine", "kind": "python"}
    (tmp_path / "service.yaml").write_text(str(service(reward={"scorers": [scorer]})).replace("'", '"'))
    with pytest.raises(JobError, match=r"spec.reward.scorers\[0\]"):
        load_job(tmp_path / "service.yaml")
