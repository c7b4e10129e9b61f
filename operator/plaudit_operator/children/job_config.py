"""Build the job's ConfigMap and its pods' service account, and give pods access to the job's files and to Redis.

The ConfigMap holds the job file and the frozen pod templates. Access to Redis is environment variables, and a volume of
the Secrets and ConfigMaps that they name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from plaudit_job.load import dump_json, job_data
from plaudit_job.spec.section import SecretKey
from plaudit_job.spec.transport import ConfigMapKey, TlsSpec
from plaudit_operator import names
from plaudit_operator.admission import known_to, mutable_fields, overlaid
from plaudit_operator.children.context import JobContext, Manifest, Templates
from plaudit_operator.runtime.kinds import CONFIG_MAP, SERVICE_ACCOUNT

JOB_FOLDER = "/etc/plaudit"
REDIS_FOLDER = "/run/plaudit/redis"
MUTABLE_FIELDS = "mutable-fields.json"
"""Key with the fields that may change, as the operator that admitted the job knew them: its images read no others."""
_FOR_CONTROLLERS = ("suspend", "managedBy")
_VOLUME = "redis"
_PASSWORD, _CA, _CERTIFICATE, _KEY = "password", "ca.pem", "certificate.pem", "key.pem"
_MOST_BYTES = 1 << 20
"""Data of a ConfigMap, which the API server limits."""


def config_map(context: JobContext, templates: Templates) -> Manifest:
    """Return the ConfigMap of the resolved job, its files and the frozen pod templates."""
    data = {
        "job.yaml": _job_file(context),
        "spec.json": as_json(context.admitted.spec),
        "current.json": as_json(context.admitted.current),
        "templates.json": as_json(templates),
        "platform.json": as_json(context.platform),
        "images.json": as_json(asdict(context.settings.images)),
        "files.json": as_json([{"key": f.key, "path": f.path, "sha256": f.digest} for f in context.admitted.files]),
        **_mutable_fields(context),
        **_run(context),
        **({"services.json": as_json(context.admitted.services)} if context.admitted.services else {}),
        **{f.key: f.content for f in context.admitted.files},
    }
    return context.manifest(CONFIG_MAP, context.metadata(names.job_config(context.name), "job"), data=data)


def revision_config(context: JobContext) -> Manifest:
    """Return the ConfigMap that the reward workers and gateways of a RewardService's present revision read.

    Each revision has one of its own, so that a pod of an earlier one that restarts finds its own scorers.
    """
    name = names.revision_config(context.name, context.revision)
    metadata = context.metadata(name, "job", **{names.LABEL_REVISION: context.revision})
    data = {"job.yaml": _job_file(context), **{f.key: f.content for f in context.admitted.files}}
    return context.manifest(CONFIG_MAP, metadata, data=data)


def revision_labels(context: JobContext, role: str) -> dict[str, str]:
    """Return the label of the revision for pods that a RewardService replaces with each of its revisions."""
    return {names.LABEL_REVISION: context.revision} if context.revision and names.ROLES[role].revised else {}


def job_volume_source(context: JobContext, role: str) -> Manifest:
    """Return the source of the volume with ``job.yaml`` and its files in the pods of a role."""
    items = [{"key": "job.yaml", "path": "job.yaml"}, *({"key": f.key, "path": f.path} for f in context.admitted.files)]
    if not context.revision:
        return {"name": names.job_config(context.name), "items": items}
    if names.ROLES[role].revised:
        return {"name": names.revision_config(context.name, context.revision), "items": items}
    # These pods outlive revisions, and later ones may have fewer files.
    return {"name": names.job_config(context.name), "items": items, "optional": True}


def excess(context: JobContext, config: Manifest) -> str:
    """Return why the files of a job do not fit into its ConfigMap, with their sizes; empty if they do."""
    total = sum(len(text.encode()) for text in config["data"].values())
    if total <= _MOST_BYTES:
        return ""
    sizes = {file.path: len(file.content.encode()) for file in context.admitted.files}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
    listed = ", ".join(f"{path} {_kib(sizes[path])}" for path in largest)
    taken = sum(sizes.values())
    return (
        f"spec.files.configMap: the files take {_kib(taken)} and the job itself {_kib(total - taken)}, but a ConfigMap "
        f"holds {_kib(_MOST_BYTES)} (largest: {listed}). Put large files on the shared volume and give their paths"
    )


def _kib(size: int) -> str:
    return f"{-(-size // 1024):,} KiB"


def _job_file(context: JobContext) -> str:
    """Return the resolved job, for the job's processes.

    The processes run the images of the job's admission. So the file keeps the fields and defaults of the operator that
    admitted the job, and an edit changes only mutable fields in it.
    """
    written, current = context.admitted.written, context.admitted.current
    same_services = written.get("services.json", "{}") == as_json(context.admitted.services)
    if "job.yaml" in written and written["current.json"] == as_json(current) and same_services:
        return written["job.yaml"]
    if "job.yaml" not in written or context.revision:
        return dump_json(_for_processes(job_data(context.admitted.job)))
    resolved = msgspec.json.decode(written["job.yaml"])
    spec = overlaid(resolved["spec"], current)
    if MUTABLE_FIELDS in written:
        spec = known_to(msgspec.json.decode(written[MUTABLE_FIELDS]), spec)
    return dump_json(_for_processes({**resolved, "spec": spec if same_services else _with_tokens(context, spec)}))


def _with_tokens(context: JobContext, spec: Manifest) -> Manifest:
    """Return a resolved spec with the Secrets of services that were created again."""
    reward = context.spec.reward
    canary = reward.gateway.canary
    called = [*(scorer.service for scorer in reward.scorers), canary.service if canary else None]
    services = [service for service in called if service is not None]
    tokens = {service.url: service.token_secret.name for service in services if service.token_secret is not None}
    spec = copy.deepcopy(spec)
    written = [*spec["reward"]["scorers"], (spec["reward"].get("gateway") or {}).get("canary") or {}]
    for service in (holder.get("service") or {} for holder in written):
        if service.get("url") in tokens:
            service["tokenSecret"]["name"] = tokens[service["url"]]
    return spec


def _mutable_fields(context: JobContext) -> dict[str, str]:
    written = context.admitted.written
    if not written:
        return {MUTABLE_FIELDS: as_json(mutable_fields())}
    return {MUTABLE_FIELDS: written[MUTABLE_FIELDS]} if MUTABLE_FIELDS in written else {}


def _run(context: JobContext) -> dict[str, str]:
    """Record what the run began with, unless an earlier operator did not: an upgrade writes nothing."""
    written = context.admitted.written
    if written and names.RUN_KEY not in written:
        return {}
    return {
        names.RUN_KEY: written.get(names.RUN_KEY) or as_json({"kind": context.admitted.kind, "uid": context.run_uid})
    }


def _for_processes(job: Manifest) -> Manifest:
    """Leave out what only controllers read: a suspension rewrites no file, and old processes meet no new field."""
    return {**job, "spec": {name: value for name, value in job["spec"].items() if name not in _FOR_CONTROLLERS}}


def service_account(context: JobContext) -> Manifest:
    """Return the service account of the job's pods: it has no rights, and no pod mounts its token."""
    metadata = context.metadata(context.role_object("pods"), "pods")
    if context.platform.service_account_annotations:
        metadata["annotations"] = dict(context.platform.service_account_annotations)
    return context.manifest(SERVICE_ACCOUNT, metadata, automountServiceAccountToken=False)


