"""Find everything that would make ``plaudit run`` refuse a job or fail later.

That is what ``checks`` finds in files, fields that ``plaudit run`` does not support, and faults of the user's reward
functions and loss. Those are imported here, each file in a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from plaudit_job.load import Examination
from plaudit_job.problem import Problem, did_you_mean, is_within, nearest
from plaudit_job.rules.training import pods_of
from plaudit_job.secrets import reward_secrets, secret_value, transport_secrets
from plaudit_job.spec.algorithm import LossSpec
from plaudit_job.spec.pod import PodSpec, ResourcesSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.section import differs
from plaudit_reward.functions.check import IMPORTED_WITHIN_S, check
from plaudit_reward.functions.forms import ENVIRONMENTS
from plaudit_reward.functions.result import Target
from plaudit_wire.errors import RefusedError
from plaudit_workers.data_files import RowForm
from plaudit_workers.launch.checks import check_files, unreachable
from plaudit_workers.launch.data_checks import DataReport, check_data, data_sections, shared_extra_info
from plaudit_workers.launch.redis import is_free
from plaudit_workers.service.build import function_target

_CHECKED_AT_ONCE = 4
_LOSS = "spec.algorithm.loss"
_TRIAL_MODULE = "plaudit_workers.training.model.trial"
"""Module of the trainer, run by name: it needs torch, which a job's checks do not import."""
_TRIED_WITHIN_S = 120.0
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


def preflight(job: RLJob, broken: Sequence[str] = (), *, imports: bool = True, renders: bool = False) -> DataReport:
    """Check what this machine supports, the files and servers that the job names, its data, and its functions.

    Without ``imports``, the job runs on other machines: its code is not imported, and its servers are not asked.

    Args:
        broken: fields that the job lacks because they are wrong.
        renders: Prompts are rendered too (``check_data``). False: a run begins, so an agent's server that is not up is
            a problem; a scorer's may come up later, and its samples are tried again.
    """
    problems = [*unsupported(job), *check_files(job)]
    away = unreachable(job) if imports else []
    agents = [problem for problem in away if is_within(problem.field, ("spec.rollout.agent",))]
    if not renders:
        problems += agents
    report = check_data(job, [*broken, *(problem.field for problem in problems)], renders=renders, away=agents)
    report.problems[:0] = problems
    report.notes += [problem for problem in away if problem not in agents]
    if imports:
        fields = {problem.field for problem in report.problems}
        _check_functions(job, report, fields)
        report.problems += check_loss(job, fields)
    return report


def all_problems(examination: Examination, *, imports: bool = True, renders: bool = False) -> DataReport:
    """Return the problems of a file and, as far as its sound fields allow, what ``preflight`` finds."""
    if examination.job is None:
        return DataReport(examination.problems)
    report = preflight(examination.job, examination.broken, imports=imports, renders=renders)
    return replace(report, problems=examination.problems + examination.concerning(report.problems))


def unsupported(job: RLJob) -> Iterator[Problem]:
    """Yield the fields for which ``plaudit run`` refuses the job."""
    spec = job.spec
    sampling, tls = spec.rollout.sampling, spec.transport.tls
    if spec.trains and (sampling.top_p < 1 or sampling.top_k > 0):
        yield Problem(
            "spec.rollout.sampling",
            f"topP {sampling.top_p}, topK {sampling.top_k} cut the distribution, which the trainer cannot reproduce",
            "Set topP to 1 and topK to -1; validation may use any values",
        )
    yield from _sinks(job)
    yield from _tool_parser(job)
    yield from _engine_arguments(job)
    if tls and tls.ca_config_map:
        remedy = "Give the certificates in caFile"
        yield Problem("spec.transport.tls.caConfigMap", "is not supported by plaudit run", remedy)
    if spec.has_broker:
        yield Problem(
            "spec.sandboxes.provider",
            f"is {spec.sandboxes.provider}, and pods are made on Kubernetes alone",
            "Apply the job to a cluster (plaudit validate --kubernetes checks it), or set provider: container",
        )
    for index, server in enumerate(spec.environments):
        if not server.command:
            yield Problem(
                f"spec.environments[{index}].command",
                "is empty; plaudit run starts no images",
                "Give the command that starts the server on this machine",
            )


def lacking_gpus(job: RLJob) -> Iterator[Problem]:
    """Yield the engines that share more GPUs than this machine has; a run elsewhere may have them."""
    if not job.spec.trains or Path("/dev/kfd").exists():  # AMD's driver has no file for each GPU
        return
    here = _gpus_here()
    for section, rollout in job.spec.rollout.by_section.items():
        engine = rollout.engine
        if engine.gpus < 2 or engine.gpus <= here or not rollout.pod.uses_gpus():
            continue
        parallel = "tensorParallelSize" if engine.tensor_parallel_size > 1 else "pipelineParallelSize"
        yield Problem(
            f"{section}.engine.{parallel}",
            f"one copy of the model takes {engine.gpus} GPUs, and this machine has {here}",
            "Lower it to run here, or run the job where the GPUs are (plaudit run --address, Kubernetes)",
        )


