"""``status`` of an RLJob as the CRD describes it, and what ``kubectl get rlj`` shows. Written by ``status.py``."""

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
        "type": _text("What is said.", 64),
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it is so."},
        "reason": _text("Why, in one word.", 128),
        "message": _text("Why, in words, and what to do.", 32768),
        "observedGeneration": _count("The generation of the object that it was said of."),
        "lastTransitionTime": _time("Since when."),
    },
}

_ROLE: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _text("trainer, rollout, reward, transport, metrics, or a reward model's scorer.", 64),
        "desired": _count("Pods that there should be."),
        "ready": _count("Pods that are ready."),
        "updated": _count("Pods of the newest template."),
        "restarts": _count("Restarts of their containers."),
        "replicas": _text("ready/desired.", 32),
        "lastFailure": _text("What last went wrong in one of its pods."),
    },
}

STATUS: dict[str, Any] = {
    "type": "object",
    "description": "What the operator sees. Written by it alone.",
    "properties": {
        "observedGeneration": _count("The generation of the object that this status follows from."),
        "phase": _text("The conditions in one word; never read back.", 64),
        "run": _text("Id of the run: name and short uid; part of the run's folder and of every key in Redis.", 64),
        "conditions": {
            "type": "array",
            "maxItems": 32,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": _CONDITION,
            "description": "What holds of the job and what does not; docs/kubernetes/conditions.md says what to do.",
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
            "description": "For the columns of kubectl get.",
        },
        "progress": {
            "type": "object",
            "description": "From the metrics service, at most 10 s old while the job runs.",
            "properties": {
                "step": _count("Steps closed."),
                "totalSteps": _count("Steps of the run."),
                "rewardMean": {"type": "number", "description": "Mean reward of the last step."},
                "exposedRewardSeconds": {"type": "number", "description": "Of the last step."},
                "verdict": _text("What the last steps waited for.", 64),
                "backlog": _count("Samples that wait for a reward worker."),
                "troubles": {
                    "type": "array",
                    "maxItems": 64,
                    "items": {
                        "type": "object",
                        "properties": {"reason": _text("In one word.", 128), "message": _text("In words.")},
                    },
                    "description": "What is wrong that no pod shows; told as Degraded.",
                },
            },
        },
        "attempt": _count("Number of the trainer's present attempt, from 0."),
        "restarts": _count("Attempts of the trainer that failed and were not the cluster's doing."),
        "disruptions": _count("Attempts of the trainer that the cluster ended."),
        "shortAttempts": _count("Attempts in a row that ran for less than ten minutes; they lengthen the back-off."),
        "nextAttemptTime": _time("When the trainer's next attempt may start, once one has ended."),
        "startTime": _time("When all of it first ran."),
        "completionTime": _time("When it ended."),
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
    _column("Age", "date", ".metadata.creationTimestamp"),
]
