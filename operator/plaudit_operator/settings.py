"""Settings of the operator, read from its environment once."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plaudit_operator.platform import check_platform

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class OperatorSettingsError(ValueError):
    """An environment variable is missing or wrong. The message names it, its value and the remedy."""


@dataclass(frozen=True)
class Images:
    """Hold container images by what runs in them; a job's ``pod.image`` comes before them."""

    worker: str
    """``PLAUDIT_IMAGE_WORKER``: reward workers, metrics, Plaudit's own reward model server."""
    gpu: str
    """``PLAUDIT_IMAGE_GPU``: rollouts, trainer, vLLM's reward model servers."""
    redis: str
    """``PLAUDIT_IMAGE_REDIS``: ``redis-server`` and ``redis-cli`` 7, or Valkey under these names."""
    pull_policy: str = ""
    """``PLAUDIT_IMAGE_PULL_POLICY``: pull policy of all images. Default empty: the cluster's."""
    pull_secret: str = ""
    """``PLAUDIT_IMAGE_PULL_SECRET``: name of a Secret in the jobs' namespaces. Default empty: none."""


@dataclass(frozen=True)
class OperatorSettings:
    """Hold the operator's settings."""

    images: Images
    namespace: str
    """``PLAUDIT_NAMESPACE``: the operator's namespace, with its Lease. Default: the service account's."""
    lease: str = "plaudit-operator"
    """``PLAUDIT_LEASE``: name of the Lease for leader election; releases of the chart in one namespace have different
    ones."""
    watch_namespaces: tuple[str, ...] = ()
    """``PLAUDIT_WATCH_NAMESPACES``: the only namespaces that it watches, separated by commas. Default empty: all."""
    log_level: int = logging.INFO
    """``PLAUDIT_LOG_LEVEL``: ``debug``, ``info``, ``warning`` or ``error``. Default info."""
    identity: str = ""
    """``PLAUDIT_IDENTITY``: its name in the Lease. Default: the host's name."""
    port: int = 8080
    """``PLAUDIT_PORT``: serves ``/healthz``, ``/readyz`` and ``/metrics``."""
    workers: int = 4
    """``PLAUDIT_WORKERS``: jobs that are reconciled at the same time."""
    job_defaults: str = "{}"
    """``PLAUDIT_JOB_DEFAULTS``: JSON of ``platform.Platform``, the defaults for the pods of jobs. Default: none."""
    monitoring_namespace: str = ""
    """``PLAUDIT_MONITORING_NAMESPACE``: namespace whose pods may read a job's metrics. Default empty: any namespace."""
    keda_namespace: str = "keda"
    """``PLAUDIT_KEDA_NAMESPACE``: namespace of KEDA, whose pods may connect to a job's Redis."""
    metrics_authentication: bool = False
    """``PLAUDIT_METRICS_AUTHENTICATION``: ``true`` lets only callers read ``/metrics`` whom RBAC allows it."""
    sandboxes_role: str = ""
    """``PLAUDIT_SANDBOXES_ROLE``: ``ClusterRole/NAME`` or ``Role/NAME``, which the operator binds to the broker of a
    job's machines. Default empty: jobs whose machines are pods are refused."""
    network_policies: bool = True
    """``PLAUDIT_NETWORK_POLICIES``: ``false`` creates no policies."""

    native_sidecars: bool = True
    """The cluster restarts and ends sidecars among ``initContainers`` (Kubernetes 1.29); asked of its API server."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> OperatorSettings:
        """Read the settings; raise ``OperatorSettingsError`` for a variable that is missing or malformed."""
        get = environment.get
        missing = [f"PLAUDIT_IMAGE_{name}" for name in ("WORKER", "GPU", "REDIS") if not get(f"PLAUDIT_IMAGE_{name}")]
        if missing:
            listed = ", ".join(missing)
            raise OperatorSettingsError(f"environment variables missing: {listed}. The chart sets them from images")
        images = Images(
            environment["PLAUDIT_IMAGE_WORKER"],
            environment["PLAUDIT_IMAGE_GPU"],
            environment["PLAUDIT_IMAGE_REDIS"],
            get("PLAUDIT_IMAGE_PULL_POLICY", ""),
            get("PLAUDIT_IMAGE_PULL_SECRET", ""),
        )
        return cls(
            images=images,
            namespace=get("PLAUDIT_NAMESPACE") or _own_namespace(),
            lease=get("PLAUDIT_LEASE") or cls.lease,
            watch_namespaces=tuple(filter(None, get("PLAUDIT_WATCH_NAMESPACES", "").replace(" ", "").split(","))),
            log_level=_log_level(get("PLAUDIT_LOG_LEVEL") or "info"),
            identity=get("PLAUDIT_IDENTITY") or f"{socket.gethostname()}-{os.getpid()}",
            port=_number(environment, "PLAUDIT_PORT", cls.port),
            workers=_number(environment, "PLAUDIT_WORKERS", cls.workers),
            job_defaults=_job_defaults(get("PLAUDIT_JOB_DEFAULTS") or cls.job_defaults),
            monitoring_namespace=get("PLAUDIT_MONITORING_NAMESPACE", ""),
            keda_namespace=get("PLAUDIT_KEDA_NAMESPACE") or cls.keda_namespace,
            metrics_authentication=get("PLAUDIT_METRICS_AUTHENTICATION", "false") == "true",
            sandboxes_role=get("PLAUDIT_SANDBOXES_ROLE", ""),
            network_policies=get("PLAUDIT_NETWORK_POLICIES", "true") != "false",
        )


def _log_level(text: str) -> int:
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if text.lower() not in levels:
        raise OperatorSettingsError(f"PLAUDIT_LOG_LEVEL is {text!r}; give {', '.join(levels)}")
    return levels[text.lower()]


def _job_defaults(text: str) -> str:
    try:
        check_platform(text)
    except ValueError as error:
        raise OperatorSettingsError(f"PLAUDIT_JOB_DEFAULTS: {error}. Correct the chart's value jobDefaults") from None
    return text


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        return "default"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise OperatorSettingsError(f"{name} is {text!r}; give a whole number")
    return int(text)
