"""Bad input: one clear message, exit code 2, nothing left running."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit_workers.cli import main

EXAMPLE = "01-copy-digits"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Refused]:
    """Runs a job, in this process, that must be refused before anything starts; gives its message."""
    workers = logging.getLogger("plaudit_workers")
    level = workers.level  # ``plaudit run`` keeps its own terminal quiet

    def run(job: Path) -> str:
        capsys.readouterr()
        assert main(["run", str(job), "--runs-folder", str(tmp_path / "runs")]) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        return message

    yield run
    workers.setLevel(level)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm__stepz": 3}, ["spec.algorithm.stepz"]),
        ({"model__source": "no/such/folder"}, ["spec.model.source", "no/such/folder"]),
        ({"data__train__path": "nowhere.parquet"}, ["spec.data.train.path", "nowhere.parquet"]),
        ({"transport": {"url": "redis://127.0.0.1:1/0"}}, ["redis://127.0.0.1:1/0", "cannot be reached"]),
    ],
    ids=["unknown field", "missing model", "missing data", "unreachable Redis"],
)
def test_a_bad_field_is_named_with_its_value(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    refused: Refused,
    changes: dict[str, Any],
    words: list[str],
) -> None:
    message = refused(change_job(example(EXAMPLE) / "job.yaml", **changes))
    assert all(word in message for word in words), message


def test_a_wrong_password_is_refused_with_the_remedy(
    example: Callable[[str], Path], change_job: Callable[..., Path], refused: Refused, redis_server: Any
) -> None:
    job = change_job(example(EXAMPLE) / "job.yaml", transport={"url": redis_server.url})
    assert "password" in refused(job)


def test_a_reward_file_with_a_syntax_error_is_reported_with_its_line(
    example: Callable[[str], Path], change_job: Callable[..., Path], refused: Refused, tmp_path: Path
) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def compute_score(:\n    return 1\n")
    scorer = {"name": "broken", "kind": "python", "python": {"path": str(reward), "function": "compute_score"}}
    message = refused(change_job(example(EXAMPLE) / "job.yaml", reward__scorers=[scorer]))
    assert "broken.py" in message
    assert "line 1" in message or ":1" in message


def test_a_missing_job_file_is_named_and_the_process_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "absent.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_named(
    example: Callable[[str], Path], refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert str(tmp_path / "runs") in refused(example(EXAMPLE) / "job.yaml")


def test_every_example_validates(example: Callable[[str], Path]) -> None:
    for name in ("01-copy-digits", "02-verl-reward", "03-slow-rewards"):
        for job in sorted(example(name).glob("*.yaml")):
            if yaml.safe_load(job.read_text()).get("kind") == "RLJob":
                assert main(["validate", str(job)]) == 0, job
