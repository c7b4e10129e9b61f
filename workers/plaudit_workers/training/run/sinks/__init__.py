"""Write the figures of each step: to ``steps.jsonl`` always, elsewhere by ``trainer.sinks``. Called by the conductor.

All get the same dictionary, with the step as x axis. ``steps.jsonl`` and what reads it belong to
``plaudit_metrics.sources.history``: a step that is done again after a resume is a second line with a higher
incarnation. What a sink makes of such a step is said in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from plaudit_wire.errors import RefusedError
from plaudit_wire.records import StepRecord
from plaudit_workers.training.run.sinks.configuration import Configuration
from plaudit_workers.training.run.sinks.mlflow_runs import MLflow
from plaudit_workers.training.run.sinks.sink import Sink
from plaudit_workers.training.run.sinks.steps_file import StepsFile
from plaudit_workers.training.run.sinks.tensorboard_events import TensorBoard
from plaudit_workers.training.run.sinks.weights_and_biases import WeightsAndBiases

SINKS: dict[str, Callable[[Path, Configuration], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""``trainer.sinks`` → constructor of the sink, given the run's folder and configuration."""


class Sinks:
    """Hold all sinks of a run.

    Raises:
        RefusedError: a sink is unknown, its package is not installed, or it cannot be reached as set up.
    """

    def __init__(
        self, run_folder: Path, names: Sequence[str] = (), settings: Configuration = MappingProxyType({})
    ) -> None:
        unknown = [name for name in names if name not in SINKS]
        if unknown:
            raise RefusedError(
                f"trainer.sinks names {', '.join(unknown)}, which this version cannot write to; it knows "
                f"{', '.join(SINKS)} (steps.jsonl is always written)"
            )
        self._sinks: list[Sink] = [
            StepsFile(run_folder),
            *(SINKS[name](run_folder, settings) for name in dict.fromkeys(names)),
        ]

    def write(self, record: StepRecord, samples: Path | None = None) -> None:
        """Write one step, and its stored samples if they are kept, to every sink, ``steps.jsonl`` first."""
        for sink in self._sinks:
            sink.write(record, samples)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()
