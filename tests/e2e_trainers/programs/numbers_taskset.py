"""A verifiers taskset of 100 rows without rewards of its own: the service scores them."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["NumbersTaskset"]


class NumbersData(vf.TaskData):
    """One row."""

    data_source: str = "numbers"
    ground_truth: int = 0


class NumbersTask(vf.Task[NumbersData]):
    """One question."""


class NumbersTaskset(vf.Taskset[NumbersTask, vf.TasksetConfig]):
    """Rows 0 to 99."""

    def load(self) -> Iterable[NumbersTask]:
        """Yield the tasks."""
        for row in range(100):
            yield NumbersTask(NumbersData(prompt=f"row {row}", ground_truth=row), self.config.task)