def lacking_packages(job: RLJob) -> Iterator[Problem]:
    """Yield what the job's processes import and this machine lacks; a run elsewhere may have it."""
    if not job.spec.trains:
        return
    generates = any(rollout.engine.kind == "vllm" for rollout in job.spec.rollout.by_group.values())
    needed = [("spec.rollout.engine.kind", "vllm", "rollout")] if generates else []
    for field, package, extra in (*needed, ("spec.trainer", "torch", "training")):
        if find_spec(package) is None:
            yield Problem(
                field,
                f"{package} is not installed for {sys.executable}",
                f"Install plaudit-workers[{extra}], or run the job where it is (plaudit run --address, Kubernetes)",
            )


def lacking_secrets(job: RLJob) -> Iterator[Problem]:
    """Yield the Secrets that have no value here; a run elsewhere may have them."""
    for field, secret in (*reward_secrets(job.spec.reward), *transport_secrets(job.spec.transport)):
        try:
            secret_value(secret, field)
        except RefusedError as error:
            message, _, remedy = str(error).removeprefix(f"{field}: ").partition(". ")
            yield Problem(field, message, remedy)


def taken_port(job: RLJob) -> Iterator[Problem]:
    """Yield the port of the gateway if something listens on it here."""
    gateway = job.spec.reward.gateway
    if gateway.port and gateway.replicas and not job.spec.trains and not is_free(gateway.port):
        yield Problem(
            "spec.reward.gateway.port",
            f"{gateway.port} is in use on this machine",
            "Stop what listens on it, or give another; 0 is a free one",
        )


def _gpus_here() -> int:
    """Return the number of NVIDIA's GPUs that processes of this machine see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return found if visible is None else min(found, len(list(filter(str.strip, visible.split(",")))))


def _tool_parser(job: RLJob) -> Iterator[Problem]:
    """Compare the name of the parser of tool calls with those that vLLM has here."""
    agent = job.spec.rollout.agent
    known = _vllm_parsers() if job.spec.trains and agent.kind != "singleTurn" else []
    if known and agent.tool_parser not in known:
        remedy = did_you_mean(nearest(agent.tool_parser, known), f"It has {', '.join(known)}")
        yield Problem("spec.rollout.agent.toolParser", f"vLLM has no parser {agent.tool_parser!r}", remedy)


def _vllm_parsers() -> list[str]:
    """Return the names of vLLM's parsers, read from its table; none without vLLM."""
    for node in _statements_of_vllm("tool_parsers/__init__.py"):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_TOOL_PARSERS_TO_REGISTER":
            with contextlib.suppress(ValueError):
                return sorted(ast.literal_eval(node.value))
    return []


def _engine_arguments(job: RLJob) -> Iterator[Problem]:
    """Compare the names of an engine's arguments with those that vLLM has here."""
    if not job.spec.trains:
        return
    engines = {section: rollout.engine for section, rollout in job.spec.rollout.by_section.items()}
    known = _vllm_arguments() if any(each.kind == "vllm" and each.arguments for each in engines.values()) else []
    for section, engine in engines.items():
        for name in engine.arguments if known and engine.kind == "vllm" else ():
            if name not in known:
                remedy = did_you_mean(nearest(name, known)) or "See the engine arguments of vLLM's documentation"
                yield Problem(f"{section}.engine.arguments", f"vLLM has no engine argument {name!r}", remedy)


