"""``spec.transport``: the Redis that carries samples from process to process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.pod import Pod
from plaudit_workers.job.section import BYTE_QUANTITY, SecretKey, Section

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
USABLE_SHARE = 0.6
"""Of a managed Redis's memory; the rest is for the fork that writes its file anew."""


class Tls(Section):
    """How an external Redis's certificate is checked."""

    ca_secret: SecretKey | None = None
    """Certificate authority, PEM. Default: the system's."""


class ManagedRedis(Section):
    """A Redis of the job's own."""

    memory: str = Field(default="4Gi", pattern=BYTE_QUANTITY)
    """Memory of its container. Redis may use 60 % of it: writing its file anew forks the process. Default 4Gi."""
    storage: str = Field(default="10Gi", pattern=BYTE_QUANTITY)
    """Size of the volume of its append-only file. Default 10Gi."""
    storage_class_name: str = ""
    """Storage class of that volume. Default empty: the cluster's default."""
    persistence: Literal["always", "everysec", "no"] = "everysec"
    """When its file is written to disk. Default everysec: a dying Redis loses up to two seconds, which the ledger finds
    and does again."""
    image: str = ""
    """Container image. Default empty: the operator's."""
    pod: Pod = Pod()
    """Its pod."""

    @property
    def max_memory_bytes(self) -> int:
        """Bytes that Redis may use (its ``maxmemory``): 60 % of ``memory``."""
        digits = self.memory.rstrip("kMGTi")
        return int(float(digits) * _FACTORS[self.memory[len(digits) :]] * USABLE_SHARE)


class Transport(Section):
    """An external Redis by its address, or one of the job's own."""

    url: str = Field(default="", pattern=r"^(rediss?://.+)?$")
    """``redis://host:port/0``, or ``rediss://…`` for TLS, without a password. Redis 7 or Valkey. Default empty: a Redis
    of the job's own."""
    password_secret: SecretKey | None = None
    """Password of the external Redis. Default: none."""
    tls: Tls | None = None
    """How a ``rediss://`` address is checked. Default: against the system's authorities."""
    managed: ManagedRedis = ManagedRedis()
    """The Redis of the job's own, where ``url`` is empty."""
