"""``spec.transport``: the Redis that carries samples from process to process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_job.spec.pod import PodSpec, quantity
from plaudit_job.spec.section import BYTE_QUANTITY, FilePath, SecretKey, Section

USABLE_SHARE = 0.6
"""Share of a managed Redis's memory for data; the rest is for the fork that rewrites its file."""


class ConfigMapKey(Section):
    """One key of a ConfigMap; on Kubernetes only."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the ConfigMap in the job's namespace."""
    key: str = Field(min_length=1, max_length=253)
    """Key with the value."""


class TlsSpec(Section):
    """Authorities and certificates for TLS to an external Redis, all in PEM."""

    ca_secret: SecretKey | None = None
    """Certificates of the trusted authorities, from a Secret. Default: the system's authorities."""
    ca_config_map: ConfigMapKey | None = None
    """The same, from a ConfigMap. Default: none."""
    ca_file: FilePath = ""
    """The same, from a file. Default: none."""
    certificate_secret: SecretKey | None = None
    """The client's own certificate, for a Redis that requires one; with `keySecret`. Default: none."""
    key_secret: SecretKey | None = None
    """The key of `certificateSecret`, without a passphrase. Default: none."""
    certificate_file: FilePath = ""
    """The client's own certificate, from a file; with `keyFile`. Default: none."""
    key_file: FilePath = ""
    """The key of `certificateFile`, without a passphrase. Default: none."""
    check_server_name: bool = True
    """Require a certificate for the host in `url`. Default true: else any certificate of the authority would be
    accepted."""


class ManagedRedisSpec(Section):
    """A Redis of the job's own."""

    memory: str = Field(default="4Gi", pattern=BYTE_QUANTITY)
    """Memory of its container. Redis may use 60 % of it, because rewriting its file forks the process. Default 4Gi."""
    storage: str = Field(default="10Gi", pattern=BYTE_QUANTITY)
    """Size of the volume of its append-only file; give it three times the memory that Redis may use. Default 10Gi."""
    storage_class_name: str = ""
    """Storage class of that volume. Default empty: the cluster's default."""
    persistence: Literal["always", "everysec", "no"] = "everysec"
    """When its append-only file is flushed to disk: with every write, once a second, or ``no`` for no file. Default
    everysec: a crash of Redis loses up to two seconds of work, which the ledger detects and repeats."""
    image: str = ""
    """Container image. Default empty: the operator's."""
    pod: PodSpec = PodSpec()
    """Its pod."""

    @property
    def max_memory_bytes(self) -> int:
        """Return the bytes that Redis may use (its ``maxmemory``): 60 % of ``memory``."""
        return int(float(quantity(self.memory)) * USABLE_SHARE)


class TransportSpec(Section):
    """An external Redis by its address, or one of the job's own."""

    url: str = Field(default="", pattern=r"^(rediss?://.+)?$")
    """``redis://host:port/0``, or ``rediss://…`` for TLS, without a password. Redis 7 or Valkey. Default empty: a Redis
    of the job's own."""
    username: str = Field(default="", pattern=r"^\S*$", max_length=253)
    """User of the external Redis's ACL, with `passwordSecret`. Default empty: its user `default`."""
    password_secret: SecretKey | None = None
    """Password of the external Redis. Default: none."""
    ttl_seconds_after_finished: int = Field(default=604_800, ge=60)
    """Seconds from the end of the run until its keys in the external Redis expire; a run that is started again keeps
    them. Keys of a run that failed or was stopped stay until `plaudit runs delete`. Default 604800, a week."""
    tls: TlsSpec | None = None
    """TLS settings for a ``rediss://`` URL. Default: the system's authorities."""
    managed: ManagedRedisSpec = ManagedRedisSpec()
    """The Redis of the job's own, where ``url`` is empty."""
