"""Autoscale the reward workers: KEDA by queue length, or an HPA by CPU. The operator then leaves ``replicas`` alone.

An entry leaves its stream when its work is done, so a stream's length counts queued and claimed work together: KEDA
never scales down while workers still need their pods. (Lag and pending entries would be two triggers, and after some
deletions Redis reports no lag, which KEDA reads as an empty queue.)
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from plaudit_job.spec.rewards import AutoscalingSpec
from plaudit_job.spec.section import SecretKey
from plaudit_job.spec.transport import ConfigMapKey, TlsSpec
from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.roles import REWARD_ROLE
from plaudit_operator.children.transport import KEDA_USERNAME
from plaudit_operator.runtime.kinds import HPA, SCALED_OBJECT, TRIGGER_AUTHENTICATION
from plaudit_wire.names import Names, Stream

_CPU_PERCENT = 70
_POLL_S = 5
_FAILED_POLLS = 3
_STREAMS: tuple[Stream, ...] = ("samples", "groups")
_UP: Manifest = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Percent", "value": 300, "periodSeconds": 15}]}
_KEEP = "currentReplicasIfHigher"


def manifests(context: JobContext, *, suspended: bool) -> list[Manifest]:
    """Return the ScaledObject and its TriggerAuthentication, or the HPA, or an empty list."""
    scaling = context.spec.reward.workers.autoscaling
    if scaling is None:
        return []
    name = context.role_object(REWARD_ROLE)
    metadata = context.metadata(name, REWARD_ROLE)
    if scaling.provider == "hpa":
        return [context.manifest(HPA, metadata, _hpa(name, scaling))]
    authentication = {key: list(found) for key, found in _references(context).items() if found}
    paused = {**metadata, "annotations": {names.KEDA_PAUSE: "0"}} if suspended else metadata
    return [
        context.manifest(TRIGGER_AUTHENTICATION, metadata, authentication),
        context.manifest(SCALED_OBJECT, paused, _scaled_object(context, name, scaling)),
    ]


def _behavior(scaling: AutoscalingSpec) -> Manifest:
    return {"scaleUp": _UP, "scaleDown": {"stabilizationWindowSeconds": scaling.scale_down_after_seconds}}


def _hpa(name: str, scaling: AutoscalingSpec) -> Manifest:
    target = {"type": "Utilization", "averageUtilization": _CPU_PERCENT}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": max(1, scaling.min_replicas),
        "maxReplicas": scaling.max_replicas,
        "behavior": _behavior(scaling),
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }


def _references(context: JobContext) -> dict[str, Sequence[Manifest]]:
    """Return the keys of Secrets and ConfigMaps with KEDA's password, user and certificates."""
    transport = context.spec.transport
    if not transport.url:
        own = names.redis_secret(context.name, context.run_uid)
        keys = {"username": SecretKey(name=own, key=KEDA_USERNAME), "password": SecretKey(name=own, key="keda")}
        return {"secretTargetRef": [_reference(parameter, key) for parameter, key in keys.items()]}
    tls = transport.tls or TlsSpec()
    given = {"password": transport.password_secret, "ca": tls.ca_secret}
    given |= {"cert": tls.certificate_secret, "key": tls.key_secret}
    return {
        "secretTargetRef": [_reference(parameter, key) for parameter, key in given.items() if key],
        "configMapTargetRef": [_reference("ca", tls.ca_config_map)] if tls.ca_config_map else [],
    }


def _reference(parameter: str, key: SecretKey | ConfigMapKey) -> Manifest:
    return {"parameter": parameter, "name": key.name, "key": key.key}


def _scaled_object(context: JobContext, name: str, scaling: AutoscalingSpec) -> Manifest:
    quiet_s = scaling.scale_down_after_seconds
    count = str(scaling.samples_per_replica)
    return {
        "scaleTargetRef": {"name": name},
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "pollingInterval": _POLL_S,
        # Applies between one worker and none. The first worker starts even without work, to show that the scorers load.
        "initialCooldownPeriod": quiet_s,
        "cooldownPeriod": quiet_s,
        "fallback": {"failureThreshold": _FAILED_POLLS, "replicas": max(1, scaling.min_replicas), "behavior": _KEEP},
        "advanced": {
            "scalingModifiers": {"formula": " + ".join(_STREAMS), "target": count, "metricType": "AverageValue"},
            "horizontalPodAutoscalerConfig": {"behavior": _behavior(scaling)},
        },
        "triggers": [_trigger(context, name, stream, count) for stream in _STREAMS],
    }


def _trigger(context: JobContext, name: str, stream: Stream, count: str) -> Manifest:
    address = urlsplit(context.redis_url)
    metadata = {
        "address": f"{address.hostname}:{address.port or names.REDIS_PORT}",
        "databaseIndex": address.path.strip("/") or "0",
        "stream": Names(context.run).stream(stream),
        "streamLength": count,
        "enableTLS": str(address.scheme == "rediss").lower(),
    }
    if context.spec.transport.username:
        metadata["usernameFromEnv"] = "PLAUDIT_REDIS_USERNAME"
    return {"type": "redis-streams", "name": stream, "metadata": metadata, "authenticationRef": {"name": name}}
