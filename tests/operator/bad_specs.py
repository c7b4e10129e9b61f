"""Specifications that must be refused, by the schema, by CEL or by the models, with words that say what to mend."""

from __future__ import annotations

import copy
from typing import Any

from world import rljob

_TLS = "rediss://host:6379/0"
ABSENT = object()
"""In place of a value: the field is taken out."""

_PYTHON = {"name": "mine", "kind": "python", "python": {"path": "/plaudit/reward.py"}}
_JUDGE = {
    "name": "judge",
    "kind": "judge",
    "judge": {
        "baseUrl": "https://judge.example/v1",
        "model": "big",
        "promptTemplate": {"path": "/plaudit/judge.j2"},
        "parse": {"regex": "score: ([0-9.]+)"},
    },
}


_SCORING_ONLY = dict.fromkeys(("model", "data", "algorithm", "rollout", "trainer"), ABSENT)


def _judge(**fields: Any) -> list[dict[str, Any]]:
    return [{**_JUDGE, "judge": {**_JUDGE["judge"], **fields}}]


def _scorers(*scorers: dict[str, Any]) -> list[dict[str, Any]]:
    return list(scorers)


_KEY = {"secretKeyRef": {"name": "a", "key": "b"}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"managedBy": "no-domain"}, "managedBy"),
    ({"lifecycle": {"failurePolicy": {"rules": [{"action": "Fail"}]}}}, "exactly one of onExitCodes and onReasons"),
    ({"lifecycle": {"failurePolicy": {"rules": [{"action": "Fail", "onExitCodes": {"values": [0]}}]}}}, "onExitCodes"),
    ({"lifecycle": {"failurePolicy": {"backoff": {"initialSeconds": 400}}}}, "more than maxSeconds"),
    ({"trainer": {"pod": {"env": [{"name": "A", "value": "1", "valueFrom": _KEY}]}}}, "valueFrom"),
    ({"metrics": {"pod": {"env": [{"name": "A", "valueFrom": {}}]}}}, "exactly one of secretKeyRef"),
    (
        {
            "rollout": {
                "pod": {"env": [{"name": "A", "valueFrom": {**_KEY, "fieldRef": {"fieldPath": "status.podIP"}}}]}
            }
        },
        "exactly one of secretKeyRef",
    ),
    ({"rollout": {"pod": {"gpuResource": "gpu"}}}, "gpuResource"),
    # Values of the wrong kind or out of range: the schema.
    ({"seed": -1}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"algorithm.steps": 0}, "steps"),
    ({"algorithm.steps": "3"}, "steps"),
    ({"algorithm.steps": ABSENT}, "steps"),
    ({"algorithm.promptsPerStep": 0}, "promptsPerStep"),
    ({"algorithm.samplesPerPrompt": 5000}, "samplesPerPrompt"),
    ({"algorithm.maxStaleness": -1}, "maxStaleness"),
    ({"algorithm.order": "fast"}, "order"),
    ({"algorithm.advantage": "ppo"}, "advantage"),
    ({"algorithm.loss": {"clipLow": 1.5}}, "clipLow"),
    ({"algorithm.loss": {"aggregation": "mean"}}, "aggregation"),
    ({"algorithm.loss": {"correctionCap": 0}}, "correctionCap"),
    ({"algorithm.optimizer": {"learningRate": 0}}, "learningRate"),
    ({"algorithm.optimizer": {"beta1": 1.0}}, "beta1"),
    ({"model.source": ""}, "source"),
    ({"model.dtype": "int8"}, "dtype"),
    ({"model.trustRemoteCode": "yes"}, "trustRemoteCode"),
    ({"data.train.path": ABSENT}, "path"),
    ({"data.train.maxPromptLength": 0}, "maxPromptLength"),
    ({"data.validation": {"path": "/plaudit/v.parquet", "everySteps": 0}}, "everySteps"),
    ({"rollout.replicas": 0}, "replicas"),
    ({"rollout.replicas": "2"}, "replicas"),
    ({"rollout.engine": {"kind": "sglang"}}, "kind"),
    ({"rollout.engine": {"gpuMemoryUtilization": 1.5}}, "gpuMemoryUtilization"),
    ({"rollout.inFlight": "abort"}, "inFlight"),
    ({"rollout.sampling": {"topP": 0}}, "topP"),
    ({"rollout.agent": {"kind": "swarm"}}, "kind"),
    ({"reward.scorers": []}, "scorers"),
    ({"reward": ABSENT}, "reward"),
    ({"reward.scorers": _scorers({**_PYTHON, "name": "Mine"})}, "name"),
    ({"reward.scorers": _scorers({**_PYTHON, "name": "a-name-that-is-far-too-long"})}, "name"),
    ({"reward.scorers": _scorers({**_PYTHON, "kind": "magic"})}, "kind"),
    ({"reward.scorers": _scorers({**_PYTHON, "timeoutSeconds": 0})}, "timeoutSeconds"),
    ({"reward.scorers": _scorers({**_PYTHON, "onFailure": "retry"})}, "onFailure"),
    ({"reward.onFailure": "ignore"}, "onFailure"),
    ({"reward.maxFailedShare": 2}, "maxFailedShare"),
    ({"reward.timeoutSeconds": 0}, "timeoutSeconds"),
    ({"reward.workers.replicas": 0}, "replicas"),
    ({"reward.workers.processes": 0}, "processes"),
    ({"reward.workers.autoscaling": {"provider": "cron"}}, "provider"),
    ({"trainer.ranks": 0}, "ranks"),
    ({"trainer.strategy": "ddp"}, "strategy"),
    ({"trainer.checkpoint": {"everySteps": 0}}, "everySteps"),
    ({"trainer.sinks": ["excel"]}, "sinks"),
    ({"transport": {"url": "http://redis:6379"}}, "url"),
    ({"transport": {"managed": {"memory": "lots"}}}, "memory"),
    ({"transport": {"managed": {"persistence": "never"}}}, "persistence"),
    ({"storage.mountPath": "plaudit"}, "mountPath"),
    ({"files": {"configMap": "code", "items": [{"key": "a", "path": "/a.py"}]}}, "path"),
    ({"metrics": {"rewardLatency": {"target": 1}}}, "target"),
    ({"scheduling": {"gang": "volcano"}}, "gang"),
    ({"lifecycle": {"cleanup": "Some"}}, "cleanup"),
    ({"lifecycle": {"preRunningDeadlineSeconds": 0}}, "preRunningDeadlineSeconds"),
    ({"lifecycle": {"failurePolicy": {"maxRestarts": -1}}}, "maxRestarts"),
    ({"trainer.pod": {"env": [{"value": "x"}]}}, "name"),
    # Fields together: CEL.
    ({"rollout": ABSENT}, "rollout"),
    ({"trainer": ABSENT}, "trainer"),
    ({"model": ABSENT}, "model"),
    ({"data": ABSENT}, "data"),
    ({"rollout": ABSENT, "trainer": ABSENT}, "unused"),
    ({"storage": ABSENT}, "claimName"),
    ({"algorithm": {"steps": 3, "promptsPerStep": 10, "miniBatchesPerStep": 3}}, "miniBatchesPerStep"),
    ({"algorithm.order": "ready"}, "maxStaleness"),
    ({"algorithm.loss": {"correctionFloor": 0.5}}, "correctionFloor"),
    ({"algorithm.samplesPerPrompt": 1}, "at least 2"),
    ({"rollout.sampling": {"temperature": 0}}, "temperature"),
    ({"rollout.agent": {"kind": "tools"}}, "tools"),
    ({"rollout.agent": {"kind": "custom"}}, "path"),
    ({"rollout.agent": {"kind": "endpoint"}}, "path"),
    ({"rollout.agent": {"kind": "endpoint", "command": ["a"], "function": "f"}}, "path"),
    ({"rollout.agent": {"kind": "endpoint", "path": "a.py", "command": ["a"], "function": "f"}}, "function"),
    ({"rollout.agent": {"kind": "environment"}}, "path"),
    ({"environments": [{"name": "a"}]}, "image"),
    ({"rollout.agent": {"kind": "tools", "tools": [{"path": "t.py"}]}}, "function"),
    ({"rollout.agent": {"kind": "tools", "tools": [{"path": "t.py", "function": "f", "config": "c"}]}}, "exactly one"),
    ({"rollout.agent": {"kind": "tools", "tools": [{"mcp": {}}]}}, "url"),
    ({"reward.scorers": _scorers({"name": "mine", "kind": "python"})}, "python"),
    ({"reward.scorers": _scorers({"name": "mine", "kind": "judge"})}, "judge"),
    ({"reward.scorers": _scorers({"name": "mine", "kind": "model"})}, "model"),
    ({"reward.scorers": _scorers({**_PYTHON, "kind": "rule"})}, "python"),
    ({"reward.scorers": _scorers({**_PYTHON, "rule": "gsm8k"})}, "rule"),
    ({"reward.scorers": _scorers({"name": "r", "kind": "rule", "isolation": "thread"})}, "isolation"),
    ({"reward.scorers": _scorers({**_PYTHON, "limits": {"concurrency": 1}})}, "limits"),
    ({"reward.scorers": _judge(parse={})}, "parse"),
    ({"reward.scorers": _judge(parse={"regex": "(.)", "jsonPath": "$.a"})}, "parse"),
    ({"reward.scorers": _judge(baseUrl="judge.example")}, "baseUrl"),
    ({"reward.scorers": _judge(serve={"source": "/plaudit/judge"})}, "serve"),
    ({"reward.scorers": _judge(model="")}, "model"),
    ({"reward.combine": {"kind": "python"}}, "function"),
    ({"reward.workers.autoscaling": {"minReplicas": 5, "maxReplicas": 2}}, "maxReplicas"),
    ({"trainer.ranks": 2}, "strategy"),
    ({"trainer": {"ranks": 12, "ranksPerPod": 8, "strategy": "fsdp2"}}, "ranksPerPod"),
    ({"transport": {"passwordSecret": {"name": "a", "key": "b"}}}, "url"),
    ({"transport": {"url": "redis://user:secret@host:6379/0"}}, "passwordSecret"),
    ({"files": {"items": [{"key": "a", "path": "a.py"}]}}, "configMap"),
    ({"scheduling": {"gang": "native", "queueName": "team"}}, "queue"),
    ({"scheduling": {"queueName": "Team A"}}, "queueName"),
    # What only the models see: SpecValid.
    ({"reward.scorers": _scorers(_PYTHON, _PYTHON)}, "mine"),
    ({"reward.scorers": _scorers({**_PYTHON, "when": {"scorer": "other", "equals": 1}})}, "other"),
    ({"reward.scorers": _scorers({"name": "r", "kind": "rule", "rule": "nothing"})}, "nothing"),
    ({"reward.scorers": _scorers({**_PYTHON, "weight": 0})}, "weight"),
    ({"reward.scorers": _scorers({**_PYTHON, "python": {"path": "reward.py"}})}, "relative"),
    ({"data.train.path": "train.parquet"}, "relative"),
    ({"rollout.engine": {"maxModelLength": 64}}, "maxModelLength"),
    ({"reward.minSamplesPerGroup": 9}, "minSamplesPerGroup"),
    ({"transport": {"managed": {"memory": "1Mi"}}}, "memory"),
    ({"trainer.pod": {"resources": {"limits": {"nvidia.com/gpu": 3}}}}, "nvidia.com/gpu"),
    ({"model.sorce": "x"}, "sorce"),
    ({"scheduling": {"queueName": "team"}, "lifecycle": {"cleanup": "KeepTransport"}}, "quota of a job as a whole"),
    ({**_SCORING_ONLY, "scheduling": {"gang": "native"}}, "trainer and rollouts together"),
    # What the operator does not do yet.
    ({"transport": {"url": "redis://host:6379/0", "tls": {"caFile": "/ca.pem"}}}, "rediss"),
    ({"transport": {"tls": {"caFile": "/ca.pem"}}}, "url"),
    ({"transport": {"username": "me"}}, "url"),
    ({"transport": {"url": "redis://host:6379/0", "username": "me"}}, "passwordSecret"),
    ({"transport": {"url": "redis://host:6379/0", "username": "two words"}}, "username"),
    ({"transport": {"url": _TLS, "tls": {"caFile": "/ca.pem", "caSecret": {"name": "r", "key": "ca"}}}}, "caFile"),
    ({"transport": {"url": _TLS, "tls": {"certificateFile": "/c.pem"}}}, "keyFile"),
    ({"transport": {"url": _TLS, "tls": {"keySecret": {"name": "r", "key": "k"}}}}, "certificateSecret"),
    ({"transport": {"url": _TLS, "tls": {"caFile": "ca.pem"}}}, "relative"),
    ({"transport": {"url": _TLS, "tls": {"caFile": "/ca.pem"}}, "reward.workers": {"autoscaling": {}}}, "caSecret"),
    ({"transport": {"url": _TLS, "tls": {"checkServerName": False}}, "reward.workers": {"autoscaling": {}}}, "KEDA"),
]


def bad_job(changes: dict[str, Any]) -> dict[str, Any]:
    """A good job with the changes: fields under ``spec`` by their path."""
    job = copy.deepcopy(rljob())
    for path, value in changes.items():
        *way, last = path.split(".")
        section = job["spec"]
        for part in way:
            section = section.setdefault(part, {})
        if value is ABSENT:
            section.pop(last, None)
        else:
            section[last] = copy.deepcopy(value)
    return job
