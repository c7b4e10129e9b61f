"""``tensorboard``: scalars in ``<run folder>/tensorboard/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plaudit_wire.records import StepRecord
from plaudit_workers.training.run.sinks.sink import package_of


class TensorBoard:
    """Write scalars. After a resume its first step hides what earlier processes wrote from there on.

    Raises:
        RefusedError: the extra is not installed.
    """

    def __init__(self, run_folder: Path, _: object = None) -> None:
        package_of("tensorboard", "tensorboard")
        self._writer_of = package_of("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._folder = str(run_folder / "tensorboard")
        self._writer: Any = None

    def write(self, record: StepRecord, _: Path | None = None) -> None:
        """Write the figures of one step."""
        if self._writer is None:
            self._writer = self._writer_of(self._folder, purge_step=record.step)
        for name, value in record.statistics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.closed)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()
