"""Read a pod's status: why it does not run, how it ended, whether the cluster ended it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from plaudit_operator.names import Reason
from plaudit_operator.observed import Object, conditions_of, holds, seconds

FIRST_DELETION = "firstDeletion"
"""Field of a cached pod's metadata: when its deletion was first requested, in seconds since the epoch."""
_IMAGE_REASONS = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_GANG_DOES_NOT_FIT = "pod group is unschedulable"
"""The scheduler's message for a pod that would fit by itself."""
_STARTS_WITHIN_S = 90.0
_OF_KUBERNETES = ("foregroundDeletion", "orphan", "batch.kubernetes.io/job-tracking")
"""Finalizers that Kubernetes sets, and takes off by itself."""
_MESSAGE_END = 500
"""Characters of a termination message that are shown: its end, which holds the error."""


def problem_of(pod: Object, now: float) -> tuple[str, str] | None:
    """Return reason and message of why a pod does not run, or how it last failed; None if unknown."""
    name = pod["metadata"]["name"]
    for condition in conditions_of(pod):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = condition.get("message", "")
            if _GANG_DOES_NOT_FIT in message:
                return Reason.WAITING_FOR_ROOM, f"{name} would fit, but other pods of its gang do not"
            return Reason.UNSCHEDULABLE, f"{name}: {message}"
    if is_gated(pod):
        return Reason.QUEUED, f"{name} is held by its queue"
    for status in _containers(pod):
        found = _waiting(status, pod, now) or _ended(status)
        if found:
            return found[0], f"{name}: {found[1]}"
    if is_late(pod, now):
        if _waits_for_its_sandbox(pod):
            return Reason.CONFIG_MISSING, f"{name}: {_NOT_CREATED}"
        for condition in conditions_of(pod):
            told = _LATE.get((pod["status"].get("phase"), condition["type"]))
            if told and condition["status"] == "False" and condition.get("message"):
                return Reason.STARTING, f"{name}: {told.format(condition['message'])}"
    return None


_NOT_CREATED = (
    "containers not created after 90 s; a volume, Secret or ConfigMap may be missing. See kubectl describe pod"
)
_LATE = {
    ("Pending", "Initialized"): (
        "{}, 90 s after the pod got its node. The role starts once they have ended or are ready"
    ),
    ("Running", "Ready"): "{}, for 90 s. Their probes tell why: kubectl describe pod",
}
"""What is told of a late pod, by its phase and the condition whose message says what it lacks."""


def late_at(pod: Object) -> float | None:
    """Return when a pod is late (seconds since the epoch); None for one that is ready, ended, or has no node.

    That is 90 s after it got its node, or after it was last ready.
    """
    phase = pod.get("status", {}).get("phase")
    if is_leaving(pod) or phase not in ("Pending", "Running") or not is_scheduled(pod):
        return None
    kind, status = ("PodScheduled", "True") if phase == "Pending" else ("Ready", "False")
    times = (c.get("lastTransitionTime") for c in conditions_of(pod) if (c["type"], c["status"]) == (kind, status))
    since = next((seconds(at) for at in times if at), None)
    return None if since is None else since + _STARTS_WITHIN_S


def is_late(pod: Object, now: float) -> bool:
    """Return True if a pod has had a node for long and has not started, or has not been ready for long."""
    late = late_at(pod)
    return late is not None and now >= late


def _waiting(status: Object, pod: Object, now: float) -> tuple[str, str] | None:
    waiting = status.get("state", {}).get("waiting")
    if not waiting:
        return None
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        # A kubelet reports the same error in turns with and without the prefix "Back-off …: ErrImagePull: ".
        why = message.partition("ErrImagePull: ")[2] or message
        return Reason.IMAGE_PULL, f"image {status.get('image', '')}: {why or reason}"
    if reason == "CreateContainerConfigError":
        return Reason.CONFIG_MISSING, message
    if reason in ("CreateContainerError", "RunContainerError"):
        return Reason.CRASHING, f"{status['name']} cannot start: {message}"
    if reason == "CrashLoopBackOff" and (status.get("lastState", {}).get("terminated") or {}).get("exitCode") == 0:
        return Reason.CRASHING, f"{status['name']} ends with code 0, and Kubernetes starts it again and again"
    if reason == "ContainerCreating" and is_late(pod, now):
        return Reason.CONFIG_MISSING, _NOT_CREATED
    return None


