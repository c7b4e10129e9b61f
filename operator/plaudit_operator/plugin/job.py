"""What ``kubectl plaudit`` says of a job: pure functions over the RLJob as kubectl prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plaudit_operator.names import ConditionType, Reason
from plaudit_operator.observed import seconds

Object = Mapping[str, Any]

_GOOD_WHEN_FALSE = (ConditionType.DEGRADED, ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED)
_EVENTS = 8


def summary(job: Object, events: Sequence[Object], now: float) -> str:
    """A job on a terminal: where it stands, its roles, what is wrong, its newest events.

    Args:
        job: the RLJob.
        events: of it, in any order.
        now: seconds since the epoch.
    """
    parts = [_head(job, now), _roles(job), _wrong(job, now), _told(events, now)]
    return "\n".join(part for part in parts if part)


def ended(job: Object) -> str:
    """``Complete`` or ``Failed``; empty while it is neither."""
    return next((kind for kind in (ConditionType.COMPLETE, ConditionType.FAILED) if _holds(job, kind)), "")


def unknown_job(name: str, namespace: str, there: Sequence[Object]) -> str:
    """That there is no such job, and which there are."""
    known = ", ".join(f"{job['metadata']['name']} ({_phase(job)})" for job in there)
    found = f"There are: {known}" if known else "There is none in it; -n NAMESPACE looks elsewhere"
    return f"there is no RLJob {name!r} in namespace {namespace!r}. {found}"


def missing_pods(job: Object, role: str) -> str:
    """Why a role has no pods that could be asked."""
    name = job["metadata"]["name"]
    which = "" if role == "all" else f"{role} "
    said = f"{name} is {_phase(job)} and has no {which}pods that answer"
    if ended(job):
        return f"{said}: they went when it ended (lifecycle.cleanup). What it left is in its folder on the volume"
    wrong = [f"{kind}: {words}" for kind, words, _ in _troubles(job)]
    return f"{said}. " + ("; ".join(wrong) or f"kubectl describe rlj {name} says more")


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _head(job: Object, now: float) -> str:
    status, metadata = job.get("status") or {}, job["metadata"]
    progress = status.get("progress") or {}
    words = [metadata["name"], _phase(job)]
    if "step" in progress:
        total = (job["spec"].get("algorithm") or {}).get("steps")
        words.append(f"step {progress['step']}" + (f" of {total}" if total else ""))
    if "rewardMean" in progress:
        words.append(f"reward {progress['rewardMean']:.3f}")
    if "verdict" in progress:
        words.append(f"waits for {progress['verdict']}")
    if progress.get("backlog"):
        words.append(f"{progress['backlog']} samples unscored")
    words.append(f"{_age(metadata.get('creationTimestamp'), now)} old")
    return "   ".join(words) + (f"\nrun {status['run']}\n" if "run" in status else "\n")


def _roles(job: Object) -> str:
    roles = (job.get("status") or {}).get("roles") or []
    rows = [("ROLE", "READY", "RESTARTS", "LAST FAILURE")]
    rows += [(r["name"], r["replicas"], str(r.get("restarts", 0)), r.get("lastFailure", "")) for r in roles]
    return _table(rows) if roles else ""


def _wrong(job: Object, now: float) -> str:
    lines = [f"{kind} ({_age(since, now)}): {words}" for kind, words, since in _troubles(job)]
    return "\n".join(lines) + "\n" if lines else ""


def _troubles(job: Object) -> Iterator[tuple[str, str, str]]:
    """Conditions that a person asks about: type with reason, message, since when."""
    over = ended(job)
    for condition in (job.get("status") or {}).get("conditions") or []:
        kind, reason = condition["type"], condition["reason"]
        said = condition["status"] == ("True" if kind in _GOOD_WHEN_FALSE else "False")
        follows = reason == Reason.SUSPENDED_BY_USER and kind != ConditionType.SUSPENDED
        if said and not follows and (not over or kind == over):
            yield f"{kind} {reason}", condition["message"], condition["lastTransitionTime"]


def _told(events: Sequence[Object], now: float) -> str:
    newest = sorted(events, key=_when)[-_EVENTS:]
    rows = [(_age(_when(e), now), e.get("type", ""), e.get("reason", ""), e.get("message", "")) for e in newest]
    return _table([("LAST SEEN", "TYPE", "REASON", "MESSAGE"), *rows]) if rows else ""


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _holds(job: Object, kind: str) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


def _phase(job: Object) -> str:
    return str((job.get("status") or {}).get("phase") or "not seen by an operator yet")


def _age(since: str | None, now: float) -> str:
    """As kubectl writes ages: ``45s``, ``12m``, ``3h``, ``2d``."""
    age = max(0, int(now - (seconds(since) or now)))
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if age >= 2 * length:
            return f"{age // length}{unit}"
    return f"{age}s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as kubectl writes them; the last is as long as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = (
        "   ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)
