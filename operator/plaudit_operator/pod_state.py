"""What a pod's status says, in words: why it does not run, how it ended, whether the cluster ended it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, seconds

_IMAGE_REASONS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_GANG_DOES_NOT_FIT = "pod group is unschedulable"
"""The scheduler's words for a pod that has room itself."""
_TAKEN_AWAY = "DeletionByTaintManager"
_STARTS_WITHIN_S = 90.0
_MESSAGE_END = 500
"""Characters of a container's last words that are shown: their end, where the error stands."""


def problem_of(pod: Object, now: float) -> tuple[str, str] | None:
    """Why a pod does not run, or how it last failed: reason and words; None when nothing is known."""
    name = pod["metadata"]["name"]
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = condition.get("message", "")
            if _GANG_DOES_NOT_FIT in message:
                return Reason.WAITING_FOR_ROOM, f"{name} would fit, and others of its gang do not"
            return Reason.UNSCHEDULABLE, f"{name}: {message}"
    if is_gated(pod):
        return Reason.QUEUED, f"{name} waits in its queue"
    for status in _containers(pod):
        found = _waiting(status, pod, now) or _ended(status)
        if found:
            return found[0], f"{name}: {found[1]}"
    return None


def _waiting(status: Object, pod: Object, now: float) -> tuple[str, str] | None:
    waiting = status.get("state", {}).get("waiting")
    if not waiting:
        return None
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        # A kubelet says the same error in turns with and without "Back-off …: ErrImagePull: " before it.
        why = message.partition("ErrImagePull: ")[2] or message
        return Reason.IMAGE_PULL, f"image {status.get('image', '')}: {why or reason}"
    if reason == "CreateContainerConfigError":
        return Reason.CONFIG_MISSING, message
    created = seconds(pod["metadata"].get("creationTimestamp"))
    scheduled = any(c["type"] == "PodScheduled" and c["status"] == "True" for c in _conditions(pod))
    slow = reason == "ContainerCreating" and scheduled and created is not None and now - created > _STARTS_WITHIN_S
    if slow:
        words = "its containers are not created yet; a volume, Secret or ConfigMap may be missing: kubectl describe it"
        return Reason.CONFIG_MISSING, words
    return None


def _ended(status: Object) -> tuple[str, str] | None:
    ended = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
    if not ended or ended.get("exitCode", 0) == 0:
        return None
    if ended.get("reason") == "OOMKilled":
        return Reason.OUT_OF_MEMORY, f"{status['name']} was killed for using more memory than its limit"
    return Reason.CRASHING, f"{status['name']} ended with {ended['exitCode']}: {_last_words(ended)}"


def exit_of(pod: Object, container: str) -> Iterator[tuple[int, str]]:
    """Exit code and last words of a container that has ended for good."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        ended = status.get("state", {}).get("terminated")
        if status["name"] == container and ended:
            words = "out of memory" if ended.get("reason") == "OOMKilled" else _last_words(ended)
            yield int(ended.get("exitCode", 0)), words


def is_disrupted(pod: Object) -> bool:
    """Whether the cluster ended the pod: drain, preemption, taint, lost node, a full disk, its queue."""
    status = pod.get("status", {})
    if status.get("reason") in ("NodeLost", "Evicted", "NodeShutdown", "Shutdown", "Terminated"):
        return True
    return any(c["type"] in _ENDED_BY_CLUSTER and c["status"] == "True" for c in _conditions(pod))


_ENDED_BY_CLUSTER = ("DisruptionTarget", "TerminationTarget")
"""The second is Kueue's."""


def is_scheduled(pod: Object) -> bool:
    """Whether the pod is bound to a node."""
    return any(c["type"] == "PodScheduled" and c["status"] == "True" for c in _conditions(pod))


def is_gated(pod: Object) -> bool:
    """Whether somebody keeps the pod from being scheduled: its queue."""
    return any(c["type"] == "PodScheduled" and c.get("reason") == "SchedulingGated" for c in _conditions(pod))


def taken_away_since(pod: Object) -> float | None:
    """When the pod was told to leave because its node is unreachable or not ready; None when it was not."""
    if not is_leaving(pod):
        return None
    taken = (c for c in _conditions(pod) if c["type"] == "DisruptionTarget" and c["status"] == "True")
    return next((seconds(c.get("lastTransitionTime")) for c in taken if c.get("reason") == _TAKEN_AWAY), None)


def is_unheard(pod: Object) -> bool:
    """Whether the control plane says that the pod is not ready, and no kubelet says so of its containers."""
    holds = {c["type"]: c["status"] == "True" for c in _conditions(pod)}
    return holds.get("ContainersReady", False) and not holds.get("Ready", False)


def is_leaving(pod: Object) -> bool:
    """Whether the pod is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_over(pod: Object) -> bool:
    """Whether all of the pod's processes have ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    """Whether the pod is ready, and stays."""
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    return not leaving and any(c["type"] == "Ready" and c["status"] == "True" for c in _conditions(pod))


def is_running(pod: Object) -> bool:
    """Whether the pod's main containers run, or have ended well."""
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    return not leaving and pod.get("status", {}).get("phase") in ("Running", "Succeeded")


def restarts_of(pod: Object) -> int:
    """Restarts of its containers."""
    return sum(int(status.get("restartCount", 0)) for status in _containers(pod))


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _conditions(pod: Object) -> list[Object]:
    return pod.get("status", {}).get("conditions") or []


def _last_words(ended: Object) -> str:
    words = _of_a_record(str(ended.get("message") or ended.get("reason") or "").strip())
    return words if len(words) <= _MESSAGE_END else f"…{words[-_MESSAGE_END:]}"


def _of_a_record(words: str) -> str:
    """The message and the error of a JSON line, where the last line of a log is one; else the log as it is."""
    try:
        record = json.loads(words.rpartition("\n")[2])
    except ValueError:
        return words
    if not isinstance(record, dict):
        return words
    return ": ".join(str(record[key]) for key in ("message", "error", "traceback") if record.get(key)) or words