def _waits_for_its_sandbox(pod: Object) -> bool:
    """Return True if not even the first container of a pod was created: its volumes are not there."""
    states = [status.get("state", {}).get("waiting") or {} for status in _containers(pod)]
    return bool(states) and all(state.get("reason") == "PodInitializing" for state in states)


def _ended(status: Object) -> tuple[str, str] | None:
    ended = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
    if not ended or ended.get("exitCode", 0) == 0:
        return None
    if ended.get("reason") == "OOMKilled":
        return Reason.OUT_OF_MEMORY, f"{status['name']} exceeded its memory limit and was killed"
    return Reason.CRASHING, f"{status['name']} exited with code {ended['exitCode']}: {_termination_message(ended)}"


def exit_of(pod: Object, container: str) -> Iterator[tuple[int, str]]:
    """Yield exit code and termination message of a container that ended for good."""
    for ended in _terminated(pod, container):
        yield int(ended.get("exitCode", 0)), _message_of_end(ended)


def ended_at(pod: Object, container: str) -> float | None:
    """Return when a container ended for good (seconds since the epoch); None if it runs or did not say."""
    return next((seconds(ended.get("finishedAt")) for ended in _terminated(pod, container)), None)


def has_run(pod: Object) -> bool:
    """Return True if a container of the pod ran, but for those before its process."""
    states = [status.get(state, {}) for status in _statuses(pod) for state in ("state", "lastState")]
    if not states:
        return pod.get("status", {}).get("phase") in ("Running", "Succeeded")
    return any("running" in state or "terminated" in state for state in states)


def lacks_image(pod: Object) -> bool:
    """Return True if an image of the pod cannot be pulled."""
    waiting = (status.get("state", {}).get("waiting") or {} for status in _containers(pod))
    return any(each.get("reason") in _IMAGE_REASONS for each in waiting)


def failed_start(pod: Object) -> tuple[str, int, str] | None:
    """Return name, exit code and message of the container before a pod's process that failed first; None if none did.

    A pod that is being deleted ends them, too.
    """
    if is_leaving(pod) or pod.get("status", {}).get("phase") != "Failed":
        return None
    ended = [(each["name"], each.get("state", {}).get("terminated") or {}) for each in _before(pod)]
    failed = [(str(end.get("finishedAt")), name, end) for name, end in ended if end.get("exitCode")]
    if not failed:
        return None
    _, name, end = min(failed, key=lambda each: each[0])
    return name, int(end["exitCode"]), _message_of_end(end)


def sidecars_left(pod: Object, container: str) -> list[str]:
    """Return the containers that keep a pod running after another one has ended for good; empty if none does.

    A native sidecar does, too, until it obeys SIGTERM or the pod's grace period is over.
    """
    left = [status["name"] for status in _containers(pod) if "terminated" not in status.get("state", {})]
    return left if any(_terminated(pod, container)) else []


def _statuses(pod: Object) -> Sequence[Object]:
    return pod.get("status", {}).get("containerStatuses") or ()


def _before(pod: Object) -> Sequence[Object]:
    return pod.get("status", {}).get("initContainerStatuses") or ()


def _terminated(pod: Object, container: str) -> Iterator[Object]:
    for status in _statuses(pod):
        ended = status.get("state", {}).get("terminated")
        if status["name"] == container and ended:
            yield ended


def deletion_requested_at(pod: Object) -> float | None:
    """Return when a pod's deletion was requested (seconds since the epoch); None if it was not.

    The API server moves the timestamp to the present when a pod that has ended is finally deleted; the cache keeps the
    earliest request that it saw.
    """
    metadata = pod["metadata"]
    if FIRST_DELETION in metadata:
        return float(metadata[FIRST_DELETION])
    removal = seconds(metadata.get("deletionTimestamp"))
    return None if removal is None else removal - float(metadata.get("deletionGracePeriodSeconds") or 0)


