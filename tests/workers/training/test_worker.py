"""The trainer's process configures torch's GPU allocator, unless its environment does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from plaudit_workers.training.worker import prefer_expandable_segments
prefer_expandable_segments(os.environ)
import torch
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_torch_reads_the_settings_of_the_environment_or_expandable_segments(own: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    program = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(program, env=inherited | own, capture_output=True, text=True, check=True).stdout
    assert found.strip() == expected
