"""Where the figures of each step go: ``steps.jsonl`` always, others by ``trainer.sinks``. Called by the conductor.

``steps.jsonl`` and what reads it belong to ``plaudit_metrics.history``: a step that is done again after a resume is a
second line with a higher incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from plaudit_metrics.history import FILE_NAME, append_step
from plaudit_metrics.records import StepRecord
from plaudit_workers.process import RefusedError
from plaudit_workers.training.folder import is_full


class Sink(Protocol):
    """Takes the figures of closed steps."""

    def write(self, record: StepRecord) -> None:
        """Takes one step; it is safe on the disk, or handed on, when this returns."""
        ...

    def close(self) -> None:
        """Ends the sink; called once."""
        ...


class StepsFile:
    """Appends to ``steps.jsonl``.

    Args:
        run_folder: where it lies.
    """

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / FILE_NAME

    def write(self, record: StepRecord) -> None:
        """See ``Sink.write``.

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
        """Nothing to do: every step is on the disk already."""


class TensorBoard:
    """Writes scalars for TensorBoard to ``<run folder>/tensorboard/``.

    Args:
        run_folder: the run's folder.

    Raises:
        RefusedError: the extra is not installed.
    """

    def __init__(self, run_folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RefusedError(
                "trainer.sinks names tensorboard, which is not installed; install plaudit-workers[tensorboard], or "
                "take it out of the list"
            ) from error
        self._writer = SummaryWriter(str(run_folder / "tensorboard"))

    def write(self, record: StepRecord) -> None:
        """See ``Sink.write``. A step that is done again shows as a second point at the same step."""
        for name, value in record.statistics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.closed)
        self._writer.flush()

    def close(self) -> None:
        """See ``Sink.close``."""
        self._writer.close()


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard}
"""``trainer.sinks`` → what takes the steps, given the run's folder."""


class Sinks:
    """All sinks of a run.

    Args:
        run_folder: the run's folder.
        names: ``trainer.sinks``.

    Raises:
        RefusedError: a sink that is not there, or whose package is not installed.
    """

    def __init__(self, run_folder: Path, names: Sequence[str] = ()) -> None:
        unknown = [name for name in names if name not in SINKS]
        if unknown:
            raise RefusedError(
                f"trainer.sinks names {', '.join(unknown)}, which this version cannot write to; it knows "
                f"{', '.join(SINKS)} (steps.jsonl is always written)"
            )
        self._sinks: list[Sink] = [StepsFile(run_folder), *(SINKS[name](run_folder) for name in dict.fromkeys(names))]

    def write(self, record: StepRecord) -> None:
        """Gives one step to every sink, ``steps.jsonl`` first."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Ends them all."""
        for sink in self._sinks:
            sink.close()
