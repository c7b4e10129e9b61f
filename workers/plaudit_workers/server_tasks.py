"""Take the tasks of an environment's server as a job's data (``data.train.split``, ``data.validation.split``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import TrainDataSpec, ValidationDataSpec
from plaudit_workers.agents.processes import environment_server


def data_splits(job: RLJob) -> Iterator[tuple[str, TrainDataSpec | ValidationDataSpec]]:
    """Yield, after the field that names it, each section of a job's data that is a split of the server's tasks."""
    if not job.spec.trains:
        return
    for name, section in (("train", job.spec.data.train), ("validation", job.spec.data.validation)):
        if section is not None and section.split:
            yield f"spec.data.{name}.split", section


def with_server_tasks(job: RLJob, folder: Path) -> RLJob:
    """Return the job with each split of tasks as a file of rows in ``folder``; the job itself if it names none.

    Raises ``ConfigurationError`` if the server does not give them.
    """
    splits = dict(data_splits(job))
    if not splits:
        return job
    from plaudit_workers.agents.open_reward import write_tasks  # imports aiohttp

    server, sections = environment_server(job), {}
    assert server is not None  # a rule of the job
    for field, section in splits.items():
        name = field.split(".")[2]
        path = folder / f"tasks-{name}.jsonl"
        write_tasks(server, section.split, path)
        sections[name] = section.model_copy(update={"path": str(path)})
    data = job.spec.data.model_copy(update=sections)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"data": data})})
