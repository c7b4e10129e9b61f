"""Job files of a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Writes text or plain data as a job file."""

    def write(job: str | dict[str, Any], name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
        return path

    return write
