"""``plaudit tasks FOLDER``: check Harbor tasks before anybody trains on them, each in machines of its own.

For every task the tests run twice: after an agent that did nothing, which must earn 0, and after the task's own
solution, which must earn 1. A task that fails either teaches something else than what it says.

``plaudit images-of FOLDER``: build the image of each task that brings a Dockerfile, before any run. An image is tagged
with the digest of its folder, ``environment/`` or ``tests/`` (of separate tests), so that equal folders are built once
and a changed one is built anew. A run builds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from plaudit_job.tasks import Task, TaskError, expand, read_tasks
from plaudit_reward.providers import PROVIDERS, MachineChoice, Provider, TaskMachine
from plaudit_sandbox.container_engine import ContainerEngine, find_engine
from plaudit_sandbox.machine import CommandEnd
from plaudit_sandbox.verification import Verdict, interpreted
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError, RefusedError
from plaudit_wire.printable import printable
from plaudit_workers.process import EXIT_DONE, EXIT_FAILED

_SOLUTION = "solution"
_SHOWN_CHARACTERS = 300
_LOCAL: Final = "localhost"
_SHOWN_OF_A_BUILD = 2000
_BUILD_OPTIONS: Final = {
    "docker": (),
    "podman": ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384"),
    "buildah": ("--isolation", "chroot"),
}
"""Podman's own limits are above those of many hosts; buildah alone has no runtime to build in."""


@dataclass(frozen=True)
class TaskCheck:
    """What one task's tests gave."""

    task: str
    nothing: float | None
    """The reward of an agent that did nothing; None without one."""
    solution: float | None
    """The reward of the task's own solution; None without one."""
    seconds: float
    """Seconds that the tests took after the solution, or else after nothing."""
    problems: list[str] = field(default_factory=list)
    """Empty for a task to train on."""
    output: str = ""
    """The end of the output of the first run that was not as it should be."""


def check_tasks(arguments: argparse.Namespace) -> int:
    """Run the command."""
    tasks = _tasks(arguments.folders)
    choice = MachineChoice(image=arguments.image, registry=arguments.registry, network=arguments.network)
    provider = PROVIDERS[arguments.provider](choice)
    provider.require()
    if problem := next(filter(None, map(provider.problem, tasks)), ""):
        raise RefusedError(problem)
    checks = asyncio.run(_check_all(tasks, provider, arguments.concurrent))
    if arguments.json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print("\n".join(_lines(checks)))
    return EXIT_FAILED if any(check.problems for check in checks) else EXIT_DONE


def _tasks(folders: Sequence[Path]) -> list[Task]:
    try:
        return [task for folder in folders for task in read_tasks(folder)]
    except TaskError as error:
        raise RefusedError(str(error)) from error


async def _check_all(tasks: Sequence[Task], provider: Provider, concurrent: int) -> list[TaskCheck]:
    places = asyncio.Semaphore(concurrent)

    async def checked(task: Task) -> TaskCheck:
        async with places:
            try:
                return await _check(task, provider)
            except (DataError, InfrastructureError, TaskError) as error:
                return TaskCheck(task.name, None, None, 0.0, [str(error)])

    return list(await asyncio.gather(*map(checked, tasks)))


async def _check(task: Task, provider: Provider) -> TaskCheck:
    problems: list[str] = []
    outputs: list[str] = []
    async with _made(provider, task) as machine:
        idle = await _verified(task, machine, problems, outputs, "an agent that does nothing")
    if idle is not None and idle.reward is not None and idle.reward != 0:
        problems.append(f"an agent that does nothing earns {idle.reward:g}")
        outputs.append(idle.executed.output)
    solved = None
    if (task.folder / _SOLUTION / "solve.sh").is_file():
        async with _made(provider, task) as machine:
            ran = await _solve(task, machine)
            solved = await _verified(task, machine, problems, outputs, "the solution")
        if solved is not None and solved.reward is not None and solved.reward != 1:
            problems.append(f"the solution earns {solved.reward:g} (solve.sh ended with exit code {ran.exit_code})")
            outputs += [ran.output, solved.executed.output]
    else:
        problems.append("there is no solution/solve.sh, so nobody knows whether the task can be solved")
    timed = solved or idle
    return TaskCheck(
        task.name,
        idle.reward if idle else None,
        solved.reward if solved else None,
        timed.executed.seconds if timed else 0.0,
        problems,
        next((text.strip()[-_SHOWN_CHARACTERS:] for text in outputs if text.strip()), ""),
    )


@contextlib.asynccontextmanager
async def _made(provider: Provider, task: Task) -> AsyncIterator[TaskMachine]:
    """Yield a new machine of a task, in a temporary folder, and remove it."""
    with tempfile.TemporaryDirectory(prefix="plaudit-task-", ignore_cleanup_errors=True) as parent:
        os.chmod(parent, 0o711)  # noqa: S103 (the user of the machines passes through it)
        folder = Path(parent, "machine")
        os.mkdir(folder)
        try:
            yield await asyncio.to_thread(provider.make, folder, task)
        finally:
            await asyncio.to_thread(provider.remove, folder)


