"""Take the tasks of an environment's server as a job's data (``data.train.split``, ``data.validation.split``)."""

from __future__ import annotations

from pathlib import Path

from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import TrainDataSpec, ValidationDataSpec
from plaudit_workers.agents.processes import environment_server


def data_splits(job: RLJob) -> dict[str, TrainDataSpec | ValidationDataSpec]:
    """Return ``train`` and ``validation``, where they are splits of the server's tasks."""
    sections = job.spec.data.sections if job.spec.trains else {}
    return {name: section for name, section in sections.items() if section.split}


def with_server_tasks(job: RLJob, folder: Path) -> RLJob:
    """Return the job with each split of tasks as a file of rows in ``folder``; the job itself if it names none.

    Raises ``ConfigurationError`` if the server does not give them.
    """
    splits = data_splits(job)
    if not splits:
        return job
    from plaudit_workers.agents.open_reward import write_tasks  # imports aiohttp

    server, sections = environment_server(job), {}
    assert server is not None  # a rule of the job
    for name, section in splits.items():
        path = folder / f"tasks-{name}.jsonl"
        write_tasks(server, section.split, path)
        sections[name] = section.model_copy(update={"path": str(path)})
    data = job.spec.data.model_copy(update=sections)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"data": data})})
