"""The metrics service's settings, read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plaudit_wire.redis import PasswordFileError, RedisAddress


class ServiceSettingsError(ValueError):
    """An environment variable is missing or wrong. The message names it, its value and the remedy."""


@dataclass(frozen=True)
class ServiceSettings:
    """Hold the settings of the metrics service."""

    run: str
    """``PLAUDIT_RUN``: id of the run."""
    redis: RedisAddress
    """``PLAUDIT_REDIS_URL``, ``PLAUDIT_REDIS_USERNAME``, ``PLAUDIT_REDIS_PASSWORD`` or ``PLAUDIT_REDIS_PASSWORD_FILE``,
    ``PLAUDIT_REDIS_TLS_…``: see ``RedisAddress``."""
    host: str = "127.0.0.1"
    """``PLAUDIT_METRICS_HOST``: the address to listen on; loopback by default."""
    port: int = 0
    """``PLAUDIT_METRICS_PORT`` (or ``PLAUDIT_HEALTH_PORT``): 0 = any free one, named in the log."""
    allowed_hosts: tuple[str, ...] = ()
    """``PLAUDIT_METRICS_ALLOWED_HOSTS``: names by which browsers may address it besides ``localhost``, addresses and
    Kubernetes' own names, separated by commas: an ingress's, for example. ``*`` allows all."""
    run_folder: Path | None = None
    """``PLAUDIT_RUN_FOLDER``: its ``steps.jsonl`` supplies steps that ``events`` no longer holds, and
    its ``samples`` the stored samples; None = none."""
    samples_to_all: bool = False
    """``PLAUDIT_METRICS_SAMPLES``: ``all`` shows prompts and responses to clients of other machines and pods too;
    otherwise only to this machine, which includes ``kubectl port-forward``."""
    log_file: Path | None = None
    """``PLAUDIT_LOG_FILE``: JSON lines go there; None = standard error."""
    latency_threshold_s: float = 30.0
    """``PLAUDIT_REWARD_LATENCY_THRESHOLD_S``: ``metrics.rewardLatency.thresholdSeconds`` of the job."""
    latency_target: float = 0.99
    """``PLAUDIT_REWARD_LATENCY_TARGET``: ``metrics.rewardLatency.target`` of the job."""
    job: str = ""
    """``PLAUDIT_JOB_NAME``: name of the job, for ``plaudit_run_info``."""
    schedule: str = ""
    """``PLAUDIT_SCHEDULE``: ``service`` for a job without a trainer, else the name of its schedule."""
    max_staleness: int | None = None
    """``PLAUDIT_MAX_STALENESS``: ``algorithm.maxStaleness`` of the job; None = unknown, or a service."""
    model: str = ""
    """``PLAUDIT_MODEL``: the policy's model, for traces."""
    traces_endpoint: str = ""
    """``PLAUDIT_TRACES_ENDPOINT``: ``metrics.traces.endpoint`` of the job; empty = no spans."""
    traces_share: float = 0.0
    """``PLAUDIT_TRACES_SHARE``: ``metrics.traces.share`` of the job."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServiceSettings:
        """Read the settings; raise ``ServiceSettingsError`` for a variable that is missing or not a number."""
        missing = [name for name in ("PLAUDIT_RUN", "PLAUDIT_REDIS_URL") if not environment.get(name)]
        if missing:
            raise ServiceSettingsError(
                f"environment variables missing: {', '.join(missing)}. 'plaudit run job.yaml' sets them; to start "
                "this process by hand, set them yourself."
            )
        try:
            redis = RedisAddress.from_environment(environment)
        except PasswordFileError as error:
            raise ServiceSettingsError(str(error)) from error
        folder, log_file = environment.get("PLAUDIT_RUN_FOLDER"), environment.get("PLAUDIT_LOG_FILE")
        port = "PLAUDIT_METRICS_PORT" if environment.get("PLAUDIT_METRICS_PORT") else "PLAUDIT_HEALTH_PORT"
        hosts = environment.get("PLAUDIT_METRICS_ALLOWED_HOSTS", "")
        return cls(
            run=environment["PLAUDIT_RUN"],
            redis=redis,
            host=environment.get("PLAUDIT_METRICS_HOST") or cls.host,
            port=int(_number(environment, port, cls.port)),
            allowed_hosts=tuple(filter(None, (each.strip() for each in hosts.split(",")))),
            run_folder=Path(folder) if folder else None,
            samples_to_all=environment.get("PLAUDIT_METRICS_SAMPLES", "") == "all",
            log_file=Path(log_file) if log_file else None,
            latency_threshold_s=_number(environment, "PLAUDIT_REWARD_LATENCY_THRESHOLD_S", cls.latency_threshold_s),
            latency_target=_number(environment, "PLAUDIT_REWARD_LATENCY_TARGET", cls.latency_target),
            job=environment.get("PLAUDIT_JOB_NAME", ""),
            schedule=environment.get("PLAUDIT_SCHEDULE", ""),
            max_staleness=int(_number(environment, "PLAUDIT_MAX_STALENESS", 0))
            if environment.get("PLAUDIT_MAX_STALENESS")
            else None,
            model=environment.get("PLAUDIT_MODEL", ""),
            traces_endpoint=environment.get("PLAUDIT_TRACES_ENDPOINT", ""),
            traces_share=_number(environment, "PLAUDIT_TRACES_SHARE", cls.traces_share),
        )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise ServiceSettingsError(f"{name} is {text!r}; give a number") from None
