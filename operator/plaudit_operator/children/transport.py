"""Build the job's own Redis: a StatefulSet of one pod, its Service, and its volume, which is deleted with the job."""

from __future__ import annotations

import secrets

from plaudit_job.spec.pod import PodSpec
from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_operator.children.job_config import REDIS_FOLDER, redis_mount, redis_volume, secret_source
from plaudit_operator.children.pod import RolePod, restricted_container, small_resources
from plaudit_operator.runtime.kinds import SECRET
from plaudit_wire.redis_access import ADMIN, PROBE, acl_file, server_configuration, users

ROLE = "redis"
USERS_FILE = "users.acl"
"""Key of the Secret with the ACL file, which holds digests of the passwords.

Redis's own pod reads this key and the passwords of ``probe`` and ``admin``; no other pod has the last."""
KEDA_USERNAME = "keda-username"
"""Key of the Secret with the name of KEDA's user: a TriggerAuthentication reads it only from a Secret."""
_FUNCTIONS = "/functions"
_FOLDER: Manifest = {"name": "functions", "mountPath": _FUNCTIONS}
_START = f"""\
set -eu
printf '%s\\n' "$REDIS_CONFIGURATION" > /tmp/redis.conf
load() {{
  REDISCLI_AUTH="$(cat {REDIS_FOLDER}/{ADMIN})" redis-cli -e --user {ADMIN} -p {names.REDIS_PORT} \\
    -x function load replace < "$1" > /dev/null
}}
(for library in {_FUNCTIONS}/*.lua; do until load "$library"; do sleep 0.5; done; done) &
exec redis-server /tmp/redis.conf
"""
"""Redis loads the functions of the run whenever it starts, because its data may be lost or older than they are."""
_PING = f'REDISCLI_AUTH="$(cat {REDIS_FOLDER}/{PROBE})" redis-cli --user {PROBE} ping | grep -q PONG'


def managed(context: JobContext) -> bool:
    """Return True if the job has a Redis of its own."""
    return not context.spec.transport.url


def redis_pod(context: JobContext) -> RolePod:
    """Return the pods of Redis."""
    transport = context.spec.transport.managed
    limits = {"memory": transport.memory, **transport.pod.resources.limits}
    resources = transport.pod.resources.model_copy(update={"limits": limits})
    pod = transport.pod.model_copy(update={"resources": resources})
    return RolePod(
        role=ROLE,
        image=transport.image or context.settings.images.redis,
        command=["sh", "-c", _START],
        pod=pod,
        environment={"REDIS_CONFIGURATION": _configuration(context)},
        ports={"redis": names.REDIS_PORT},
        probe={"exec": {"command": ["sh", "-c", _PING]}},
        grace_s=30,
        joins_run=False,
        extra_mounts=({"name": "data", "mountPath": "/data"}, {**_FOLDER, "readOnly": True}, redis_mount()),
        extra_volumes=(
            redis_volume([secret_source(names.redis_secret(context.name, context.run_uid), USERS_FILE, PROBE, ADMIN)]),
            {"name": _FOLDER["name"], "emptyDir": {}},
        ),
        init_containers=(_write_functions(context, pod),),
    )


def _write_functions(context: JobContext, pod: PodSpec) -> Manifest:
    """Return the container that writes the functions' code: as of the image whose processes call them."""
    return {
        "name": "functions",
        "image": context.settings.images.worker,
        "command": ["python3", "-m", "plaudit_workers.stream.libraries", _FUNCTIONS],
        "volumeMounts": [_FOLDER],
        **restricted_container(context),
        "resources": small_resources(pod),
    }


def _configuration(context: JobContext) -> str:
    transport = context.spec.transport.managed
    kept = server_configuration(transport.persistence, transport.max_memory_bytes)
    lines = [f"port {names.REDIS_PORT}", "dir /data", f"aclfile {REDIS_FOLDER}/{USERS_FILE}", *kept]
    return "\n".join(lines)


def replicas(context: JobContext) -> int:
    """Return the number of pods: a job that is suspended as a whole has none, and keeps its volume."""
    return 0 if context.spec.suspend and context.spec.scheduling.whole else 1


def stateful_set(context: JobContext) -> Manifest:
    """Return the fields of the spec of the StatefulSet."""
    transport = context.spec.transport.managed
    claim: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": transport.storage}}}
    if transport.storage_class_name:
        claim["storageClassName"] = transport.storage_class_name
    return {
        "serviceName": context.role_object(ROLE),
        "replicas": replicas(context),
        "podManagementPolicy": "Parallel",
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }


def created_once(context: JobContext) -> list[Manifest]:
    """Return the Secret with a password for each user of the run's Redis, and the ACL file that Redis loads.

    It is created once: the operator may create Secrets, but neither read nor change them.
    """
    metadata = context.metadata(names.redis_secret(context.name, context.run_uid), ROLE)
    passwords = {user: secrets.token_urlsafe(32) for user in users(trains=context.spec.trains)}
    data = passwords | {USERS_FILE: acl_file(context.run, passwords), KEDA_USERNAME: "keda"}
    return [context.manifest(SECRET, metadata, type="Opaque", stringData=data)]