async def _solve(task: Task, machine: TaskMachine) -> CommandEnd:
    return await machine.machine.run(
        interpreted(task.folder / _SOLUTION / "solve.sh", f"/{_SOLUTION}/solve.sh"),
        timeout_s=task.config.agent.timeout_sec,
        environment=expand(task.config.environment.env),
        directory=machine.directory,
        mounts={f"/{_SOLUTION}": task.folder / _SOLUTION},
    )


async def _verified(
    task: Task, machine: TaskMachine, problems: list[str], outputs: list[str], who: str
) -> Verdict | None:
    """Return the tests' verdict; add what is wrong with the tests themselves to the problems."""
    verifier = task.config.verifier
    try:
        variables = expand(task.config.environment.env) | expand(verifier.env)
        verdict = await machine.verify(task, timeout_s=verifier.timeout_sec, environment=variables)
    except (DataError, InfrastructureError, TaskError) as error:
        problems.append(f"after {who}: {error}")
        return None
    if verdict.reason:
        problems.append(f"after {who}: {verdict.reason}")
        outputs.append(verdict.executed.output)
    return verdict


def _lines(checks: Sequence[TaskCheck]) -> list[str]:
    width = max(4, *(len(printable(check.task)) for check in checks))
    lines = [f"{'task':{width}}  nothing  solution  seconds"]
    for check in checks:
        rewards = f"{_number(check.nothing):>7}  {_number(check.solution):>8}"
        lines.append(f"{printable(check.task):{width}}  {rewards}  {check.seconds:7.1f}")
        lines += [f"    {printable(problem)}" for problem in check.problems]
        if check.output:
            lines += [f"    | {printable(line)}" for line in check.output.splitlines()]
    broken = sum(bool(check.problems) for check in checks)
    return [*lines, f"{len(checks) - broken} of {len(checks)} tasks can be trained on"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def images_of(arguments: argparse.Namespace) -> int:
    """Run the command."""
    tasks = _tasks(arguments.folders)
    registry = arguments.push.rstrip("/") or _LOCAL
    problems: dict[str, str] = {}
    to_build = {image: (folder, task) for task in tasks for image, folder in task.images_to_build(registry).items()}
    if to_build:
        build = _builder()
        for image, (folder, task) in to_build.items():
            limit_s = task.config.environment.build_timeout_sec
            if problem := _built(build, image, folder, limit_s, push=bool(arguments.push)):
                problems[image] = problem
    found = [
        {"task": task.name, "image": image, "problem": problems.get(image, "")}
        for task in tasks
        for image in dict.fromkeys([task.image(registry), task.tests_image(registry) or task.image(registry)])
    ]
    print(json.dumps(found) if arguments.json else "\n".join(_image_lines(found)))
    return EXIT_FAILED if problems else EXIT_DONE


def _builder() -> ContainerEngine:
    """Return what builds images here: an engine or, without one, buildah."""
    try:
        return find_engine()
    except ConfigurationError as error:
        if shutil.which("buildah"):
            return ContainerEngine("buildah")
        raise ConfigurationError(f"{error}, or buildah") from error


def _built(builder: ContainerEngine, image: str, folder: Path, limit_s: float, *, push: bool) -> str:
    """Build an image that is not here yet, and push it; return the problem, or nothing."""
    if not _is_here(builder, image):
        command = ["build", *_BUILD_OPTIONS[builder.program], "--tag", image, str(folder)]
        if problem := _problem(builder, command, limit_s):
            return problem
    return _problem(builder, ["push", image], limit_s) if push else ""


def _is_here(builder: ContainerEngine, image: str) -> bool:
    command = ["inspect", "--type", "image"] if builder.program == "buildah" else ["image", "inspect"]
    return not _problem(builder, [*command, image], timeout_s=60.0)


def _problem(builder: ContainerEngine, command: Sequence[str], timeout_s: float) -> str:
    """Run a command of the builder; return why it failed, or nothing."""
    try:
        done = subprocess.run(
            [builder.program, *command], capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"{builder.program} {command[0]} did not end within {timeout_s:g} s (environment.build_timeout_sec)"
    if not done.returncode:
        return ""
    return f"{builder.program} {command[0]} failed: {(done.stdout + done.stderr).strip()[-_SHOWN_OF_A_BUILD:]}"


def _image_lines(found: Sequence[dict[str, str]]) -> list[str]:
    width = max(len(printable(each["task"])) for each in found)
    lines = []
    for each in found:
        lines.append(f"{printable(each['task']):{width}}  {printable(each['image']) or 'no image'}")
        lines += [f"    | {printable(line)}" for line in each["problem"].splitlines()]
    if any(each["problem"] for each in found):
        sys.stderr.write("Some images could not be built.\n")
    return lines
