"""Check a job and make or find its run's folder, before ``plaudit run`` starts a process.

``runs/<run>/`` holds everything that a run leaves behind. A resumed run is compared with the job file. The model hub is
asked for models before processes start and download them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from plaudit_job.fields import is_hub_id
from plaudit_job.load import dump_job, examine_job, job_data, load_job, locate
from plaudit_job.problem import JobError, Problem, is_within
from plaudit_job.spec.rewards import RewardModelSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.steps import read_ending
from plaudit_reward.http import HttpClient, NoResponseError, proxy_for
from plaudit_wire.errors import CallTimeoutError, RefusedError
from plaudit_workers.data_facts import DataFacts, accept, refuse_changed_data
from plaudit_workers.files import is_ours
from plaudit_workers.launch.checks import architecture_of, class_problem, hub_cache
from plaudit_workers.launch.code_checks import (
    all_problems,
    lacking_gpus,
    lacking_packages,
    lacking_secrets,
    preflight,
    taken_port,
)
from plaudit_workers.launch.live import reported_wait
from plaudit_workers.launch.transport import SERVICE_FILE
from plaudit_workers.process import EXIT_REFUSED
from plaudit_workers.training.state import Lineage

_FIXED_FIELDS = ("spec.seed", "spec.model", "spec.data")
"""A checkpoint continues one model on one order of prompts; anything else would be another run."""
_FIELDS_WITHOUT_MEANING = (
    "metadata",
    "spec.algorithm.steps",
    "spec.files",
    "spec.lifecycle",
    "spec.metrics",
    "spec.reward.networkPolicy",
    "spec.reward.workers",
    "spec.rollout.groups",
    "spec.rollout.pod",
    "spec.rollout.podsPerReplica",
    "spec.rollout.replicas",
    "spec.rollout.sleepDuringUpdates",
    "spec.scheduling",
    "spec.storage",
    "spec.trainer.activationOffload",
    "spec.trainer.checkpoint",
    "spec.trainer.cpuOffload",
    "spec.trainer.fsdpSize",
    "spec.trainer.pod",
    "spec.trainer.ranks",
    "spec.trainer.ranksPerPod",
    "spec.trainer.sequenceParallelSize",
    "spec.trainer.sinks",
    "spec.transport",
)
"""How much there is of what, where it runs and what is recorded. Every other field may change what is learned."""
_RESPONSE_WITHIN_S = 5.0
_HUB = "https://huggingface.co"
_LOCAL = "If it is a folder, write its path with ./ or /"
_LOCK_FILE = "run.lock"
_JOB_NAME = re.compile(r"^metadata:\n(?:  .*\n)*?  name: ['\"]?([a-z0-9-]+)", re.MULTILINE)
PARTS = ("samples", "checkpoints", "weights", "logs")


class Prepared(NamedTuple):
    """Hold a run that can start."""

    job: RLJob
    folder: Path
    lock: RunLock


def prepare(arguments: argparse.Namespace, console: Console, stack: ExitStack) -> Prepared | None:
    """Load and check the job and make (or find) its run's folder with the resolved ``job.yaml`` in it.

    Return None when the run to resume has finished. Raise ``RefusedError`` for anything that would make the run fail
    later and can be found out now.

    Args:
        stack: closes the lock of the run's folder.
    """
    for option in ("accept_changes", "accept_data_change"):
        if getattr(arguments, option) and not arguments.resume:
            raise RefusedError(f"--{option.replace('_', '-')} is about the run that --resume continues: give both")
    job = _with_steps(_loaded(arguments), arguments.steps)
    runs = Path(arguments.runs_folder)
    folder = resumed_run(runs, job.metadata.name, arguments.run) if arguments.resume else None
    if folder is None:
        _refuse_problems(job, arguments, console)
        folder = new_run(runs, job.metadata.name, arguments.run)
        lock = stack.enter_context(RunLock(folder))
        shutil.rmtree(folder / "redis", ignore_errors=True)  # of a run of this name that never began
    else:
        lock = stack.enter_context(RunLock(folder))
        if _is_finished(job, folder, console):
            return None
        facts = _refuse_problems(job, arguments, console)
        _report_changes(job, folder, console, accepted=arguments.accept_changes)
        _report_changed_data(facts, folder, console, accepted=arguments.accept_data_change)
    (folder / "job.yaml").write_text(dump_job(job))
    return Prepared(job, folder, lock)


class RunLock(AbstractContextManager["RunLock"]):
    """Hold the folder of a run: one program at a time starts, continues or writes into it.

    Args:
        state: what the run is meanwhile.
    """

    def __init__(self, folder: Path, state: str = "running") -> None:
        self._state = state
        try:
            self._file = (folder / _LOCK_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise RefusedError(f"{folder} cannot be written: {error.strerror}") from error
        if not is_ours(self._file):
            self._file.seek(0)
            holder = self._file.read()
            self._file.close()
            raise RefusedError(f"run {folder.name} is {holder or state}; stop it there first")
        self.show()

    def show(self, page: str = "") -> None:
        """Write who holds the folder, and the address of the run's page, for those who meet the lock."""
        self._file.truncate(0)
        self._file.write(f"{self._state} (pid {os.getpid()} on {socket.gethostname()}{page and f', {page}'})")
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._file.truncate(0)
        self._file.close()


