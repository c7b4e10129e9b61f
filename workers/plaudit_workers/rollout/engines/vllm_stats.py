"""Keep the newest figures of a vLLM engine, in place of vLLM's own loggers.

vLLM's Prometheus series cost 5 % of a small model's speed. This costs a few assignments a step; the rollout's heartbeat
carries the figures to the metrics service.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from plaudit_wire.records import EngineStatus

_NEWEST = 100


class VllmStats:
    """Stand in for vLLM's ``StatLoggerManager``. The engine's thread records, any thread reads ``status``.

    Attributes:
        status: as of the engine's newest step; None before the first.
    """

    def __init__(self) -> None:
        self.status: EngineStatus | None = None
        self._first_tokens_s: deque[float] = deque(maxlen=_NEWEST)
        self._mean_s: float | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None) -> None:
        """Keep the figures of one step."""
        if iteration_stats is not None and iteration_stats.time_to_first_tokens_iter:
            self._first_tokens_s.extend(iteration_stats.time_to_first_tokens_iter)
            self._mean_s = sum(self._first_tokens_s) / len(self._first_tokens_s)
        self.status = EngineStatus(
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            scheduler_stats.kv_cache_usage,
            self._mean_s,
        )

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Keep nothing: the rollout's heartbeat reports whether it sleeps."""

    def log(self) -> None:
        """Log nothing; vLLM calls this every few seconds."""
