"""What a job must not say on Kubernetes, where no file lies beside the job file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plaudit_workers.job.loading.dump import job_data
from plaudit_workers.job.loading.paths import path_fields
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob

_PATHS = tuple(path_fields(RLJob))


def kubernetes_problems(job: RLJob) -> list[Problem]:
    """What keeps a job, with its paths as written (``read_job``), from running on Kubernetes."""
    data = job_data(job)
    problems = [problem for name, mark in _PATHS for problem in _paths(job, data, name, mark.kind)]
    if job.spec.trains and not job.spec.storage.claim_name:
        problems.append(
            Problem(
                "spec.storage.claimName",
                "is empty, but trainer and rollouts share weights through a volume",
                "Name a claim that many pods can mount (ReadWriteMany)",
            )
        )
    return [*problems, *_cpu_of_scaled_workers(job)]


def _cpu_of_scaled_workers(job: RLJob) -> Iterator[Problem]:
    """An HPA goes by the share of what a pod requests; without a request it never scales, and says so only itself."""
    workers = job.spec.reward.workers
    if workers.autoscaling is None or workers.autoscaling.provider != "hpa" or "spec" in workers.pod.template:
        return
    if "cpu" not in {**workers.pod.resources.requests, **workers.pod.resources.limits}:
        yield Problem(
            "spec.reward.workers.pod.resources.requests",
            "has no cpu, and autoscaling by provider hpa goes by the share of it that is used",
            'Give what one worker needs, such as cpu: "1"',
            also=("spec.reward.workers.autoscaling.provider",),
        )


def _paths(job: RLJob, data: Mapping[str, Any], name: str, kind: str) -> Iterator[Problem]:
    provided = {item.path for item in job.spec.files.items}
    everything = bool(job.spec.files.config_map) and not provided
    for field, path in _values(data, name.split(".")):
        if path.startswith("/") or (kind == "source" and not path.startswith(".")):
            continue
        if path.startswith((".", "~")) or "data" in field.split(".") or not (everything or path in provided):
            yield Problem(
                field,
                f"{path!r} is relative, and on Kubernetes nothing lies beside the job file",
                f"Give an absolute path on the shared volume ({job.spec.storage.mount_path}/…) or in the image, or put "
                "the file into a ConfigMap and list it in spec.files",
            )


def _values(node: Any, way: list[str], name: str = "") -> Iterator[tuple[str, str]]:
    """Every non-empty text at a way through plain data, with its written name; ``[]`` goes through a list."""
    if not way:
        yield name, str(node)
        return
    key = way[0].removesuffix("[]")
    if not isinstance(node, Mapping) or key not in node:
        return
    here = f"{name}.{key}".lstrip(".")
    if not way[0].endswith("[]"):
        yield from _values(node[key], way[1:], here)
        return
    for index, item in enumerate(node[key]):
        yield from _values(item, way[1:], f"{here}[{index}]")
