"""Check a job beyond its rules: Python files, limits of Kubernetes, fields without effect.

Python files are parsed, never run. On Kubernetes no file lies next to the job file. ``plaudit validate`` prints fields
that change nothing, because of the values of others, as notes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from plaudit_job.fields import DOWNLOAD_FILE, is_address, path_fields
from plaudit_job.load import job_data
from plaudit_job.problem import Case, Problem, refusals
from plaudit_job.spec.algorithm import LOSS_KINDS
from plaudit_job.spec.rljob import RLJob

_LOSS = "spec.algorithm.loss"
_PATH_FIELDS = tuple(path_fields(RLJob))


def python_problems(field: str, path: str, name: str, name_field: str = "function") -> Iterator[Problem]:
    """Yield the problem of a file, or of the function or class in it (of a dotted name, the first part)."""
    file = Path(path)
    if file.exists() and not (file.is_file() or file.is_dir()):  # reading a pipe or a device may never end
        yield Problem(f"{field}.path", f"{path} is no regular file", "Name a Python file")
        return
    if file.suffix == ".ipynb":  # its JSON reads as Python
        yield Problem(
            f"{field}.path", f"{path} is a notebook", "Name a Python file, such as jupyter nbconvert --to script writes"
        )
        return
    try:
        source = file.read_bytes()
    except (FileNotFoundError, ValueError):  # ValueError: it holds a NUL
        remedy = DOWNLOAD_FILE if is_address(path) else "Correct the path: it is relative to the job file"
        yield Problem(f"{field}.path", f"there is no file {path}", remedy)
    except OSError as error:
        yield Problem(f"{field}.path", f"cannot read {path}: {error.strerror}", "Name a Python file")
    else:
        if problem := source_problem(field, path, source, name, name_field):
            yield problem


def source_problem(field: str, path: str, source: bytes, name: str, name_field: str) -> Problem | None:
    """Return the same for a file that was already read; None without a problem."""
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line} of {path}" if line else path
        return Problem(f"{field}.path", f"syntax error in {place}: {getattr(error, 'msg', error)}", "Fix the file")
    names = _names(tree)
    if names is None or name.split(".")[0] in names:
        return None
    modules = {name for node in tree.body if isinstance(node, ast.Import) for name in _imported(node)}
    defined = ", ".join(sorted(n for n in names - modules if not n.startswith("_"))) or "nothing"
    return Problem(f"{field}.{name_field}", f"{path} does not define {name!r}", f"It defines: {defined}")


def returns_nothing(source: bytes, name: str) -> bool:
    """Return True for a function of a file's top level that assigns something, but returns no value."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    found = [n for n in statements if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
    if len(found) != 1 or found[0].decorator_list:  # a decorator may return what the function does not
        return False
    inside = list(ast.walk(found[0]))
    assigns = any(isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) for node in inside)
    return assigns and not any(
        isinstance(node, ast.Yield | ast.YieldFrom) or (isinstance(node, ast.Return) and node.value) for node in inside
    )


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that the module's top level binds; None if unknown (``import *``, names bound in a block)."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= _imported(node)
            case ast.Assign():
                names |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                return None
    return None if "*" in names else names


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {(alias.asname or alias.name).split(".")[0] for alias in node.names}


def kubernetes_problems(job: RLJob) -> list[Problem]:
    """Return the problems of a job on Kubernetes; its paths are as written (``read_job``)."""
    data = job_data(job)
    problems = [problem for name, mark in _PATH_FIELDS for problem in _relative_paths(job, data, name, mark.kind)]
    uses = "trainer and rollouts share weights through a volume" if job.spec.trains else ""
    if not uses and job.spec.reward.auditors:
        uses = "auditors read samples that are stored on a volume"
    if uses and not job.spec.storage.claim_name:
        remedy = "Name a claim that many pods can mount (ReadWriteMany)"
        problems.append(Problem("spec.storage.claimName", f"is empty; {uses}", remedy))
    if job.metadata.name[0].isdigit():
        problem = f"{job.metadata.name!r} begins with a digit; Services have its name, which must begin with a letter"
        problems.append(Problem("metadata.name", problem, f"Name it job-{job.metadata.name}, or such"))
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


def _relative_paths(job: RLJob, data: Mapping[str, Any], name: str, kind: str) -> Iterator[Problem]:
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


def without_effect(job: RLJob) -> list[Problem]:
    """Return fields that change nothing, because of the values of others."""
    if not job.spec.trains:
        return []
    algorithm, loss, optimizer = job.spec.algorithm, job.spec.algorithm.loss, job.spec.algorithm.optimizer
    dual_clips = [kind for kind, traits in LOSS_KINDS.items() if traits.dual_clip]
    weights: list[Case] = [
        (
            loss.correction == "none" and name in loss.model_fields_set,
            f"{_LOSS}.{to_camel(name)}",
            f"correction none has no importance weights: {getattr(loss, name)} changes nothing",
            "Remove it, or set correction to tis, decoupled or reject",
            f"{_LOSS}.correction",
        )
        for name in ("correction_cap", "correction_floor", "correction_level")
    ]
    cases = refusals(
        (
            loss.kind != "python"
            and loss.correction != "none"
            and algorithm.updates_per_step == 1
            and bool(loss.model_fields_set & {"clip_low", "clip_high", "clip_ratio_c"}),
            f"{_LOSS}.correction",
            f"with {loss.correction} and one update a step the ratio is 1: clipLow, clipHigh and clipRatioC change "
            "nothing",
            "Set miniBatchesPerStep or epochs above 1, or correction to none, for a clip that acts",
            "spec.algorithm.miniBatchesPerStep",
        ),
        (
            loss.kind not in (*dual_clips, "python") and "clip_ratio_c" in loss.model_fields_set,
            f"{_LOSS}.clipRatioC",
            f"kind {loss.kind} has no dual clip: {loss.clip_ratio_c:g} changes nothing",
            f"Remove it, or set kind to {' or '.join(dual_clips)}",
            f"{_LOSS}.kind",
        ),
        *weights,
        (
            loss.kl_importance_weight and not loss.has_kl_term,
            f"{_LOSS}.klImportanceWeight",
            f"klCoefficient {loss.kl_coefficient:g} and klIn {loss.kl_in} give the loss no term of the divergence: it "
            "changes nothing",
            "Set klCoefficient with klIn: loss, or remove it",
            f"{_LOSS}.klCoefficient",
            f"{_LOSS}.klIn",
        ),
        (
            optimizer.schedule == "constant" and "min_rate_share" in optimizer.model_fields_set,
            "spec.algorithm.optimizer.minRateShare",
            f"with schedule constant the rate does not fall: {optimizer.min_rate_share:g} changes nothing",
            "Remove it, or set schedule to linear or cosine",
            "spec.algorithm.optimizer.schedule",
        ),
    )
    return list(cases)
