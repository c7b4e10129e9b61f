"""Read the address of an external Redis from ``spec.transport`` and its Secrets."""

from __future__ import annotations

from pathlib import Path

from plaudit_wire.redis_address import RedisAddress, RedisTls
from plaudit_workers.job.secrets import secret_value
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.section import SecretKey
from plaudit_workers.job.spec.transport import TlsSpec
from plaudit_workers.launch.redis.private_files import write_private


def external_redis(job: RLJob, folder: Path) -> RedisAddress:
    """Return the address with user, password and certificates.

    Args:
        folder: of the run; Secrets that have to be files are written into it, readable by this user only.
    """
    transport = job.spec.transport
    secret = transport.password_secret
    password = secret_value(secret, "spec.transport.passwordSecret") if secret else ""
    tls = _files(transport.tls, folder / "redis-tls") if transport.tls else RedisTls()
    return RedisAddress(transport.url, password, transport.username, tls)


def _files(tls: TlsSpec, folder: Path) -> RedisTls:
    return RedisTls(
        ca_file=tls.ca_file or _written("caSecret", tls.ca_secret, folder / "ca.pem"),
        certificate_file=tls.certificate_file
        or _written("certificateSecret", tls.certificate_secret, folder / "certificate.pem"),
        key_file=tls.key_file or _written("keySecret", tls.key_secret, folder / "key.pem"),
        check_server_name=tls.check_server_name,
    )


def _written(field: str, secret: SecretKey | None, file: Path) -> str:
    if secret is None:
        return ""
    value = secret_value(secret, f"spec.transport.tls.{field}")
    write_private(file, value + "\n")
    return str(file)
