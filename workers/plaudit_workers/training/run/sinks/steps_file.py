"""``steps.jsonl``."""

from __future__ import annotations

from pathlib import Path

from plaudit_metrics.sources.history import FILE_NAME, append_step
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import StepRecord
from plaudit_workers.whole_files import is_full


class StepsFile:
    """Append steps to ``steps.jsonl``."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / FILE_NAME

    def write(self, record: StepRecord, _: Path | None = None) -> None:
        """Append one step to the file.

        Raises:
            RefusedError: the disk is full.
        """
        try:
            append_step(self._path, record)
        except OSError as error:
            if is_full(error):
                raise RefusedError(f"no room to append to {self._path}; make room, then start again") from error
            raise

    def close(self) -> None:
        """Do nothing: every step is on disk already."""
