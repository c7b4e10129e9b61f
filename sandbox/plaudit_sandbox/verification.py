"""Run a task's tests in the machine that an agent has left behind, and believe nothing that the agent could write.

The order, with Harbor's paths and files (``/tests/test.sh``, ``/logs/verifier/reward.json`` or ``reward.txt``):

1. Nothing of the agent's phase runs any more: each of its commands had namespaces of its own (``machine``).
2. The machine's files are copied. Tests run in the copy, so that they can be repeated after a crash: from what the
   agent left, and not from what half a run of the tests made of it.
3. ``/tests`` and ``/logs`` are new folders of the host in place of the agent's: no planted ``conftest.py``, no symlink.
4. The tests get an environment of their own. Of Python, git and the shell they read no configuration of the agent's
   home; ``PATH`` holds no folder that the agent could write to.
5. The reward is read once, by this process, after the kernel has ended every process of the copy.

A test that runs the agent's own programs, as most do, can still be deceived by them while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from plaudit_sandbox.machine import CommandEnd, Machine, copy, remove
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.plain import PlainDataError, plain_json

REWARD: Final = "reward"
_LARGEST_REWARD_BYTES = 1 << 20
_ENVIRONMENT = {
    "HOME": "/run",
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_COUNT": "2",  # so that no program of the repository's own configuration runs
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
}


@dataclass(frozen=True)
class Verdict:
    """The end of a verification."""

    outcome: Literal["scored", "data_error", "timeout"]
    reward: float | None
    """Present exactly when ``outcome`` is ``scored``."""
    reason: str
    """Why there is none, or why it is 0 without a test; empty otherwise."""
    executed: CommandEnd
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The further numbers of ``reward.json``."""


async def verify(
    machine: Machine,
    tests: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str] = {},
    directory: str = "/app",
) -> Verdict:
    """Run ``tests/test.sh`` on a copy of the machine and read the reward.

    Raises ``InfrastructureError`` where the copy or its root cannot be made, and ``DataError`` if there is no
    ``test.sh``.
    """
    if not (tests / "test.sh").is_file():
        raise DataError(f"{tests} has no test.sh: give the task one that writes /logs/verifier/reward.txt")
    if await asyncio.to_thread(machine.disk_bytes) > machine.limits.disk_bytes:
        return _verdict(CommandEnd("disk", 124, "", 0.0), machine.folder, timeout_s)
    with _copied(machine) as folder:
        copied = await asyncio.to_thread(_copy, machine, folder)
        placed, logs = folder / "tests", folder / "logs"
        placed.mkdir()
        await asyncio.to_thread(copy, tests, placed, "--no-preserve=ownership")
        for each in (logs, logs / "verifier", logs / "agent", logs / "artifacts"):
            copied.own(each)
        executed = await copied.run(
            ["bash", "/tests/test.sh"],
            timeout_s=timeout_s,
            environment={**environment, **_ENVIRONMENT},
            directory=directory,
            mounts={"/tests": placed},
            writable={"/logs": logs},
        )
        return _verdict(executed, logs / "verifier", timeout_s)


def _verdict(executed: CommandEnd, logs: Path, timeout_s: float) -> Verdict:
    if executed.ending == "timeout":
        return Verdict("timeout", None, f"the tests did not end within {timeout_s:g} s", executed)
    if executed.ending != "exited":  # the policy can bring this about, so it must not get rid of a bad score by it
        return Verdict("scored", 0.0, f"the tests were stopped at the machine's limit of {executed.ending}", executed)
    try:
        rewards = _read_rewards(logs)
    except DataError as error:
        end = f"test.sh ended with exit code {executed.exit_code}"
        return Verdict("data_error", None, f"{error} ({end})", executed)
    reward = rewards.pop(REWARD)
    return Verdict("scored", reward, "", executed, rewards)


def _read_rewards(logs: Path) -> dict[str, float]:
    """Return the numbers of ``reward.json``, else that of ``reward.txt``. Raise ``DataError``."""
    if (text := _read(logs / "reward.json")) is not None:
        try:
            found = plain_json(text, "reward.json")
        except PlainDataError as error:
            raise DataError(str(error)) from error
        numbers = found if isinstance(found, dict) else {}
        if REWARD not in numbers or not all(_is_number(value) for value in numbers.values()):
            raise DataError(f"reward.json is no object of numbers with {REWARD!r} among them")
        return {name: float(value) for name, value in numbers.items()}
    if (text := _read(logs / "reward.txt")) is not None:
        try:
            reward = float(text)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise DataError(f"reward.txt holds {text[:60]!r} and no finite number")
        return {REWARD: reward}
    raise DataError("the tests wrote neither /logs/verifier/reward.json nor reward.txt")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(path: Path) -> str | None:
    """Return the text of a regular file that is no link; None if there is none. A program of the copy wrote it.

    Its folder may be a link as well.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"/logs/{path.parent.name} is no folder ({error.strerror})") from error
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path.name} is no file ({error.strerror})") from error
    finally:
        os.close(folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_REWARD_BYTES:
            raise DataError(f"{path.name} is no file of at most {_LARGEST_REWARD_BYTES >> 20} MiB")
        return os.read(descriptor, _LARGEST_REWARD_BYTES).decode(errors="replace").strip()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _copied(machine: Machine) -> Iterator[Path]:
    """Yield a new folder beside the machine, and remove it; also those that a killed process left."""
    for left in machine.folder.parent.glob(f".{machine.folder.name}-verify-*"):
        remove(left)
    try:
        made = Path(tempfile.mkdtemp(dir=machine.folder.parent, prefix=f".{machine.folder.name}-verify-"))
    except OSError as error:
        raise InfrastructureError(f"the machine {machine.folder.name} cannot be copied: {error}") from error
    try:
        yield made
    finally:
        remove(made)


def _copy(machine: Machine, folder: Path) -> Machine:
    """Copy the machine with its files as they are."""
    target = folder / "machine"
    (target / "files").mkdir(parents=True)
    copy(machine.folder / "files", target / "files")
    return machine.at(target)
