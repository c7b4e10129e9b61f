"""Give a pod access to Redis: environment variables, and a volume of Secrets and ConfigMaps that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plaudit_operator import names
from plaudit_operator.children.context import JobContext, Manifest
from plaudit_workers.job.spec.section import SecretKey
from plaudit_workers.job.spec.transport import ConfigMapKey, TlsSpec

JOB_FOLDER = "/etc/plaudit"
REDIS_FOLDER = "/run/plaudit/redis"
VOLUME = "redis"

_PASSWORD, _CA, _CERTIFICATE, _KEY = "password", "ca.pem", "certificate.pem", "key.pem"


def environment(context: JobContext, role: str) -> dict[str, str]:
    """Return the variables that ``RedisAddress.from_environment`` reads in the pods of a role."""
    transport = context.spec.transport
    tls = transport.tls or TlsSpec()
    values = {"PLAUDIT_REDIS_URL": context.redis_url}
    given = {path for path, _ in _files(context, role)}
    found = {
        "PLAUDIT_REDIS_USERNAME": transport.username if transport.url else role,
        "PLAUDIT_REDIS_PASSWORD_FILE": _in_volume(_PASSWORD, given),
        "PLAUDIT_REDIS_TLS_CA": _in_volume(_CA, given) or _absolute(tls.ca_file),
        "PLAUDIT_REDIS_TLS_CERTIFICATE": _in_volume(_CERTIFICATE, given) or _absolute(tls.certificate_file),
        "PLAUDIT_REDIS_TLS_KEY": _in_volume(_KEY, given) or _absolute(tls.key_file),
        "PLAUDIT_REDIS_TLS_CHECK_SERVER_NAME": "" if tls.check_server_name else "false",
    }
    return values | {name: value for name, value in found.items() if value}


def mounts(context: JobContext, role: str) -> list[Manifest]:
    """Return the mount of the files; empty without files."""
    return [mount()] if _files(context, role) else []


def volumes(context: JobContext, role: str) -> list[Manifest]:
    """Return the volume of the files."""
    found = _files(context, role)
    return [volume([_source(reference, path) for path, reference in found])] if found else []


def mount() -> Manifest:
    """Return the mount of the volume."""
    return {"name": VOLUME, "mountPath": REDIS_FOLDER, "readOnly": True}


def volume(sources: Sequence[Manifest]) -> Manifest:
    """Return a projected volume of keys of Secrets and ConfigMaps."""
    return {"name": VOLUME, "projected": {"sources": list(sources), "defaultMode": 0o440}}


def secret_source(name: str, *keys: str) -> Manifest:
    """Return a volume source with keys of a Secret as files of the same names."""
    return {"secret": {"name": name, "items": [{"key": key, "path": key} for key in keys]}}


def _files(context: JobContext, role: str) -> list[tuple[str, SecretKey | ConfigMapKey]]:
    transport = context.spec.transport
    if not transport.url:
        secret = names.redis_secret(context.name, context.uid)
        return [(_PASSWORD, SecretKey(name=secret, key=role))]
    return list(_external(context))


def _external(context: JobContext) -> Iterator[tuple[str, SecretKey | ConfigMapKey]]:
    transport = context.spec.transport
    if transport.password_secret:
        yield _PASSWORD, transport.password_secret
    tls = transport.tls
    if tls is None:
        return
    authority = tls.ca_secret or tls.ca_config_map
    if authority:
        yield _CA, authority
    if tls.certificate_secret and tls.key_secret:
        yield _CERTIFICATE, tls.certificate_secret
        yield _KEY, tls.key_secret


def _source(reference: SecretKey | ConfigMapKey, path: str) -> Manifest:
    kind = "secret" if isinstance(reference, SecretKey) else "configMap"
    return {kind: {"name": reference.name, "items": [{"key": reference.key, "path": path}]}}


def _in_volume(path: str, given: set[str]) -> str:
    return f"{REDIS_FOLDER}/{path}" if path in given else ""


def _absolute(file: str) -> str:
    """Return the path in the pod; a relative path names one of the job's files."""
    return f"{JOB_FOLDER}/{file}" if file and not file.startswith("/") else file
