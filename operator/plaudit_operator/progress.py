"""``status.progress``: asked of a job's metrics service."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import urllib3

from plaudit_operator.children.metrics import address

_POOL = urllib3.PoolManager(num_pools=64, retries=False, timeout=urllib3.Timeout(connect=1.0, read=2.0))
_UNDELIVERED = re.compile(r'^plaudit_stream_undelivered\{[^}]*stream="samples"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)


def ask(name: str, namespace: str) -> dict[str, Any]:
    """The job's progress; empty when its metrics service does not answer, or no step is closed yet."""
    base = address(name, namespace)
    try:
        steps = json.loads(_get(f"{base}/api/v1/steps?newest=1"))["steps"]
        found = _UNDELIVERED.search(_get(f"{base}/metrics"))
    except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError):
        return {}
    progress: dict[str, Any] = {"backlog": int(float(found[1]))} if found else {}
    return progress | (_of_step(steps[-1]) if steps else {})


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
