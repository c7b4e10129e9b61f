"""The service's memory does not grow with the number of steps: of many samples each, and of kept steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.bench  # 16 s of a core
@pytest.mark.parametrize(
    ("num_samples", "steps", "first", "kept"),
    [(5_000, 12, 8, [8, 12]), (112, 560, 505, [500, 500])],
    ids=["large steps", "many steps"],
)
def test_memory_is_bounded(num_samples: int, steps: int, first: int, kept: list[int]) -> None:
    program = Path(__file__).with_name("memory_program.py")
    command = [sys.executable, str(program), str(num_samples), str(steps), str(first)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    looks = [[int(number) for number in line.split()] for line in printed.splitlines()]
    (before_mib, _), (after_mib, _) = looks
    assert [number for _, number in looks] == kept
    assert after_mib < 1.1 * before_mib
    assert after_mib < 300
