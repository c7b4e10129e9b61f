"""Who scales the reward workers: KEDA by the queue, or an HPA by CPU. Then the operator leaves ``replicas`` alone."""

from __future__ import annotations

from urllib.parse import urlsplit

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.reward import ROLE
from plaudit_operator.kinds import HPA, SCALED_OBJECT, TRIGGER_AUTHENTICATION
from plaudit_workers.job.reward import Autoscaling
from plaudit_workers.stream.names import CONSUMER_GROUPS, Names

_CPU_PERCENT = 70
_DOWN_WINDOW_S = 300
_POLL_S = 5
_BEHAVIOR: Manifest = {
    "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Percent", "value": 300, "periodSeconds": 15}]},
    "scaleDown": {"stabilizationWindowSeconds": _DOWN_WINDOW_S},
}


def manifests(context: JobContext, *, suspended: bool) -> list[Manifest]:
    """ScaledObject and its authentication, or an HPA, or nothing."""
    scaling = context.spec.reward.workers.autoscaling
    if scaling is None:
        return []
    if scaling.provider == "hpa":
        return [_hpa(context, scaling)]
    return [_authentication(context), _scaled_object(context, scaling, suspended=suspended)]


def _hpa(context: JobContext, scaling: Autoscaling) -> Manifest:
    name = names.role_object(context.name, ROLE)
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": max(1, scaling.min_replicas),
        "maxReplicas": scaling.max_replicas,
        "behavior": _BEHAVIOR,
        "metrics": [
            {
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": _CPU_PERCENT}},
            }
        ],
    }
    return context.manifest(HPA, context.metadata(name, ROLE), spec)


def _authentication(context: JobContext) -> Manifest:
    transport = context.spec.transport
    name = names.role_object(context.name, ROLE)
    reference = {"parameter": "password", "name": names.redis_secret(context.name, context.uid), "key": "password"}
    if transport.url:
        secret = transport.password_secret
        reference = {"parameter": "password", "name": secret.name, "key": secret.key} if secret else {}
    spec = {"secretTargetRef": [reference]} if reference else {}
    return context.manifest(TRIGGER_AUTHENTICATION, context.metadata(name, ROLE), spec)


def _scaled_object(context: JobContext, scaling: Autoscaling, *, suspended: bool) -> Manifest:
    """Two triggers: one with both counts would silently ignore the second."""
    name = names.role_object(context.name, ROLE)
    metadata = context.metadata(name, ROLE)
    if suspended:
        metadata["annotations"] = {names.KEDA_PAUSE: "0"}
    count = str(scaling.samples_per_replica)
    spec = {
        "scaleTargetRef": {"name": name},
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "pollingInterval": _POLL_S,
        "cooldownPeriod": _DOWN_WINDOW_S,
        "fallback": {"failureThreshold": 3, "replicas": max(1, scaling.min_replicas), "behavior": _KEEP},
        "advanced": {
            "scalingModifiers": {"formula": "lag + pending", "target": count, "metricType": "AverageValue"},
            "horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR},
        },
        "triggers": [
            _trigger(context, "lag", "lagCount", count),
            _trigger(context, "pending", "pendingEntriesCount", count),
        ],
    }
    return context.manifest(SCALED_OBJECT, metadata, spec)


_KEEP = "currentReplicasIfHigher"


def _trigger(context: JobContext, name: str, count_name: str, count: str) -> Manifest:
    address = urlsplit(context.redis_url)
    metadata = {
        "address": f"{address.hostname}:{address.port or names.REDIS_PORT}",
        "stream": Names(context.run).samples,
        "consumerGroup": CONSUMER_GROUPS["samples"],
        count_name: count,
        "enableTLS": str(address.scheme == "rediss").lower(),
    }
    reference = {"name": names.role_object(context.name, ROLE)}
    return {"type": "redis-streams", "name": name, "metadata": metadata, "authenticationRef": reference}
