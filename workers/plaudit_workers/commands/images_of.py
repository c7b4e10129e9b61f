"""``plaudit images-of FOLDER``: build the image of each Harbor task that brings a Dockerfile, before any run.

An image is tagged with the digest of its folder, ``environment/`` or ``tests/`` (of separate tests), so that equal
folders are built once and a changed one is built anew. A run builds nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from plaudit_job.tasks import Task, TaskError, read_tasks
from plaudit_sandbox.container_engine import ContainerEngine, find_engine
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_wire.printable import printable
from plaudit_workers.process import EXIT_DONE, EXIT_FAILED

_LOCAL: Final = "localhost"
_SHOWN_CHARACTERS = 2000
_BUILD_OPTIONS: Final = {
    "docker": (),
    "podman": ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384"),
    "buildah": ("--isolation", "chroot"),
}
"""Podman's own limits are above those of many hosts; buildah alone has no runtime to build in."""


def images_of(arguments: argparse.Namespace) -> int:
    """Run the command."""
    try:
        tasks = [task for folder in arguments.folders for task in read_tasks(folder)]
    except TaskError as error:
        raise RefusedError(str(error)) from error
    registry = arguments.push.rstrip("/") or _LOCAL
    problems: dict[str, str] = {}
    to_build = {image: (folder, task) for task in tasks for image, folder in task.images_to_build(registry).items()}
    if to_build:
        build = _builder()
        for image, (folder, task) in to_build.items():
            limit_s = task.config.environment.build_timeout_sec
            if problem := _built(build, image, folder, limit_s, push=bool(arguments.push)):
                problems[image] = problem
    images = [(task, image) for task in tasks for image in dict.fromkeys([task.image(registry), *_own(task, registry)])]
    found = [{"task": task.name, "image": image, "problem": problems.get(image, "")} for task, image in images]
    print(json.dumps(found) if arguments.json else "\n".join(_lines(found)))
    return EXIT_FAILED if problems else EXIT_DONE


def _own(task: Task, registry: str) -> list[str]:
    """Return the image of a task's separate tests, if they have one."""
    return [image] if (image := task.tests_image(registry)) else []


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
    return f"{builder.program} {command[0]} failed: {(done.stdout + done.stderr).strip()[-_SHOWN_CHARACTERS:]}"


def _lines(found: Sequence[dict[str, str]]) -> list[str]:
    width = max(len(printable(each["task"])) for each in found)
    lines = []
    for each in found:
        lines.append(f"{printable(each['task']):{width}}  {printable(each['image']) or 'no image'}")
        lines += [f"    | {printable(line)}" for line in each["problem"].splitlines()]
    if any(each["problem"] for each in found):
        sys.stderr.write("Some images could not be built.\n")
    return lines