def _vllm_arguments() -> list[str]:
    """Return the names of vLLM's engine arguments; none without vLLM."""
    return [
        field.target.id
        for node in _statements_of_vllm("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def _statements_of_vllm(module: str) -> list[ast.stmt]:
    """Return the statements of one of vLLM's files, for its import takes half a minute; none where it has no such."""
    vllm = find_spec("vllm")
    try:
        return ast.parse((Path(vllm.origin or "").parent / module).read_text(encoding="utf-8")).body if vllm else []
    except (OSError, SyntaxError, ValueError):
        return []


def _sinks(job: RLJob) -> Iterator[Problem]:
    """Yield the sinks that this machine has no package, key or address for."""
    sinks = job.spec.trainer.sinks if job.spec.trains else []
    for index, sink in enumerate(sinks):
        if find_spec(sink) is None:
            yield Problem(
                f"spec.trainer.sinks[{index}]",
                f"{sink} is not installed",
                f"Install plaudit-workers[{sink}], or remove it: steps.jsonl is always written",
            )
    installed = {sink for sink in sinks if find_spec(sink)}
    if "wandb" in installed and not _has_wandb_key():
        yield Problem(
            "spec.trainer.sinks",
            "names wandb, for which this machine has no key",
            "Set WANDB_API_KEY, run wandb login, or set WANDB_MODE to offline",
        )
    if "mlflow" in installed and not os.environ.get("MLFLOW_TRACKING_URI"):
        yield Problem(
            "spec.trainer.sinks",
            "names mlflow, and MLFLOW_TRACKING_URI is not set",
            "Set it to the tracking server, or to a folder together with MLFLOW_ALLOW_FILE_STORE=true",
        )


def _has_wandb_key() -> bool:
    """Return True if W&B finds a key where it looks for one, or needs none."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in {"offline", "disabled", "dryrun"}:
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


def ignored(job: RLJob) -> list[Problem]:
    """Return the fields that ``plaudit run`` ignores, because they concern Kubernetes only."""
    problems = [
        Problem(f"spec.{name}", "is ignored by plaudit run", remedy)
        for name, remedy in _KUBERNETES_ONLY.items()
        if differs(job.spec, name)
    ]
    problems += [
        Problem(f"spec.{name}.pod", "is ignored by plaudit run, except for its resources", _ON_KUBERNETES)
        for name, pod in pods_of(job.spec)
        if pod.model_copy(update={"resources": ResourcesSpec()}) != PodSpec()
    ]
    return problems


def _check_functions(job: RLJob, report: DataReport, broken: Collection[str]) -> None:
    """Add what would keep a reward function from being called; skip files of ``broken`` fields (``check_files``)."""
    targets = {
        field: target for field, target in _targets(job) if not any(is_within(other, (field,)) for other in broken)
    }
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
        found = list(pool.map(check, targets.values()))
    wanted = {}
    for (field, target), result in zip(targets.items(), found, strict=True):
        if result.timed_out:
            told = f"importing {target.path} took more than {IMPORTED_WITHIN_S:g} seconds: it was not checked"
            remedy = "Workers import it without a limit; if it waits for something, they wait as well"
            report.notes.append(Problem(field, told, remedy))
        if result.problem is not None:
            report.problems.append(Problem(field, result.problem.rstrip("."), "See docs/rewards/python.md"))
        if result.columns:
            wanted[field] = result.columns
    report.problems += _missing_environments(job, targets, wanted)
    data = {field: [column for column in columns if column != ENVIRONMENTS] for field, columns in wanted.items()}
    report.problems += _missing_columns(job, targets, data, broken)


def _missing_environments(
    job: RLJob, targets: Mapping[str, Target], wanted: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Compare TRL's argument ``environments`` with the job's agent: a class of TRL's form has attributes."""
    agent = job.spec.rollout.agent
    if not job.spec.trains or (agent.kind == "environment" and agent.class_name):
        return
    for field, columns in wanted.items():
        if ENVIRONMENTS in columns:
            yield Problem(
                field,
                f"{targets[field].function} requires environments, but no sample is played in an environment's class",
                "Set rollout.agent to kind environment with path and class, or give the parameter a default",
                also=("spec.rollout.agent.kind",),
            )


def _missing_columns(
    job: RLJob, targets: Mapping[str, Target], wanted: Mapping[str, Sequence[str]], broken: Collection[str]
) -> Iterator[Problem]:
    """Compare the columns that TRL functions require with the ``extra_info`` of every row."""
    if not wanted or not job.spec.trains:
        return
    for path_field, (path, _) in data_sections(job).items():
        if path_field in broken:
            continue
        there = shared_extra_info(path, RowForm.of_data(job.spec.data))
        for field, columns in wanted.items():
            if missing := [column for column in columns if column not in there]:
                yield Problem(
                    field,
                    f"{targets[field].function} requires column {', '.join(missing)}, which extra_info of {path} does "
                    f"not have in every row (it has {', '.join(sorted(there)) or 'none'})",
                    "Add it to extra_info of every row, or give the parameter a default",
                    also=(path_field,),
                )


def _targets(job: RLJob) -> Iterator[tuple[str, Target]]:
    reward = job.spec.reward
    for field, scorer in reward.by_field.items():
        if scorer.kind == "python" and scorer.python is not None:
            yield f"{field}.python", function_target(scorer, scorer.python)
    if reward.combine.kind == "python":
        yield "spec.reward.combine", Target(reward.combine.path, reward.combine.function, scope="combine")


def check_loss(job: RLJob, broken: Collection[str] = ()) -> Iterator[Problem]:
    """Find out if the user's loss raises or has no gradient for each token; skip it if its field is ``broken``."""
    loss = job.spec.algorithm.loss if job.spec.trains else None
    if loss is None or loss.kind != "python" or any(is_within(field, (_LOSS,)) for field in broken):
        return
    if find_spec("torch") is not None and (problem := _trial_problem(loss)):
        yield Problem(_LOSS, problem.removeprefix(f"{_LOSS}: ").rstrip("."), "See docs/training.md, An update")


def _trial_problem(loss: LossSpec) -> str | None:
    """Return the problem of a loss; None where there is none, and where its import takes minutes."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _TRIAL_MODULE],
            input=loss.model_dump_json(by_alias=True).encode(),
            capture_output=True,
            timeout=_TRIED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    try:
        return msgspec.json.decode(done.stdout, type=str | None)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        return (
            f"{loss.function} in {loss.path} ended its process (exit status {done.returncode}; {last}): neither the "
            "file nor the function may do that"
        )