def _loaded(arguments: argparse.Namespace) -> RLJob:
    """Load the job; if its file is wrong, report also what the files that it names show."""
    examination = examine_job(arguments.job)
    if examination.job is None or examination.problems:
        report = all_problems(examination, imports=not arguments.address)
        raise JobError(locate(report.problems, arguments.job), arguments.job)
    return examination.job


def _refuse_problems(job: RLJob, arguments: argparse.Namespace, console: Console) -> DataFacts | None:
    """Refuse a job with problems; print what is to know of its data, and return its facts."""
    imports = not arguments.address  # the nodes of a cluster may have other packages; its workers check
    files = sorted({scorer.python.path for scorer in job.spec.reward.scorers if scorer.python})
    with reported_wait(console, f"the import of {', '.join(files)}" if files and imports else "the job's files"):
        report = preflight(job, imports=imports)
    problems = [*report.problems, *lacking_secrets(job), *taken_port(job)]
    problems += (*lacking_packages(job), *lacking_gpus(job)) if imports else ()
    if not problems:
        with reported_wait(console, "the model hub"):
            problems = check_hub_models(job)
    if problems:
        raise JobError(locate(problems, arguments.job), arguments.job)
    for note in report.notes:
        console.out(str(note))
    return report.facts


def _with_steps(job: RLJob, steps: int | None) -> RLJob:
    if steps is None:
        return job
    if not job.spec.trains:
        raise RefusedError(f"--steps {steps}: a job without rollout and trainer has no steps. Leave it out")
    algorithm = job.spec.algorithm.model_copy(update={"steps": steps})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"algorithm": algorithm})})


def _is_finished(job: RLJob, folder: Path, console: Console) -> bool:
    """Report where a resumed run stands; return True when it has trained all its steps."""
    if not job.spec.trains:
        return False
    step, steps = _checkpointed(folder)["step"], job.spec.algorithm.steps
    if step >= steps:
        console.out(
            f"run {folder.name} has finished its {steps} steps. To train further, set a larger --steps. "
            f"Its folder: {folder}"
        )
        return True
    console.out(
        f"run {folder.name}: continuing after step {step} of {steps}"
        if step
        else f"run {folder.name} has no checkpoint yet: starting at step 1 of {steps}"
    )
    return False


def _checkpointed(folder: Path) -> dict[str, Any]:
    """Return the state from which a run's trainer will continue: that of the newest incarnation's newest checkpoint."""
    found: list[tuple[int, int, dict[str, Any]]] = [(0, 0, {"step": 0})]
    for state in folder.glob("checkpoints/step-*/state.json"):
        try:
            extra = json.loads(state.read_text())["extra"]
            found.append((int(extra["incarnation"]), int(extra["step"]), extra))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the trainer reports a checkpoint that it cannot read
    return max(found, key=lambda each: each[:2])[2]


