"""The schemas of ``status``, and the columns of ``kubectl get``. ``status/status.py`` writes the status."""

from __future__ import annotations

from typing import Any


def _text(description: str, most: int = 4096) -> dict[str, Any]:
    return {"type": "string", "maxLength": most, "description": description}


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int64", "minimum": 0, "description": description}


def _time(description: str) -> dict[str, Any]:
    return {"type": "string", "format": "date-time", "description": description}


_CONDITION: dict[str, Any] = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": _text("Type of the condition.", 64),
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Status of the condition."},
        "reason": _text("Reason, in one word.", 128),
        "message": _text("Explanation, with the remedy.", 32768),
        "observedGeneration": _count("Generation of the object that it describes."),
        "lastTransitionTime": _time("Time of the last transition."),
    },
}

_ROLE: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _text(
            "trainer, rollout, reward, gateway, transport, metrics, model/<scorer>, or environment/<name>.", 64
        ),
        "desired": _count("Desired pods."),
        "ready": _count("Pods that are ready."),
        "updated": _count("Pods of the newest template."),
        "restarts": _count("Restarts of their containers."),
        "lastFailure": _text("Last failure of one of its pods."),
    },
}

_ROLE_COST: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _text("trainer, rollout, reward, or a reward model's scorer.", 64),
        "gpus": _count("GPUs that its pods hold now."),
        "gpuSeconds": _count("GPU seconds until countedTime."),
    },
}

STATUS: dict[str, Any] = {
    "type": "object",
    "description": "Observed state; written by the operator only.",
    "properties": {
        "observedGeneration": _count("Generation of the object that this status describes."),
        "phase": _text("Summary of the conditions in one word; output only.", 64),
        "run": _text("Id of the run: name and short uid; part of the run's folder and of every key in Redis.", 64),
        "conditions": {
            "type": "array",
            "maxItems": 32,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": _CONDITION,
            "description": "Conditions of the job; docs/kubernetes/conditions.md has the remedies.",
        },
        "roles": {
            "type": "array",
            "maxItems": 64,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": _ROLE,
            "description": "Pods by role.",
        },
        "replicas": {
            "type": "object",
            "properties": {"rollout": _text("ready/desired.", 32), "reward": _text("ready/desired.", 32)},
            "description": "Text for the columns of kubectl get; the numbers are in roles.",
        },
        "rollouts": _count("Rollout workers whose pods exist, for the scale subresource."),
        "rolloutSelector": _text("Labels of one pod of each rollout worker, for the scale subresource.", 512),
        "url": _text("Address of the gateway of a job that only scores, inside the cluster.", 256),
        "progress": {
            "type": "object",
            "description": "Progress from the metrics service, at most 10 s old while the job runs.",
            "properties": {
                "step": _count("Steps closed."),
                "totalSteps": _count("Steps of the run."),
                "rewardMean": {"type": "number", "description": "Mean reward of the last step."},
                "exposedRewardSeconds": {"type": "number", "description": "Exposed reward seconds of the last step."},
                "verdict": _text("What the last steps waited for.", 64),
                "backlog": _count("Samples that wait for a reward worker."),
                "troubles": {
                    "type": "array",
                    "maxItems": 64,
                    "items": {
                        "type": "object",
                        "properties": {"reason": _text("Reason, in one word.", 128), "message": _text("Explanation.")},
                    },
                    "description": "Problems that no pod shows; the condition Degraded reports them.",
                },
            },
        },
        "cost": {
            "type": "object",
            "description": "GPU time of the job, counted whenever the status changes.",
            "properties": {
                "roles": {
                    "type": "array",
                    "maxItems": 64,
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": _ROLE_COST,
                    "description": "GPU time by role.",
                },
                "exposedRewardGpuSeconds": _count("GPU seconds that the trainer waited for rewards."),
                "countedTime": _time("Time until which it is counted; later time is that of gpus."),
            },
        },
        "attempt": _count("Number of the trainer's current attempt, from 0."),
        "restarts": _count("Failed attempts of the trainer that the cluster did not cause."),
        "disruptions": _count("Attempts of the trainer that the cluster ended."),
        "shortAttempts": _count(
            "Attempts in a row that closed no step in less than ten minutes; they lengthen the backoff."
        ),
        "lastAttemptStep": _count("Step at the end of the trainer's last attempt."),
        "nextAttemptTime": _time("Earliest start of the trainer's next attempt."),
        "startTime": _time("Time at which all roles first ran."),
        "completionTime": _time("Time of its end."),
    },
}


def _column(name: str, kind: str, path: str, priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})


PRINTER_COLUMNS: list[dict[str, Any]] = [
    _column("Phase", "string", ".status.phase"),
    _column("Step", "integer", ".status.progress.step"),
    _column("Rollout", "string", ".status.replicas.rollout"),
    _column("Reward", "string", ".status.replicas.reward"),
    _column("Verdict", "string", ".status.progress.verdict"),
    _column("Backlog", "integer", ".status.progress.backlog"),
    _column("Restarts", "integer", ".status.restarts", 1),
    _column("Run", "string", ".status.run", 1),
    _column("URL", "string", ".status.url", 1),
    _column("Age", "date", ".metadata.creationTimestamp"),
]


_OF_JOBS_ONLY = ("attempt", "restarts", "disruptions", "shortAttempts", "lastAttemptStep", "nextAttemptTime")
"""Fields about attempts of a trainer."""

SERVICE_STATUS: dict[str, Any] = {
    **STATUS,
    "properties": {name: field for name, field in STATUS["properties"].items() if name not in _OF_JOBS_ONLY}
    | {"revision": _text("Revision of the scoring in effect; results of its workers have it as their version.", 64)},
}
"""The schema of a RewardService's ``status``."""

SERVICE_COLUMNS: list[dict[str, Any]] = [
    _column("Phase", "string", ".status.phase"),
    _column("Revision", "string", ".status.revision"),
    _column("RolledOut", "string", ".status.conditions[?(@.type=='RolledOut')].status"),
    _column("Workers", "string", ".status.replicas.reward"),
    _column("Backlog", "integer", ".status.progress.backlog"),
    _column("URL", "string", ".status.url"),
    _column("Run", "string", ".status.run", 1),
    _column("Age", "date", ".metadata.creationTimestamp"),
]
