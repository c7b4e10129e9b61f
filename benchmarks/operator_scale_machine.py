"""Measure the resources of ``operator_scale``: CPU, memory, requests to the API server, reconciliations."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubernetes import config

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Requests = Counter[tuple[str, str]]
"""Requests by verb and resource."""
Turns = Counter[tuple[str, float]]
"""Reconciliations by result and upper bound of the bucket (s), each with all below it."""


def cpu_s(pid: int) -> float:
    """User and system seconds of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory of a process now, and the most that it ever was."""
    status = Path(f"/proc/{pid}/status").read_text()
    now, most = (re.search(rf"{name}:\s+(\d+)", status) for name in ("VmRSS", "VmHWM"))
    assert now is not None
    assert most is not None
    return int(now[1]) / 1024, int(most[1]) / 1024


class Meter:
    """CPU of some processes, of everything else on the machine, and what was idle, since it was made.

    Args:
        pids: processes by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        spent = {name: cpu_s(pid) for name, pid in self._pids.items()}
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = fields[3] + fields[4]
        busy = (sum(fields) - idle) / _TICKS_PER_S
        return {**spent, "all else": busy - sum(spent.values()), "idle": idle / _TICKS_PER_S}

    def read(self) -> dict[str, Any]:
        """Wall clock seconds, and CPU seconds by name."""
        now = self._now()
        spent = {name: round(now[name] - before, 2) for name, before in self._before.items()}
        return {"wall_s": round(time.monotonic() - self._began, 2), "cpu_s": spent}


class Server:
    """Read an API server's metrics and object counts with cheap requests."""

    def __init__(self) -> None:
        self._client = config.new_client_from_config()

    def get(self, path: str, accept: str = "application/json") -> bytes:
        """Return the response of a path."""
        address = self._client.configuration.host + path
        answer = self._client.rest_client.pool_manager.request("GET", address, headers={"Accept": accept}, timeout=60)
        assert answer.status == 200, f"{path}: HTTP {answer.status}"
        return bytes(answer.data)

    def count(self, path: str) -> int:
        """Objects in a collection; only one is sent."""
        page = json.loads(self.get(f"{path}?limit=1", _METADATA_ONLY))
        return len(page["items"] or []) + int(page["metadata"].get("remainingItemCount", 0))

    def metadata(self, path: str) -> list[dict[str, Any]]:
        """Metadata of all objects in a collection."""
        items = json.loads(self.get(path, _METADATA_ONLY))["items"]
        return [item["metadata"] for item in items or []]

    def writes(self) -> Requests:
        """Writes since the API server began, successful or not."""
        found: Requests = Counter()
        for line in self.get("/metrics", "text/plain").decode().splitlines():
            if line.startswith("apiserver_request_total{"):
                labels = dict(_LABEL.findall(line))
                if labels["verb"] in _WRITES:
                    found[labels["verb"], labels["resource"]] += int(float(line.rsplit(" ", 1)[1]))
        return found


def turns_of(metrics: str) -> Turns:
    """The histogram of reconciliations out of the operator's ``/metrics``."""
    found: Turns = Counter()
    for line in metrics.splitlines():
        if line.startswith("plaudit_operator_reconcile_seconds_bucket"):
            labels = dict(_LABEL.findall(line))
            found[labels["result"], float(labels["le"])] = int(float(line.rsplit(" ", 1)[1]))
    return found


def times(turns: Turns, *results: str) -> dict[str, float]:
    """Return number, p50 and p95 in milliseconds of the reconciliations with these results (default: all).

    Interpolated inside a bucket, as Prometheus' ``histogram_quantile`` does.
    """
    buckets: Counter[float] = Counter()
    for (result, bound), count in turns.items():
        if not results or result in results:
            buckets[bound] += count
    total = buckets[float("inf")]
    return {"n": total, "p50_ms": _quantile(buckets, 0.5), "p95_ms": _quantile(buckets, 0.95)}


def _quantile(buckets: Counter[float], share: float) -> float:
    rank, below, floor = share * buckets[float("inf")], 0, 0.0
    for bound in sorted(buckets):
        if buckets[bound] >= rank and buckets[bound] > below:
            if bound == float("inf"):
                return floor * 1e3
            return (floor + (bound - floor) * (rank - below) / (buckets[bound] - below)) * 1e3
        below, floor = buckets[bound], bound
    return 0.0
