"""Build the response of ``GET /v1/service``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plaudit_wire.messages import Service
from plaudit_wire.version import VERSION
from plaudit_workers.gateway.canary.canary_series import CanarySeries
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.stream.connection import Transport


@dataclass(frozen=True)
class ServiceDescription:
    """Describe one service."""

    job: RLJob
    run: str
    service: Service
    limits: dict[str, float]
    canary: CanarySeries | None = None

    async def read(self, transport: Transport, num_awaited: int) -> dict[str, Any]:
        """Return the description with the service's present health."""
        workers = [worker for worker in await transport.workers() if worker.role == "reward"]
        return {
            "job": self.job.metadata.name,
            "run": self.run,
            "version": VERSION,
            "scorers": [
                {"name": scorer.name, "kind": scorer.kind, "scope": scorer.scope, "weight": scorer.weight}
                for scorer in self.job.spec.reward.scorers
            ],
            "limits": self.limits | {"room": self.service.room, "group_deadline_s": self.service.group_deadline_s},
            "health": {
                "workers": len(workers),
                "workers_ready": sum(worker.ready for worker in workers),
                "circuits_open": sorted({judge for worker in workers for judge in worker.circuits_open}),
                "awaited": num_awaited,
            },
        } | ({"canary": self.canary.description()} if self.canary else {})
