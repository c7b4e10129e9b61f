"""The job's settings for the metrics service, which cannot read the job itself: it is below workers."""

from __future__ import annotations

from plaudit_workers.job.spec.rljob import RLJob, Spec

_BY_STALENESS = ("on-policy", "one-step-off-policy")


def metrics_environment(job: RLJob) -> dict[str, str]:
    """Return the variables that ``plaudit_metrics.service.settings`` reads, besides address, port and run."""
    spec = job.spec
    latency, traces = spec.metrics.reward_latency, spec.metrics.traces
    environment = {
        "PLAUDIT_JOB_NAME": job.metadata.name,
        "PLAUDIT_SCHEDULE": _schedule(spec),
        "PLAUDIT_REWARD_LATENCY_THRESHOLD_S": str(latency.threshold_seconds),
        "PLAUDIT_REWARD_LATENCY_TARGET": str(latency.target),
        "PLAUDIT_TRACES_ENDPOINT": traces.endpoint,
        "PLAUDIT_TRACES_SHARE": str(traces.share),
    }
    if not spec.trains:
        return environment
    return environment | {
        "PLAUDIT_MAX_STALENESS": str(spec.algorithm.max_staleness),
        "PLAUDIT_MODEL": spec.model.source,
    }


def _schedule(spec: Spec) -> str:
    if not spec.trains:
        return "service"
    staleness = spec.algorithm.max_staleness
    return _BY_STALENESS[staleness] if staleness < len(_BY_STALENESS) else "asynchronous"
