"""Run a task's tests in the machine that an agent has left behind, and believe nothing that the agent could write.

The order, with Harbor's paths and files (``/tests/test.sh``, ``/logs/verifier/reward.json`` or ``reward.txt``):

1. Nothing of the agent's phase runs any more.
2. The tests get the machine's files as the agent left them: a copy where the provider can make one, so that the tests
   can be repeated after a crash. Separate tests get the task's artifacts alone, in a new machine.
3. ``/tests`` and ``/logs/verifier`` are new, and places that the agent could not replace: no planted ``conftest.py``,
   no symlink.
4. Where the agent could write to programs, as in a container, a replaced one ends the verification as ``tampered``.
5. The tests get an environment of their own. Of Python, git and the shell they read no configuration of the agent's
   home.
6. The reward is read once, by the provider and by no program of the machine, after every process has ended.

A test that runs the agent's own programs, as most do, can still be deceived by them while it runs.

Machines are known by two protocols alone. Their providers are ``machine`` (a folder and namespaces of this host),
``container`` (docker or podman) and ``pods`` (Kubernetes).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Literal, Protocol

from plaudit_sandbox.archives import FilesTooLargeError
from plaudit_sandbox.machine import AT_A_LIMIT, CommandEnd, MachineLimits, SeparateTests, UnusableMachineError
from plaudit_wire.errors import DataError
from plaudit_wire.plain import PlainDataError, plain_json
from plaudit_wire.printable import printable

REWARD: Final = "reward"
READ_BESIDE_BIN: Final = ("lib", "lib64", "pyvenv.cfg")
"""What programs of a ``bin`` in the ``PATH`` read beside it by themselves. ``pyvenv.cfg`` says where Python's library
is."""
_TOP_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr")
_READ_BY_PROGRAMS = (
    "/etc/alternatives",
    "/etc/apt",
    "/etc/bash.bashrc",
    "/etc/dpkg",
    "/etc/environment",
    "/etc/gitconfig",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/nsswitch.conf",
    "/etc/pam.d",
    "/etc/perl",
    "/etc/pip.conf",
    "/etc/pki/tls/openssl.cnf",
    "/etc/profile",
    "/etc/profile.d",
    "/etc/ssl/openssl.cnf",
    "/etc/uv",
    "/etc/wgetrc",
    "/etc/xdg/pip",
    "/etc/xdg/uv",
    "/etc/zsh",
    "/var/lib/dpkg/info",
)
"""Below them every change counts: which of bash, a module beside Python's own, a hook of apt or a preloaded library a
test would use cannot be known."""
_FOUND_ABOVE_TESTS = (
    *(".cargo", ".git", ".npmrc", ".pytest.ini", ".pytest.toml", ".python-version", ".venv", "Cargo.toml"),
    *("__init__.py", "conftest.py", "go.mod", "go.work", "node_modules", "package.json", "pyproject.toml"),
    *("pytest.ini", "pytest.toml", "rust-toolchain", "rust-toolchain.toml", "setup.cfg", "setup.py", "tox.ini"),
    "uv.toml",
)
"""What pytest, node, git, uv, cargo and go look for in each folder above ``/tests``, which is ``/``."""
LOADED_BY_VARIABLES: Final = ("BASH_ENV", "ENV", "LD_PRELOAD", "PYTHONHOME")
"""Variables of an image that name what programs load. Others, such as ``PYTHONPATH``, name what an agent works on."""
_OF_EVERY_SCRIPT = (
    *("[", "awk", "bash", "basename", "cat", "chmod", "cmp", "cp", "curl", "cut", "date", "diff", "dirname", "echo"),
    *("env", "expr", "false", "find", "git", "grep", "head", "ls", "mkdir", "mktemp", "mv", "printf", "pwd"),
    *("readlink", "realpath", "rm", "sed", "sh", "sleep", "sort", "stat", "tail", "tee", "test", "timeout", "touch"),
    *("tr", "true", "uniq", "wc", "xargs"),
)
"""Programs that no solution of a task brings along."""
_COMPILED = "/__pycache__"
_LONGEST_FIRST_LINE = 256
_SHOWN_PATHS = 3
_BLOCKED = ", and the agent left a named pipe, or a link to /dev, /proc or /sys, at which they may wait for ever"
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


class VerifierMachine(Protocol):
    """A machine made ready for tests: nothing of the agent runs, ``/tests`` and ``/logs/verifier`` are new."""

    @property
    def changed_programs(self) -> Sequence[str]:
        """Paths of the image's programs that the agent replaced, and of files that programs run by themselves."""

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Run the tests to their end or to a limit; afterwards no process is left. Call it once."""

    def may_block(self) -> bool:
        """Tell whether the agent left a file at which tests may wait or read for ever, whatever the machine's speed.

        Asked where tests did not end in time. Such files are a named pipe and a link to a device or to a process's
        file; sockets are none, because nothing listens any more and opening one fails at once.
        """

    def reward_file(self, name: str) -> str | None:
        """Return the text of a file of ``/logs/verifier``; None if there is none.

        Read by the provider, by no program that the agent could replace. Raises ``DataError`` for a link, a folder, a
        pipe, or a file above ``LARGEST_REWARD_BYTES``.
        """


class AgentMachine(Protocol):
    """One machine. All methods may raise ``InfrastructureError``; those without ``async`` block.

    ``run`` reports what the agent has brought about as the end of its command. All others raise
    ``UnusableMachineError`` where the agent let nothing be started any more.
    """

    @property
    def name(self) -> str:
        """A name for messages."""

    @property
    def limits(self) -> MachineLimits:
        """Its size."""

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] = {},
        directory: str = "/app",
        mounts: Mapping[str, Path] = {},
        stdin: bytes = b"",
    ) -> CommandEnd:
        """Run a command to its end or to a limit; ``mounts`` are folders of the host that it finds at these places."""

    def upload(self, folder: Path, place: str) -> None:
        """Copy the files of a host's folder into a new machine, before the agent's first command."""

    def disk_bytes(self) -> int:
        """Return the space that the agent's files take."""

    def for_tests(
        self, tests: Path, separate: SeparateTests | None = None
    ) -> AbstractAsyncContextManager[VerifierMachine]:
        """End the agent's processes, and yield a machine with its files and with ``tests`` as ``/tests``.

        With ``separate``, a new machine with some of its files alone. Raises ``FilesTooLargeError`` for more than it
        may hold.
        """

    def remove(self) -> None:
        """Remove the machine with all that it holds; nothing happens if it is gone."""


