"""Define the protocol of sinks, and functions that several of them share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from plaudit_metrics.sources.history import FILE_NAME, decode_step
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import StepRecord


class Sink(Protocol):
    """Receive the figures of closed steps."""

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step; on return it is on disk or queued for sending.

        Args:
            samples: its stored samples, of which some sinks show a few; None: they are not kept.
        """
        ...

    def close(self) -> None:
        """Close the sink; called once."""
        ...


def package_of(sink: str, module: str) -> Any:
    """Import a module that a sink needs.

    Raises:
        RefusedError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RefusedError(
            f"trainer.sinks names {sink}, which is not installed; install plaudit-workers[{sink}], or take it out of "
            "the list"
        ) from error


def newest_written(run_folder: Path) -> int:
    """Return the highest step that any incarnation of the run has recorded; -1 if there is none."""
    path = run_folder / FILE_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    return max((record.step for line in lines if (record := decode_step(line)) is not None), default=-1)
