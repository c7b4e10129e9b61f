"""Find what keeps a job from running on Kubernetes, where no file lies next to the job file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plaudit_workers.job.loading.dump import job_data
from plaudit_workers.job.loading.paths import path_fields
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob

_PATHS = tuple(path_fields(RLJob))


def kubernetes_problems(job: RLJob) -> list[Problem]:
    """Return the problems of a job on Kubernetes; its paths are as written (``read_job``)."""
    data = job_data(job)
    problems = [problem for name, mark in _PATHS for problem in _paths(job, data, name, mark.kind)]
    if job.spec.trains and not job.spec.storage.claim_name:
        problems.append(
            Problem(
                "spec.storage.claimName",
                "is empty; trainer and rollouts share weights through a volume",
                "Name a claim that many pods can mount (ReadWriteMany)",
            )
        )
    return [*problems, *_cpu_of_scaled_workers(job)]


def _cpu_of_scaled_workers(job: RLJob) -> Iterator[Problem]:
    """Require a CPU request for an HPA: without one it never scales, and only the HPA itself reports it."""
    workers = job.spec.reward.workers
    if workers.autoscaling is None or workers.autoscaling.provider != "hpa" or "spec" in workers.pod.template:
        return
    if "cpu" not in {**workers.pod.resources.requests, **workers.pod.resources.limits}:
        yield Problem(
            "spec.reward.workers.pod.resources.requests",
            "has no cpu; the provider hpa scales by the share of it that is used",
            'Give the CPU of one worker, such as cpu: "1"',
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
                f"{path!r} is relative; on Kubernetes there are no files next to the job file",
                f"Give an absolute path on the shared volume ({job.spec.storage.mount_path}/…) or in the image, or put "
                "the file into a ConfigMap and list it in spec.files",
            )


def _values(node: Any, way: list[str], name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every non-empty text at a path through plain data, with its written name; ``[]`` means each entry."""
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
