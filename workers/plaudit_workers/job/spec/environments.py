"""``spec.environments``: servers that agents and scorers use, such as sandboxes and browsers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plaudit_workers.job.spec.kubernetes.pod import PodSpec
from plaudit_workers.job.spec.section import DNS_LABEL, Command, Section


class ReadinessSpec(Section):
    """The condition under which a server takes requests."""

    path: str = Field(default="", pattern=r"^(/.*)?$")
    """Path that answers GET with a status below 400. Default empty: the port accepts connections."""
    timeout_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds that a server may take to start under ``plaudit run``. Default 300."""


class EnvironmentServerSpec(Section):
    """One server; its URL is in ``PLAUDIT_ENVIRONMENT_<NAME>_URL`` for agents, tools and scorers."""

    name: str = Field(max_length=20, pattern=DNS_LABEL)
    """Its name, such as ``sandbox``; part of the names of its pods and of the variable."""
    image: str = ""
    """Container image, for Kubernetes. Default empty: the operator's image for workers."""
    command: Command = Field(default=[])
    """Program, by its name or path, and its arguments; ``PORT`` and ``HOST`` in its environment are where it listens.
    Required for ``plaudit run``. Default empty: the image's own."""
    port: int = Field(default=8000, ge=1, le=65_535)
    """TCP port on Kubernetes. ``plaudit run`` chooses a free one. Default 8000."""
    replicas: int = Field(default=1, ge=1, le=10_000)
    """Number of servers behind the URL on Kubernetes; ``plaudit run`` starts one. Default 1."""
    session_affinity: Literal["none", "clientIP"] = "none"
    """``clientIP``: on Kubernetes all connections of one pod reach the same server, which servers with sessions by
    cookie (NeMo Gym's) need with several ``replicas``. ``none``: each connection reaches any of them. Default
    ``none``."""
    readiness: ReadinessSpec = ReadinessSpec()
    """The condition under which it takes requests."""
    pod: PodSpec = PodSpec()
    """Pods of the servers; a runtime class such as gVisor's goes into ``template``."""

    @property
    def variable(self) -> str:
        """Return the environment variable with its URL."""
        return url_variable(self.name)


def url_variable(name: str) -> str:
    """Return the environment variable with the URL of an environment."""
    return f"PLAUDIT_ENVIRONMENT_{name.upper().replace('-', '_')}_URL"
