"""The graders of TRL and verl on our labelled mathematical answers, for the table of docs/rewards/rules.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trainer_environments import CACHE, python

HERE = Path(__file__).parent
CASES = HERE.parent / "reward" / "rules" / "math_cases.jsonl"
TOWERS = ("9^", "2^{2", "10^{10", "7^{7", "999999")
"""Parts of answers that only use up the time limits of graders."""


@pytest.mark.parametrize("trainer_name", ["trl", "verl"])
def test_trainers_own_graders_refuse_right_answers_and_accept_wrong_ones(trainer_name: str, tmp_path: Path) -> None:
    interpreter = python(trainer_name)
    if interpreter is None:
        pytest.skip(f"the environment {trainer_name} is not built in {CACHE}: make trainers-build")
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    cases = [case for case in cases if not any(part in case["response"] for part in TOWERS)]
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(f"{json.dumps(case)}\n" for case in cases))
    command = [str(interpreter), str(HERE / "programs" / "grade_math.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    graded: dict[str, list[float | None]] = json.loads(done.stdout.splitlines()[-1])
    if not graded:
        pytest.skip(f"the environment {trainer_name} has none of the graders' packages")
    for name, values in graded.items():
        refused, accepted = _errors(cases, values)
        print(f"{name}: {refused} right answers refused, {accepted} wrong ones accepted, of {len(cases)}")
        assert len(values) == len(cases)
        assert refused > 0
        assert accepted > 0


def _errors(cases: list[dict[str, Any]], values: list[float | None]) -> tuple[int, int]:
    pairs = [(case["want"] == 1, (value or 0) > 0) for case, value in zip(cases, values, strict=True)]
    return sum(right and not given for right, given in pairs), sum(given and not right for right, given in pairs)