def _report_changed_data(facts: DataFacts | None, folder: Path, console: Console, *, accepted: bool) -> None:
    """Print how the data differs from the checkpoint's; refuse it unless the user accepts or has accepted it."""
    if facts is None:
        return
    if accepted:
        accept(folder, facts)
    before = DataFacts.restored(_checkpointed(folder).get("data"))
    for change in refuse_changed_data(facts, before, folder):
        console.out(f"changed data: {change}")


def _report_changes(job: RLJob, folder: Path, console: Console, *, accepted: bool) -> None:
    """Print how the job differs from the run's; refuse what the run cannot take or the user has not accepted."""
    before = folder / "job.yaml"
    changes = job_changes(load_job(before), job)
    for change in changes:
        if change.refused:
            raise RefusedError(
                f"--resume: {change} differs from the run in {folder}. Start a new run, or set the field back to what "
                f"{before} has"
            )
    for change in changes:
        console.out(f"changed: {change}")
    meant = [change.field for change in changes if change.changes_meaning]
    if meant and not accepted:
        raise RefusedError(
            f"--resume: {', '.join(meant)} changed since the run in {folder}, so its next steps would be trained "
            "differently. Add --accept-changes to continue with them, or set them back"
        )


def new_run(runs: Path, job_name: str, run: str | None) -> Path:
    """Make the folder of a new run."""
    folder = (runs / (run or f"{job_name}-{secrets.token_hex(3)}")).resolve()
    if (folder / "job.yaml").exists() and not _never_began(folder):
        raise RefusedError(f"{folder} holds a run already: choose another --run, or add --resume to continue it")
    try:
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(
            f"{folder} cannot be written: {error.strerror}. Choose another folder with --runs-folder"
        ) from error
    return folder


def _never_began(folder: Path) -> bool:
    """Return True for a run that was refused before its trainer began or its gateway answered."""
    ending = read_ending(folder)
    began = Lineage.read(folder / "checkpoints").newest or (folder / SERVICE_FILE).exists()
    return ending is not None and ending.code == EXIT_REFUSED and not began


def resumed_run(runs: Path, job_name: str, run: str | None) -> Path:
    """Find the folder of the run to continue: ``run``, or the job's newest that closed a step, or else its newest."""
    if run is not None:
        found = [runs / run] if (runs / run / "job.yaml").exists() else []
    else:
        found = [path.parent for path in runs.glob("*/job.yaml") if _job_of(path) == job_name]
    if not found:
        raise RefusedError(
            f"--resume: {runs}/ holds no run {run or f'of job {job_name}'}. Leave --resume out to start one, or name "
            "the folder of the runs with --runs-folder"
        )
    return max(found, key=_last_step_closed).resolve()


def _job_of(resolved: Path) -> str:
    """Return the name of the job in a run's ``job.yaml``, as ``dump_job`` writes it; empty for a file that has none."""
    with suppress(OSError, UnicodeDecodeError):
        named = _JOB_NAME.search(resolved.read_text(encoding="utf-8"))
        return named[1] if named else ""
    return ""


def _last_step_closed(folder: Path) -> tuple[bool, float]:
    """Return a sort key: whether a run closed a step, and when it last did (else when it was started)."""
    steps = folder / "steps.jsonl"
    closed = steps.exists() and steps.stat().st_size > 0
    return closed, (steps if closed else folder / "job.yaml").stat().st_mtime


