"""Find fields that ``plaudit run`` does not support: it refuses the job, or ignores a field for Kubernetes only."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from plaudit_workers.job.problem import Problem
from plaudit_workers.job.rules.pods import pods_of
from plaudit_workers.job.spec.kubernetes.pod import PodSpec, ResourcesSpec
from plaudit_workers.job.spec.rljob import RLJob
from plaudit_workers.job.spec.section import Section


def unsupported(job: RLJob) -> list[Problem]:
    """Return the fields for which ``plaudit run`` refuses the job."""
    training = [*_rollout(job), *_sinks(job)] if job.spec.trains else []
    return [*training, *_transport(job), *_environments(job)]


def ignored(job: RLJob) -> list[Problem]:
    """Return the fields that ``plaudit run`` ignores, because they concern Kubernetes only."""
    problems = [
        Problem(f"spec.{name}", "is ignored by plaudit run", remedy)
        for name, remedy in _KUBERNETES_ONLY.items()
        if _differs(job.spec, name)
    ]
    problems += [
        Problem(f"spec.{name}.pod", "is ignored by plaudit run, except for its resources", _ON_KUBERNETES)
        for name, pod in pods_of(job.spec)
        if pod.model_copy(update={"resources": ResourcesSpec()}) != PodSpec()
    ]
    return problems


def _environments(job: RLJob) -> Iterator[Problem]:
    for index, server in enumerate(job.spec.environments):
        if not server.command:
            yield Problem(
                f"spec.environments[{index}].command",
                "is empty; plaudit run starts no images",
                "Give the command that starts the server on this machine",
            )


_ON_KUBERNETES = "It applies on Kubernetes"
_KUBERNETES_ONLY = {
    "suspend": _ON_KUBERNETES,
    "managedBy": _ON_KUBERNETES,
    "reward.workers.autoscaling": "Set reward.workers.replicas instead",
    "reward.networkPolicy": _ON_KUBERNETES,
    "transport.managed.storage": "Redis writes into the run's folder",
    "transport.managed.storageClassName": "Redis writes into the run's folder",
    "transport.managed.image": "A Redis server of this machine runs",
    "storage": "Everything is in the run's folder",
    "files": "Files are found relative to the job file",
    "scheduling": _ON_KUBERNETES,
    "lifecycle.preRunningDeadlineSeconds": _ON_KUBERNETES,
    "lifecycle.activeDeadlineSeconds": _ON_KUBERNETES,
    "lifecycle.ttlSecondsAfterFinished": _ON_KUBERNETES,
    "lifecycle.cleanup": _ON_KUBERNETES,
    "lifecycle.failurePolicy.maxDisruptions": _ON_KUBERNETES,
    "lifecycle.failurePolicy.rules": _ON_KUBERNETES,
    "lifecycle.failurePolicy.backoff": _ON_KUBERNETES,
}


def _differs(section: Section, name: str) -> bool:
    """Return True where a field, named as written, differs from its default."""
    written, _, rest = name.partition(".")
    fields = {field.alias or python_name: python_name for python_name, field in type(section).model_fields.items()}
    value = getattr(section, fields[written])
    if rest:
        return _differs(value, rest)
    return bool(value != type(section).model_fields[fields[written]].get_default(call_default_factory=True))


def _rollout(job: RLJob) -> Iterator[Problem]:
    sampling = job.spec.rollout.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield Problem(
            "spec.rollout.sampling",
            f"topP {sampling.top_p}, topK {sampling.top_k} cut the distribution, which the trainer cannot reproduce",
            "Set topP to 1 and topK to -1; validation may use any values",
        )


def _sinks(job: RLJob) -> Iterator[Problem]:
    for index, sink in enumerate(job.spec.trainer.sinks):
        if find_spec(sink) is None:
            yield Problem(
                f"spec.trainer.sinks[{index}]",
                f"{sink} is not installed",
                f"Install plaudit-workers[{sink}], or remove it: steps.jsonl is always written",
            )


def _transport(job: RLJob) -> Iterator[Problem]:
    tls = job.spec.transport.tls
    if tls and tls.ca_config_map:
        yield Problem(
            "spec.transport.tls.caConfigMap", "is not supported by plaudit run", "Give the certificates in caFile"
        )
