"""``wandb``: a run of Weights & Biases with the id of ours, so that a resume continues it.

Set up by its own environment variables: ``WANDB_API_KEY``, ``WANDB_PROJECT`` (default ``plaudit``), ``WANDB_ENTITY``,
``WANDB_MODE=offline`` (files in the run's folder, for ``wandb sync``). It sends from a process of its own: a server
that is slow or away holds up no step. A point that is there cannot be replaced, so a step that is done again keeps its
first figures there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from plaudit_wire.errors import RefusedError
from plaudit_wire.records import StepRecord
from plaudit_workers.training.run.sinks.configuration import Configuration
from plaudit_workers.training.run.sinks.sample_table import sample_table
from plaudit_workers.training.run.sinks.sink import newest_written, package_of


class WeightsAndBiases:
    """Log every step once with a table of a few of its samples, and the job's configuration.

    Args:
        run_folder: its name is the run's id.

    Raises:
        RefusedError: the extra is not installed, or there is no key.
    """

    def __init__(self, run_folder: Path, settings: Configuration) -> None:
        wandb = package_of("wandb", "wandb")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "plaudit"),
                id=run_folder.name,
                name=run_folder.name,
                resume="allow",
                config=dict(settings),
                allow_val_change=True,
                dir=str(run_folder),
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except wandb.errors.Error as error:
            raise RefusedError(
                f"trainer.sinks names wandb, which refuses: {error}. Set WANDB_API_KEY, or WANDB_MODE=offline, or take "
                "it out of the list"
            ) from error
        self._table_of: Any = wandb.Table
        self._newest = newest_written(run_folder)

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step; its samples are the table ``samples``."""
        if record.step <= self._newest:
            return
        shown: dict[str, Any] = {}
        if table := sample_table(samples):
            shown["samples"] = self._table_of(columns=table.columns, data=table.rows, allow_mixed_types=True)
        self._run.log(record.statistics | shown, step=record.step, commit=True)  # else it waits for the next step

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()