@dataclass(frozen=True)
class FieldChange:
    """Hold a field that differs; ``None`` stands for an absent one."""

    field: str
    before: Any
    after: Any

    @property
    def refused(self) -> bool:
        """Return True for a field that a resumed run must not change."""
        return is_within(self.field, _FIXED_FIELDS)

    @property
    def changes_meaning(self) -> bool:
        """Return True when the run may learn something else from here on."""
        return not is_within(self.field, _FIELDS_WITHOUT_MEANING)

    def __str__(self) -> str:
        """Return ``spec.algorithm.samplesPerPrompt: 8 → 4``."""
        return f"{self.field}: {_shown(self.before)} → {_shown(self.after)}"


def job_changes(before: RLJob, after: RLJob) -> list[FieldChange]:
    """Return the fields in which two jobs differ, in the order of the job file."""
    old, new = dict(_leaves(job_data(before))), dict(_leaves(job_data(after)))
    fields = [*old, *(field for field in new if field not in old)]
    return [FieldChange(field, old.get(field), new.get(field)) for field in fields if old.get(field) != new.get(field)]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _shown(value: Any) -> str:
    return "(absent)" if value is None else str(value)


def check_hub_models(job: RLJob) -> list[Problem]:
    """Return a problem for each model that is neither in the hub's local cache nor on the hub, or served wrongly."""
    on_hub = [each for each in _named_models(job) if is_hub_id(each.source)]
    found = (
        _cached_problem(each) if hub_cache(each.source).is_dir() else asyncio.run(_hub_problem(each)) for each in on_hub
    )
    return [problem for problem in found if problem]


class _HubModel(NamedTuple):
    field: str
    source: str
    revision: str
    reward: RewardModelSpec | None = None
    """The section of a reward model."""


def _named_models(job: RLJob) -> Iterator[_HubModel]:
    if job.spec.trains:
        model = job.spec.model
        yield _HubModel("spec.model.source", model.source, model.revision)
        if model.tokenizer:
            yield _HubModel("spec.model.tokenizer", model.tokenizer, model.tokenizer_revision)
    for field, scorer in job.spec.reward.by_field.items():
        if served := scorer.served:
            yield _HubModel(f"{field}.{scorer.served_field}.source", served.source, served.revision, scorer.model)


def _cached_problem(model: _HubModel) -> Problem | None:
    folder = hub_cache(model.source)
    try:
        commit = (folder / "refs" / (model.revision or "main")).read_text().strip()
        config = json.loads((folder / "snapshots" / commit / "config.json").read_text())
    except (OSError, ValueError):
        return None  # another revision, or a part of it: the server downloads the rest
    return _class_problem(model, config)


def _class_problem(model: _HubModel, config: Any) -> Problem | None:
    if model.reward is None or not isinstance(config, dict):
        return None
    return class_problem(model.field.removesuffix(".source"), model.reward, architecture_of(config))


async def _hub_problem(model: _HubModel) -> Problem | None:
    field, source, revision, _ = model
    hub = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    url = f"{hub}/api/models/{source}/revision/{revision or 'main'}"
    token = os.environ.get("HF_TOKEN", "")
    try:
        async with HttpClient(
            max_connections=1, bearer_token=token, key_field="HF_TOKEN", proxy=proxy_for(url)
        ) as client:
            response = await client.get(url, _RESPONSE_WITHIN_S)
    except (NoResponseError, CallTimeoutError) as error:
        return Problem(
            field,
            f"{source!r} is no folder beside the job file, and the model hub does not respond: {error}",
            f"{_LOCAL}. Otherwise check the network, or set HF_ENDPOINT",
        )
    if response.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}:
        return Problem(
            field,
            f"{source!r} is no folder beside the job file, and {hub} has no such model, or none that "
            f"{'the token in HF_TOKEN' if token else 'a caller without a token'} may read "
            f"(revision {revision or 'main'}, HTTP {response.status})",
            f"{_LOCAL}. Otherwise correct the name, or set HF_TOKEN",
        )
    return _class_problem(model, _described_config(response.body))


def _described_config(described: bytes) -> Any:
    """Return the part of the hub's description of a model that it takes from config.json."""
    try:
        description = json.loads(described)
    except ValueError:
        return None
    return description.get("config") if isinstance(description, dict) else None