def is_ended_by_deletion(pod: Object, container: str) -> bool:
    """Return True if a container ended because its pod was being deleted, and not before.

    Times have whole seconds, and a program may answer SIGTERM with any exit code: an end within the second of the
    request counts as its effect. A pod that failed first is deleted later, after its attempt has been counted.
    """
    requested, ended = deletion_requested_at(pod), ended_at(pod, container)
    return requested is not None and ended is not None and ended >= requested


def failure_reasons(pod: Object) -> Iterator[str]:
    """Yield the reasons of a pod's end: the pod's own, that of its disruption, those of its containers."""
    status = pod.get("status", {})
    taken = (condition.get("reason") for condition in _disruptions(pod))
    ended = (each.get("state", {}).get("terminated") or {} for each in _containers(pod))
    found = (status.get("reason"), *taken, *(end.get("reason") for end in ended if end.get("exitCode")))
    yield from (str(reason) for reason in found if reason)


def is_disrupted(pod: Object) -> bool:
    """Return True if the cluster ended the pod: drain, preemption, taint, lost node, full disk, its queue."""
    if pod.get("status", {}).get("reason") in ("NodeLost", "Evicted", "NodeShutdown", "Shutdown", "Terminated"):
        return True
    return holds(pod, "DisruptionTarget", "TerminationTarget")  # the second is Kueue's


def is_scheduled(pod: Object) -> bool:
    """Return True if the pod is bound to a node."""
    return holds(pod, "PodScheduled")


def is_gated(pod: Object) -> bool:
    """Return True while a queue holds the pod back."""
    return any(c["type"] == "PodScheduled" and c.get("reason") == "SchedulingGated" for c in conditions_of(pod))


def lost_since(pod: Object) -> float | None:
    """Return when the pod was evicted because its node is unreachable or not ready; None if it was not.

    A node that runs may evict it by a taint of its administrator; then its kubelet says when the containers end.
    """
    is_silent = holds(pod, "ContainersReady") and not holds(pod, "Ready")  # only the control plane spoke for it
    if not is_leaving(pod) or not is_silent:
        return None
    lost = (condition for condition in _disruptions(pod) if condition.get("reason") == "DeletionByTaintManager")
    return next((seconds(condition.get("lastTransitionTime")) for condition in lost), None)


def _disruptions(pod: Object) -> Iterator[Object]:
    return (c for c in conditions_of(pod) if c["type"] == "DisruptionTarget" and c["status"] == "True")


def is_leaving(pod: Object) -> bool:
    """Return True while a pod, or any other object, is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def held_by(item: Object) -> str:
    """Return the finalizers of others for which an object under deletion waits, as text; empty if there are none."""
    finalizers = item["metadata"].get("finalizers") or () if is_leaving(item) else ()
    return ", ".join(str(each) for each in finalizers if each not in _OF_KUBERNETES)


def is_over(pod: Object) -> bool:
    """Return True if all processes of the pod ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    """Return True if the pod is ready and not being deleted."""
    return not is_leaving(pod) and holds(pod, "Ready")


def is_running(pod: Object) -> bool:
    """Return True if the pod's containers run or ended with success, and it is not being deleted."""
    return not is_leaving(pod) and pod.get("status", {}).get("phase") in ("Running", "Succeeded")


def restarts_of(pod: Object) -> int:
    """Return the number of restarts of its containers."""
    return sum(int(status.get("restartCount", 0)) for status in _containers(pod))


def _containers(pod: Object) -> list[Object]:
    return [*_before(pod), *_statuses(pod)]


def _message_of_end(ended: Object) -> str:
    return "out of memory" if ended.get("reason") == "OOMKilled" else _termination_message(ended)


def _termination_message(ended: Object) -> str:
    text = _of_log(str(ended.get("message") or ended.get("reason") or "").strip())
    return text if len(text) <= _MESSAGE_END else f"…{text[-_MESSAGE_END:]}"


def _of_log(log: str) -> str:
    """Return message and error of the last line if it is a JSON record, else the log as it is."""
    try:
        record = json.loads(log.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return log
    if not isinstance(record, dict):
        return log
    return ": ".join(str(record[key]) for key in ("message", "error", "traceback") if record.get(key)) or log
