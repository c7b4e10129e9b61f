"""``status.progress``: asked of a job's metrics service, and what it knows to be wrong that no pod shows."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import urllib3

from plaudit_operator.children.metrics import address
from plaudit_operator.names import Reason

_POOL = urllib3.PoolManager(num_pools=64, retries=False, timeout=urllib3.Timeout(connect=1.0, read=2.0))
_UNDELIVERED = re.compile(r'^plaudit_stream_undelivered\{[^}]*stream="samples"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)
_CIRCUIT_OPEN = re.compile(r'^plaudit_judge_circuit_open\{judge="([^"]*)"\} 1(?:\.0)?$', re.MULTILINE)
_MEMORY = re.compile(r"^plaudit_redis_memory_bytes ([0-9.e+]+)$", re.MULTILINE)
_MEMORY_LIMIT = re.compile(r"^plaudit_redis_memory_limit_bytes ([0-9.e+]+)$", re.MULTILINE)
_NEARLY_FULL = 0.65
"""Share of Redis's memory. From 70 % on nothing is admitted, so a Redis that is full stays a little below or above."""


def ask(name: str, namespace: str) -> dict[str, Any]:
    """The job's progress; empty when its metrics service does not answer, or no step is closed yet."""
    base = address(name, namespace)
    try:
        steps = json.loads(_get(f"{base}/api/v1/steps?newest=1"))["steps"]
        series = _get(f"{base}/metrics")
    except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError):
        return {}
    progress: dict[str, Any] = {"troubles": troubles(series)}
    if found := _UNDELIVERED.search(series):
        progress["backlog"] = int(float(found[1]))
    return progress | (_of_step(steps[-1]) if steps else {})


def troubles(series: str) -> list[dict[str, str]]:
    """What Prometheus would be told and a person wants to know: reason and words, the same as long as it lasts."""
    found = []
    for judge in sorted(_CIRCUIT_OPEN.findall(series)):
        words = (
            f"scorer {judge!r}: its judge fails or cannot be reached, and is asked only now and then until it answers"
        )
        remedy = "Look at the judge, its baseUrl, key and network policy; kubectl plaudit logs JOB reward says why"
        found.append({"reason": Reason.JUDGE_FAILING, "message": f"{words}. {remedy}"})
    used, limit = _MEMORY.search(series), _MEMORY_LIMIT.search(series)
    if used and limit and float(used[1]) > _NEARLY_FULL * float(limit[1]) > 0:
        words = (
            f"Redis has used up its memory ({float(limit[1]) / 2**20:.0f} MiB): no prompt is admitted above 70 % of it"
        )
        remedy = "Raise spec.transport.managed.memory in a new job, or have fewer or shorter samples in flight"
        found.append({"reason": Reason.REDIS_FULL, "message": f"{words}. {remedy}"})
    return found


def _get(url: str) -> str:
    response = _POOL.request("GET", url)
    if response.status != 200:
        raise ValueError(f"{url}: HTTP {response.status}")
    return response.data.decode()


def _of_step(step: dict[str, Any]) -> dict[str, Any]:
    named = {
        "step": step.get("step"),
        "verdict": step.get("verdict"),
        "rewardMean": step.get("reward/mean"),
        "exposedRewardSeconds": step.get("exposed_reward_s"),
    }
    return {name: value for name, value in named.items() if value is not None and not _is_nan(value)}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