def as_json(data: Any) -> str:
    """Return plain data as it is written into a ConfigMap."""
    return msgspec.json.encode(data, order="sorted").decode()


def redis_environment(context: JobContext, role: str) -> dict[str, str]:
    """Return the variables that ``RedisAddress.from_environment`` reads in the pods of a role."""
    transport = context.spec.transport
    tls, given = transport.tls or TlsSpec(), _redis_files(context, role)

    def path(file: str, of_job: str = "") -> str:
        """Return a file's path in the pod; a relative path names one of the job's files."""
        if file in given:
            return f"{REDIS_FOLDER}/{file}"
        return f"{JOB_FOLDER}/{of_job}" if of_job and not of_job.startswith("/") else of_job

    found = {
        "PLAUDIT_REDIS_USERNAME": transport.username if transport.url else role,
        "PLAUDIT_REDIS_PASSWORD_FILE": path(_PASSWORD),
        "PLAUDIT_REDIS_TLS_CA": path(_CA, tls.ca_file),
        "PLAUDIT_REDIS_TLS_CERTIFICATE": path(_CERTIFICATE, tls.certificate_file),
        "PLAUDIT_REDIS_TLS_KEY": path(_KEY, tls.key_file),
        "PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME": "" if tls.check_server_name else "false",
    }
    return {"PLAUDIT_REDIS_URL": context.redis_url} | {name: value for name, value in found.items() if value}


def redis_mounts(context: JobContext, role: str) -> list[Manifest]:
    """Return the mount of the password and certificates of a role; empty without any."""
    return [redis_mount()] if _redis_files(context, role) else []


def redis_volumes(context: JobContext, role: str) -> list[Manifest]:
    """Return the volume of the password and certificates of a role; empty without any."""
    sources = [_source(reference, path) for path, reference in _redis_files(context, role).items()]
    return [redis_volume(sources)] if sources else []


def redis_mount() -> Manifest:
    """Return the mount of the volume."""
    return {"name": _VOLUME, "mountPath": REDIS_FOLDER, "readOnly": True}


def redis_volume(sources: Sequence[Manifest]) -> Manifest:
    """Return a projected volume of keys of Secrets and ConfigMaps."""
    return {"name": _VOLUME, "projected": {"sources": list(sources), "defaultMode": 0o440}}


def secret_source(name: str, *keys: str) -> Manifest:
    """Return a volume source with keys of a Secret as files of the same names."""
    return {"secret": {"name": name, "items": [{"key": key, "path": key} for key in keys]}}


def _source(reference: SecretKey | ConfigMapKey, path: str) -> Manifest:
    kind = "secret" if isinstance(reference, SecretKey) else "configMap"
    return {kind: {"name": reference.name, "items": [{"key": reference.key, "path": path}]}}


def _redis_files(context: JobContext, role: str) -> dict[str, SecretKey | ConfigMapKey]:
    """Return the keys of the password and certificates of a role by their file names."""
    transport = context.spec.transport
    if not transport.url:
        return {_PASSWORD: SecretKey(name=names.redis_secret(context.name, context.run_uid), key=role)}
    tls = transport.tls or TlsSpec()
    whole = tls.certificate_secret and tls.key_secret
    given = {
        _PASSWORD: transport.password_secret,
        _CA: tls.ca_secret or tls.ca_config_map,
        _CERTIFICATE: tls.certificate_secret if whole else None,
        _KEY: tls.key_secret if whole else None,
    }
    return {path: key for path, key in given.items() if key}
