"""The text of ``kubectl plaudit`` about a job: pure functions over the RLJob as kubectl prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plaudit_operator.gpu_time import gpu_seconds
from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import seconds
from plaudit_operator.runtime.conditions import holds

Object = Mapping[str, Any]

_GOOD_WHEN_FALSE = (ConditionType.DEGRADED, ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED)
_SUMMARIES = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
"""Conditions that repeat others."""
_EVENTS = 8


def summary(job: Object, events: Sequence[Object], now: float) -> str:
    """Return a job as text: phase and progress, roles, problems, newest events.

    Args:
        events: of the job, in any order.
        now: seconds since the epoch.
    """
    parts = [_head(job, now), _roles(job), _cost(job, now), _problems(job, now), _event_table(events, now)]
    return "\n".join(part for part in parts if part)


def ended(job: Object) -> str:
    """Return ``Complete`` or ``Failed``; empty while the job is neither."""
    return next((kind for kind in (ConditionType.COMPLETE, ConditionType.FAILED) if holds(job, kind)), "")


def unknown_job(name: str, namespace: str, there: Sequence[Object]) -> str:
    """Return the error for an unknown job, with the jobs that exist."""
    known = ", ".join(f"{job['metadata']['name']} ({_phase(job)})" for job in there)
    found = f"Jobs in it: {known}" if known else "It has no jobs; choose another namespace with -n NAMESPACE"
    return f"no RLJob or RewardService {name!r} in namespace {namespace!r}. {found}"


def missing_pods(job: Object, role: str) -> str:
    """Return why a role has no pods to connect to."""
    name = job["metadata"]["name"]
    which = "" if role == "all" else f"{role} "
    problem = f"{name} is {_phase(job)} and has no ready {which}pods"
    if ended(job):
        kept = "Results are in the run's folder on the volume"
        return f"{problem}: they were deleted at its end (lifecycle.cleanup). {kept}"
    problems = [f"{kind}: {message}" for kind, message, _ in _troubles(job)]
    return f"{problem}. " + ("; ".join(problems) or f"See kubectl describe {job['kind'].lower()} {name}")


def is_ready(pod: Object) -> bool:
    """Return True if a pod is ready."""
    return holds(pod, "Ready")


def _head(job: Object, now: float) -> str:
    status, metadata = job.get("status") or {}, job["metadata"]
    progress = status.get("progress") or {}
    parts = [metadata["name"], _phase(job)]
    if "step" in progress:
        total = (job["spec"].get("algorithm") or {}).get("steps")
        parts.append(f"step {progress['step']}" + (f" of {total}" if total else ""))
    if "rewardMean" in progress:
        parts.append(f"reward {progress['rewardMean']:.3f}")
    if "verdict" in progress:
        parts.append(f"waiting for {progress['verdict']}")
    if progress.get("backlog"):
        parts.append(f"{progress['backlog']} samples unscored")
    if "revision" in status:
        parts.append(f"revision {status['revision']}")
    parts.append(f"{_age(metadata.get('creationTimestamp'), now)} old")
    return "   ".join(parts) + (f"\nrun {status['run']}\n" if "run" in status else "\n")


def _roles(job: Object) -> str:
    roles = (job.get("status") or {}).get("roles") or []
    rows = [("ROLE", "READY", "RESTARTS", "LAST FAILURE")]
    rows += [
        (r["name"], f"{r.get('ready', 0)}/{r.get('desired', 0)}", str(r.get("restarts", 0)), r.get("lastFailure", ""))
        for r in roles
    ]
    return _table(rows) if roles else ""


def _cost(job: Object, now: float) -> str:
    cost = (job.get("status") or {}).get("cost")
    if not cost:
        return ""
    hours = {role: spent / 3600 for role, spent in gpu_seconds(cost, now).items()}
    roles = ", ".join(f"{role} {each:.1f}" for role, each in hours.items())
    waited = int(cost.get("exposedRewardGpuSeconds", 0)) / 3600
    return f"{sum(hours.values()):.1f} GPU-hours ({roles}); waiting for rewards cost {waited:.1f} of them\n"


def _problems(job: Object, now: float) -> str:
    lines = [f"{kind} ({_age(since, now)}): {message}" for kind, message, since in _troubles(job)]
    return "\n".join(lines) + "\n" if lines else ""


def _troubles(job: Object) -> Iterator[tuple[str, str, str]]:
    """Yield conditions that report a problem: type with reason, message, since when."""
    over = ended(job)
    for condition in (job.get("status") or {}).get("conditions") or []:
        kind, reason = condition["type"], condition["reason"]
        holds = condition["status"] == ("True" if kind in _GOOD_WHEN_FALSE else "False")
        follows = reason == Reason.SUSPENDED_BY_USER and kind != ConditionType.SUSPENDED
        if holds and kind not in _SUMMARIES and not follows and (not over or kind == over):
            yield f"{kind} {reason}", condition["message"], condition["lastTransitionTime"]


def _event_table(events: Sequence[Object], now: float) -> str:
    newest = sorted(events, key=_when)[-_EVENTS:]
    rows = [(_age(_when(e), now), e.get("type", ""), e.get("reason", ""), e.get("message", "")) for e in newest]
    return _table([("LAST SEEN", "TYPE", "REASON", "MESSAGE"), *rows]) if rows else ""


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _phase(job: Object) -> str:
    return str((job.get("status") or {}).get("phase") or "not processed by an operator yet")


def _age(since: str | None, now: float) -> str:
    """Return an age as kubectl prints it: ``45s``, ``12m``, ``3h``, ``2d``."""
    age = max(0, int(now - (seconds(since) or now)))
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if age >= 2 * length:
            return f"{age // length}{unit}"
    return f"{age}s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns as kubectl prints them; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = (
        "   ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)
