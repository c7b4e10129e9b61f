"""Programs that fail before their first turn: each sample ends typed, none counts as zero, none is trained or lost."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytestmark = pytest.mark.timeout(420)

PROGRAM = '''
import os
import pathlib
import signal
import time

from openai import OpenAI


def number_in_group(group):
    """The samples of a group are not told apart: each takes the first number that is free."""
    folder = pathlib.Path(os.environ["NUMBERS"])
    for number in range(100):
        try:
            os.close(os.open(folder / f"{group}-{number}", os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            continue


def main(prompt):
    number = number_in_group(prompt["group"])
    if number == 0:
        raise KeyError("lost before the first turn")
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        time.sleep(600)
    if number == 3:
        return 0.75  # without a request: a reward of nothing
    OpenAI().chat.completions.create(model="any", messages=prompt["messages"])
    return 0.25 * number
'''
STEPS, PROMPTS, SAMPLES = 2, 4, 6
NUM_GROUPS = STEPS * PROMPTS
FAILURES = {
    "lost before the first turn": "data_error",
    "was killed by SIGKILL": "infra_error",
    "took longer than 10 s": "timeout",
    "it made no request": "data_error",
}
"""Part of the reason → outcome."""


def stored_rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "samples").glob("*.parquet"))
    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


def test_programs_that_fail_before_their_first_turn_are_typed_and_never_trained(
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    plaudit_run: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(example("10-agent"), tmp_path / "job")
    (folder / "my_program.py").write_text(PROGRAM.replace('os.environ["NUMBERS"]', repr(str(tmp_path / "numbers"))))
    (tmp_path / "numbers").mkdir()
    job = change_job(
        folder / "job.yaml",
        algorithm__steps=STEPS,
        algorithm__promptsPerStep=PROMPTS,
        algorithm__samplesPerPrompt=SAMPLES,
        rollout__engine__arguments={"turns": ["It is 4 degrees."]},
        rollout__agent={
            "kind": "endpoint",
            "path": "my_program.py",
            "function": "main",
            "timeoutSeconds": 10,
            "maxConcurrentSamples": 24,
        },
        reward__maxFailedShare=1,
        reward__minSamplesPerGroup=1,
    )
    finished = plaudit_run(job)
    assert finished.exit_code == 0, finished.output

    ledger = finished.ledger
    assert (ledger["problems"], ledger["duplicates"], ledger["open"]) == ([], 0, 0)
    assert (ledger["admitted"], ledger["trained"], ledger["dropped"]) == (NUM_GROUPS, NUM_GROUPS, 0)

    rows = stored_rows(finished.folder)
    assert sorted((row["group"], row["index"]) for row in rows) == [
        (group, index) for group in sorted({row["group"] for row in rows}) for index in range(SAMPLES)
    ]
    assert len(rows) == NUM_GROUPS * SAMPLES
    failed = [row for row in rows if row["outcome"] != "scored"]
    assert [row["score"] for row in failed] == [None] * NUM_GROUPS * len(FAILURES)
    for part, outcome in FAILURES.items():
        of_kind = [row for row in failed if part in row["reason"]]
        assert [row["outcome"] for row in of_kind] == [outcome] * NUM_GROUPS
        for row in of_kind:
            assert json.loads(row["agent_json"])["failure"] == {"outcome": outcome, "reason": row["reason"]}
    scored = [row["score"] for row in rows if row["outcome"] == "scored"]
    assert Counter(scored) == {1.0: NUM_GROUPS, 1.25: NUM_GROUPS}

    for step in finished.steps:
        figures = step.statistics
        assert figures["training/sequences"] == PROMPTS * (SAMPLES - len(FAILURES))
        assert (figures["reward/min"], figures["critic/score/min"]) == (1.0, 1.0)
        counts = Counter(FAILURES.values())
        for outcome in ("data_error", "infra_error", "timeout"):
            assert figures[f"reward_pipeline/outcome/{outcome}"] == PROMPTS * counts[outcome]