@dataclass(frozen=True)
class Verdict:
    """The end of a verification."""

    outcome: Literal["scored", "tampered", "data_error", "timeout"]
    """``tampered``: the agent replaced programs that the tests could use, or left a machine in which none can be
    started; no test ran, and the reward is 0."""
    reward: float | None
    """Present exactly when ``outcome`` is ``scored`` or ``tampered``."""
    reason: str
    """Why there is none, or why it is 0 without a test; empty otherwise."""
    executed: CommandEnd
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The further numbers of ``reward.json``."""


async def verify(
    machine: AgentMachine,
    tests: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str] = {},
    directory: str = "/app",
    separate: SeparateTests | None = None,
) -> Verdict:
    """Run ``tests/test.sh`` in the machine that the agent has left, and read the reward.

    With ``separate``, the tests run in a machine of their own, in its ``directory``. Raises ``InfrastructureError``
    where the provider fails, and ``DataError`` if there is no ``test.sh``.
    """
    if not (tests / "test.sh").is_file():
        raise DataError(f"{tests} has no test.sh: give the task one that writes /logs/verifier/reward.txt")
    try:
        if await asyncio.to_thread(machine.disk_bytes) > machine.limits.disk_bytes:
            return _stopped(CommandEnd("disk", AT_A_LIMIT, "", 0.0))
        async with machine.for_tests(tests, separate) as prepared:
            if changed := prepared.changed_programs:
                return _tampered(_about(changed))
            executed = await prepared.run(
                interpreted(tests / "test.sh", "/tests/test.sh"),
                timeout_s=timeout_s,
                environment={**environment, **_ENVIRONMENT},
                directory=separate.directory if separate else directory,
            )
            return await asyncio.to_thread(_verdict, executed, prepared, timeout_s)
    except FilesTooLargeError as error:
        return _stopped(CommandEnd("disk", AT_A_LIMIT, str(error), 0.0))
    except UnusableMachineError as error:
        return _tampered(str(error))


def interpreted(script: Path, place: str) -> list[str]:
    """Return the command that runs a script by the interpreter that its first line names, or else by bash.

    Args:
        script: The file on this host, which need not be executable.
        place: Where the machine has it.
    """
    with script.open("rb") as file:
        first = file.readline(_LONGEST_FIRST_LINE).decode(errors="replace")
    words = first[2:].split() if first.startswith("#!") else []
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if word != "-S"]
    if not words or words[0].endswith("/bash"):
        words[:1] = ["bash"]  # wherever the image has it
    return [*words, place]


def _tampered(reason: str) -> Verdict:
    return Verdict("tampered", 0.0, reason, CommandEnd("exited", 0, "", 0.0))


def _about(changed: Sequence[str]) -> str:
    shown_paths = ", ".join(map(printable, changed[:_SHOWN_PATHS]))
    more = f" and {len(changed) - _SHOWN_PATHS} more" if len(changed) > _SHOWN_PATHS else ""
    return (
        f"the agent changed programs that the tests could use: {shown_paths}{more}. A task that asks for this "
        "cannot be verified in the agent's machine"
    )


def _stopped(executed: CommandEnd) -> Verdict:
    """Return the verdict on a machine at its limit. The policy can bring this about, so it earns 0 and no error."""
    return Verdict("scored", 0.0, f"the tests were stopped at the machine's limit of {executed.ending}", executed)


def _verdict(executed: CommandEnd, machine: VerifierMachine, timeout_s: float) -> Verdict:
    if executed.ending == "timeout":
        reason = f"the tests did not end within {timeout_s:g} s"
        if machine.may_block():
            return Verdict("scored", 0.0, reason + _BLOCKED, executed)
        return Verdict("timeout", None, reason, executed)
    if executed.ending != "exited":
        return _stopped(executed)
    try:
        rewards = _read_rewards(machine)
    except DataError as error:
        end = f"test.sh ended with exit code {executed.exit_code}"
        return Verdict("data_error", None, f"{error} ({end})", executed)
    reward = rewards.pop(REWARD)
    return Verdict("scored", reward, "", executed, rewards)


def _read_rewards(machine: VerifierMachine) -> dict[str, float]:
    """Return the numbers of ``reward.json``, else that of ``reward.txt``. Raise ``DataError``."""
    if (text := machine.reward_file("reward.json")) is not None:
        try:
            found = plain_json(text, "reward.json")
        except PlainDataError as error:
            raise DataError(str(error)) from error
        numbers = found if isinstance(found, dict) else {}
        if REWARD not in numbers or not all(_is_number(value) for value in numbers.values()):
            raise DataError(f"reward.json is no object of numbers with {REWARD!r} among them")
        return {name: float(value) for name, value in numbers.items()}
    if (text := machine.reward_file("reward.txt")) is not None:
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


def changed_programs(
    changes: Iterable[str],
    path_variable: str,
    workdir: str,
    is_folder: Callable[[str], bool],
    behind_links: Iterable[str] = (),
) -> list[str]:
    """Return the changed paths that a program of the tests could run or read by itself, sorted.

    Args:
        changes: Every path that was added, changed or removed. A folder may be among them because of what it holds.
        path_variable: The image's ``PATH``. Its folders, and some beside a ``bin``, hold programs.
        workdir: Programs below it are the agent's work, even if ``PATH`` names their folder: all but those that take
            the place of what every script uses.
        is_folder: Tells a folder from all else, links to one included.
        behind_links: Where the links in the folders of ``PATH`` lead, and what ``LOADED_BY_VARIABLES`` name.
    """
    own, folders = _folders(path_variable, workdir, behind_links)

    def counts(path: str) -> bool:
        if _is_compiled(path):
            return False
        above, _, name = path.rpartition("/")
        return (name in _OF_EVERY_SCRIPT and above in own) or _is_below(path, folders)

    return sorted(path for path in set(changes) if counts(path) and not is_folder(path))


def compiled_folders(
    changes: Iterable[str], path_variable: str, workdir: str, behind_links: Iterable[str] = ()
) -> list[str]:
    """Return the changed folders of compiled Python among programs: not every interpreter can be told to ignore them.

    The arguments are those of ``changed_programs``.
    """
    folders = _folders(path_variable, workdir, behind_links)[1]
    found = {path[: path.index(_COMPILED) + len(_COMPILED)] for path in changes if _is_compiled(path)}
    return sorted(path for path in found if _is_below(path, folders))


def _is_compiled(path: str) -> bool:
    """Tell whether a path is a folder of compiled Python or below one."""
    return f"{_COMPILED}/" in f"{path}/"


def _folders(path_variable: str, workdir: str, behind_links: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the folders of ``PATH`` that are the agent's own, and what holds programs and their configuration."""
    named = [PurePosixPath(each) for each in path_variable.split(":") if each.startswith("/")]
    targets = [PurePosixPath(each) for each in behind_links if each.startswith("/")]
    bins = {each for each in (*named, *(target.parent for target in targets)) if each.name == "bin"}
    beside = [each.with_name(name) for each in bins for name in READ_BESIDE_BIN if each != PurePosixPath("/bin")]
    programs = [each for each in (*named, *bins, *targets, *beside) if not each.is_relative_to(workdir)]
    above_tests = [f"/{name}" for name in _FOUND_ABOVE_TESTS if workdir != "/"]
    own = [str(each) for each in named if each.is_relative_to(workdir)]
    return own, [*_TOP_FOLDERS, *_READ_BY_PROGRAMS, *above_tests, *map(str, programs)]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Tell whether a path is one of the folders or below one; ``/etc/python3.11`` and its kin count as well."""
    return path.startswith("/etc/python") or any(path == each or path.startswith(f"{each}/") for each in folders)
