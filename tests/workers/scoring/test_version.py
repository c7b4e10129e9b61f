"""The version of a job's scoring."""

from pathlib import Path
from typing import Any

import yaml

from builders import job_document
from plaudit_job.load import load_job
from plaudit_workers.service.build import scoring_version


def version(folder: Path, **reward: Any) -> str:
    scorers = [{"name": "mine", "kind": "python", "python": {"path": "reward.py"}}]
    job = job_document("scores", reward={"scorers": scorers, **reward})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return scoring_version(load_job(folder / "job.yaml"))


def test_a_changed_file_or_scorer_gives_another_version_and_the_number_of_workers_does_not(tmp_path: Path):
    (tmp_path / "reward.py").write_text("def compute_score(sample): return 0.0\n")
    first = version(tmp_path)
    assert version(tmp_path, workers={"replicas": 7}, gateway={"replicas": 3}) == first
    assert version(tmp_path, onFailure="zero") != first
    (tmp_path / "reward.py").write_text("def compute_score(sample): return 1.0\n")
    assert version(tmp_path) != first


def test_a_changed_module_that_the_file_imports_gives_another_version_and_an_unused_one_does_not(tmp_path: Path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(sample):\n    from parts import rules\n    return rules.of()\n"
    )
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "rules.py").write_text("from . import numbers\n")
    for name in ("parts/numbers.py", "unused.py"):
        (tmp_path / name).write_text("one = 1\n")
    first = version(tmp_path)
    (tmp_path / "unused.py").write_text("one = 2\n")
    assert version(tmp_path) == first
    (tmp_path / "parts" / "numbers.py").write_text("one = 2\n")
    assert version(tmp_path) != first


def test_the_same_files_in_another_folder_have_the_same_version(tmp_path: Path):
    versions = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("def compute_score(sample): return 0.0\n")
        versions.add(version(tmp_path / name))
    assert len(versions) == 1
