"""Run the GPUs of one pod in a vLLM engine that spans several pods: what ``vllm serve --headless`` runs."""

from __future__ import annotations

from typing import Any

from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.rollout.engines.protocol import EngineFailedError
from plaudit_workers.rollout.engines.vllm_arguments import VllmSettings, engine_arguments, prepare_environment
from plaudit_workers.rollout.engines.vllm_platform import refuse_hidden_gpus
from plaudit_workers.rollout.replica import ReplicaMember


class VllmPart:
    """Run an ``EnginePart``: worker processes that take their work from the leader's engine.

    Args:
        settings: as those of the leader, but for the rank.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._executor: Any = None
        self._closed = False

    @classmethod
    def from_job(cls, job: RLJob, member: ReplicaMember) -> VllmPart:
        """Build the part of one pod."""
        return cls(VllmSettings.from_job(job, member))

    def start(self) -> None:
        """Start the worker processes; return when those of all pods have met."""
        refuse_hidden_gpus()
        prepare_environment(self._settings.source)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = engine_arguments(self._settings).create_engine_config(headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def wait(self) -> None:
        """Return after ``close``; raise when a worker process has ended by itself."""
        self._executor.start_worker_monitor(inline=True)
        if not self._closed:
            raise EngineFailedError("a worker process of this pod's part of the engine ended")

    def close(self) -> None:
        """End the worker processes."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown()
