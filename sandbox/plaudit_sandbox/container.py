"""Run an agent in a container of docker or podman, and its tests in a second one made from what it left.

The container has its image's programs and user, a file system of its own, no network unless one is given, no new
privileges, and of root's capabilities those alone that files and users need. It shares the host's kernel: give the
engine a runtime such as gVisor's (``--runtime``, in its own configuration) where code may attack that.

Unlike in a machine of ``machine``, processes live from command to command, and the agent may write to its programs.
``/tests``, ``/logs`` and ``/run`` are mounts from the start, so that an agent can neither remove them nor put a link in
their place. The tests' container is a copy (``commit``) in which nothing of the agent runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Final, Literal, cast

from plaudit_sandbox.archives import (
    FOLDER,
    LARGEST_REWARD_BYTES,
    LINK,
    RewardArchive,
    copy_files,
    deceiving_links,
    entries_below,
    waited_at,
    write_archive,
)
from plaudit_sandbox.container_engine import (
    ContainerEngine,
    client_folder,
    inspected,
    label_options,
    listening_in,
    lost_accounts,
    upper_folder,
    write_variables,
)
from plaudit_sandbox.machine import (
    AT_A_LIMIT,
    KILLED,
    LOG_FOLDERS,
    LOOPBACK_PORT,
    REWARD_FILES,
    CommandEnd,
    Ending,
    KeptOutput,
    MachineLimits,
    SeparateTests,
    Serve,
    UnusableMachineError,
    space_of,
)
from plaudit_sandbox.machine_start import start_error
from plaudit_sandbox.verification import LOADED_BY_VARIABLES, changed_programs, compiled_folders
from plaudit_wire.errors import InfrastructureError

CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
_POLL_S = 1.0
_KILLS = 5
_NOT_STARTED = (126, 255)
_ENGINE_S_WORDS = "OCI runtime"
"""In docker's and podman's message that a container takes no further process."""
_TMPFS_MIB = 64
_LOGS: Final = ("/logs", *(f"/logs/{name}" for name in LOG_FOLDERS))
_NEVER = "0001-"
"""Begins the time at which a container was started that was not."""
_TAR_BLOCK_BYTES = 512
_MISSING = ("no such file", "could not find", "could not be found", "not a directory", "too many l")
"""In docker's and podman's messages that there is nothing at a path, or that links lead nowhere."""
_WAIT = ("sh", "-c", 'sleep "$1" & wait', "sh")
"""The first process: it reaps others, and ends the container when its time is over."""
_IN_FOLDER = ("sh", "-c", 'cd "$1" 2>/dev/null || cd /; shift; exec "$@"', "sh")
_WITHOUT = (
    "sh",
    "-c",
    'cd "$1" 2>/dev/null || cd /; n=$2; shift 2; c=; i=0; '
    'while [ "$i" != "$n" ]; do i=$((i + 1)); c="$c \\"\\${$i}\\""; done; '
    '(shift "$n"; rm -rf -- "$@" || { for f; do chmod u+w -- "${f%/*}"; done; rm -rf -- "$@"; }) 2>/dev/null; '
    'eval "exec $c"',
    "sh",
)
"""As ``_IN_FOLDER``; the command is so many words, and what follows them is removed before, whatever the rights of its
folder."""
_MOST_REMOVED_CHARACTERS = 100_000
_COMMIT_S = 3600.0
"""However much the agent may write: it must not get an error in place of its tests."""
_LINKS_OF_PATH = 'IFS=:; for d in $PATH; do for f in "$d"/*; do [ ! -L "$f" ] || readlink -f "$f"; done; done'
PYCACHE_ELSEWHERE: Final = {"PYTHONPYCACHEPREFIX": "/run/pycache"}
"""Makes the Python of tests ignore what the agent compiled."""


@dataclass(frozen=True)
class ContainerSettings:
    """What a container is made of."""

    image: str
    network: Literal["none", "public"] = "none"
    cpus: float = 1.0
    workdir: str = "/app"
    """Where the agent works; programs below it are its own, and not the image's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """By which it can be found and removed, such as ``run``, ``group`` and ``index``."""
    lifetime_s: float = 86_400.0
    """It ends by itself after this time, whoever has forgotten it."""
    holder: Path | None = None
    """The folder that it belongs to; where the folder is gone, ``remove_orphans`` removes it. None: it belongs to this
    process."""
    has_separate_tests: bool = False
    """Its tests run in a container of their own: ``/tests`` and ``/logs`` need no protection, and what the agent leaves
    in ``/logs/artifacts`` stays."""


class ContainerMachine:
    """One machine in a container."""

    def __init__(self, engine: ContainerEngine, name: str, settings: ContainerSettings, limits: MachineLimits) -> None:
        """Take over a container that exists, or that ``create`` makes."""
        self.name = name
        self.limits = limits
        self.settings = settings
        self._engine = engine

    @classmethod
    def new(cls, engine: ContainerEngine, settings: ContainerSettings, limits: MachineLimits) -> ContainerMachine:
        """Make a new container with a name of its own. Raises ``InfrastructureError``."""
        machine = cls(engine, new_name(), settings, limits)
        machine.create()
        return machine

    def create(self) -> None:
        """Make the container; pull its image if it is not here. Raises ``InfrastructureError``."""
        engine, settings = self._engine, self.settings
        engine.ensure_image(settings.image)
        mounts = ("--tmpfs", "/tests:ro,size=4k", "--tmpfs", f"/logs:rw,mode=1777,size={_TMPFS_MIB}m")
        engine.call(
            *("create", "--name", self.name, *_options(engine, settings, self.limits)),
            *mounts * (not settings.has_separate_tests),
            *("--entrypoint", json.dumps(_WAIT[:1]) if engine.program == "podman" else _WAIT[0]),
            *(settings.image, *_WAIT[1:], str(int(settings.lifetime_s))),
        )
        try:
            if settings.has_separate_tests:
                _put(engine, self.name, {}, _LOGS)
            if settings.workdir != engine.image_workdir(settings.image):
                engine.call("start", self.name)
                engine.call("exec", "--user", "0", self.name, "mkdir", "-p", "-m", "1777", settings.workdir)
        except InfrastructureError:
            self.remove()
            raise

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] = {},
        directory: str = "/app",
        mounts: Mapping[str, Path] = {},
        stdin: bytes = b"",
        serve: Serve | None = None,
    ) -> CommandEnd:
        """Run a command to its end or to a limit, which ends every process of the container.

        Args:
            environment: Added to the image's own.
            mounts: Copied into the container before.
            serve: Answers at ``LOOPBACK_PORT`` of the container's loopback device until the command has ended.
        """

        async def execute() -> CommandEnd:
            written_bytes = await asyncio.to_thread(self._start)
            if mounts:
                await asyncio.to_thread(_put, self._engine, self.name, mounts)
            async with contextlib.AsyncExitStack() as serving:
                if serve is not None:
                    listening = await asyncio.to_thread(listening_in, self._engine, self.name, LOOPBACK_PORT)
                    await serving.enter_async_context(serve(listening))
                with write_variables(environment) as variables, tempfile.TemporaryFile() as given:
                    given.write(stdin)
                    given.seek(0)
                    options = [*["--interactive"] * bool(stdin), "--env-file", variables.name]
                    call = [self._engine.program, "exec", *options, self.name, *_IN_FOLDER, directory, *command]
                    return await _executed(
                        self._engine, call, self.name, given.fileno(), timeout_s, self.limits, written_bytes
                    )

        try:
            executed = await execute()
        except UnusableMachineError as unusable:
            return CommandEnd("exited", _NOT_STARTED[0], f"no program can be started: {unusable}\n", 0.0)
        if executed.exit_code in _NOT_STARTED and _ENGINE_S_WORDS in executed.output:
            # The agent left no room for a further process, so all of them end.
            await asyncio.to_thread(_end, self._engine, self.name)
            executed = await execute()
        return executed

    def upload(self, folder: Path, place: str) -> None:
        """Copy the files of a host's folder into the new container, for its root."""
        _put(self._engine, self.name, {place: folder})

    def disk_bytes(self) -> int:
        """Return the space of what was written to the container, beside the image and what lies in memory."""
        return _written(self._engine, self.name)(self.limits.disk_bytes)

    @contextlib.asynccontextmanager
    async def for_tests(
        self, tests: Path, separate: SeparateTests | None = None
    ) -> AsyncIterator[ContainerCopy | SeparateContainer]:
        """End every process of the agent, and yield a container for tests. The agent's stays, stopped."""
        made: ContainerCopy | SeparateContainer
        made = self._copy(tests) if separate is None else SeparateContainer(self, self._engine, tests, separate)
        await asyncio.to_thread(made.remove)  # what a killed process left
        await asyncio.to_thread(_end, self._engine, self.name)
        try:
            await asyncio.to_thread(made.prepare)
            yield made
        finally:
            await asyncio.to_thread(made.remove)

    def put(self, tests: Path) -> None:
        """Copy tests into the container, with new folders for what they write."""
        _put(self._engine, self.name, {"/tests": tests}, _LOGS)

    def replace(self, artifacts: Mapping[str, IO[bytes]]) -> None:
        """Put archives in the place of what the container has at these paths."""
        if artifacts:
            self._start()
            self._engine.call("exec", "--user", "0", self.name, "rm", "-rf", "--", *artifacts)
        for archive in artifacts.values():
            self._engine.call("cp", "-", f"{self.name}:/", stdin=archive)

    def archive(self, path: str, to: IO[bytes], most_bytes: int) -> int | None:
        """Write an artifact of the stopped container as an archive; return the bytes it takes, None if it is gone.

        Raises ``FilesTooLargeError``, and ``InfrastructureError``.
        """
        reading = [self._engine.program, "cp", f"{self.name}:{path}", "-"]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(reading, stdout=subprocess.PIPE, stderr=errors, cwd=client_folder()) as process,
        ):
            source = cast(io.BufferedReader, process.stdout)
            try:
                if source.peek(1):
                    below = str(PurePosixPath(path).parent)[1:]
                    taken = copy_files(source, to, [path[1:]], most_bytes, below=below, are_artifacts=True)
                    to.flush()
                    is_empty = not any(os.pread(to.fileno(), _TAR_BLOCK_BYTES, 0))
                    return None if is_empty else taken  # engines refuse an archive of nothing
                process.wait()
            finally:
                process.kill()
            errors.seek(0)
            why = errors.read().decode(errors="replace").strip()
        if any(words in why.lower() for words in _MISSING):
            return None
        raise InfrastructureError(f"{path} cannot be copied: {why[-300:]}")

    def remove(self) -> None:
        """Remove the container with all that it holds, and what a killed process left of its tests."""
        self._copy(Path()).remove()
        self._engine.remove(self.name)

    def _copy(self, tests: Path) -> ContainerCopy:
        return ContainerCopy(self._engine, self.name, self.settings, self.limits, tests)

    def _start(self) -> Callable[[int], int]:
        """Start the container if it does not run; return what counts the space of its files."""
        is_running, drivers = inspected(self._engine, self.name, [".State.Running", "json .GraphDriver"])
        if lost := lost_accounts(drivers, self._engine.image_accounts(self.settings.image)):
            raise UnusableMachineError(*lost)
        if is_running != "true":
            self._start_again()
        return _counter(self._engine, self.name, drivers)

    def _start_again(self) -> None:
        """Start it; raise ``UnusableMachineError`` if it ran before and starts no more, and a new one does."""
        try:
            self._engine.call("start", self.name)
        except InfrastructureError as error:
            if inspected(self._engine, self.name, [".State.StartedAt"])[0].startswith(_NEVER):
                raise
            try:
                with _another(self._engine, self.settings, self.limits):
                    pass
            except InfrastructureError:
                raise error from None
            raise UnusableMachineError(str(error)) from error


class TestsContainer:
    """A container for tests, and what they left there."""

    def __init__(self, engine: ContainerEngine, tests: Path) -> None:
        self.changed_programs: Sequence[str] = ()
        self._engine = engine
        self._tests = tests
        self._rewards: RewardArchive | None = None

    def reward_file(self, name: str) -> str | None:
        """Return the text of a file that the tests left; None if there is none. Raises ``DataError``."""
        return self._rewards.text(name) if self._rewards else None


class ContainerCopy(TestsContainer):
    """A second container, with the files of the first one."""

    def __init__(
        self, engine: ContainerEngine, name: str, settings: ContainerSettings, limits: MachineLimits, tests: Path
    ) -> None:
        """Name it; ``run`` makes it."""
        super().__init__(engine, tests)
        self._changes: frozenset[str] = frozenset()
        self._agent, self._name, self._image = name, f"{name}-verify", f"localhost/plaudit-copy:{name}"
        self._settings = settings
        self._limits = limits
        self._holders: frozenset[str] = frozenset()
        self._removed: Sequence[str] = ()

    def prepare(self) -> None:
        """Find the programs that the agent changed, and what of its files the tests must not meet."""
        engine, settings = self._engine, self._settings
        (drivers,) = inspected(engine, self._agent, ["json .GraphDriver"])
        self.changed_programs = lost_accounts(drivers, engine.image_accounts(settings.image))
        if self.changed_programs:
            return
        upper = upper_folder(drivers) if os.geteuid() == 0 else None
        entries = {} if upper is None else {f"/{path}": kind for path, kind in entries_below(upper).items()}
        if entries.get("/etc/mtab") == f"{LINK}/proc/mounts":  # podman's own
            del entries["/etc/mtab"]
        self._changes = frozenset(self._listed() if upper is None else entries)
        variables = engine.image_variables(settings.image)
        where = variables.get("PATH", ""), settings.workdir
        named = (variables.get(name, "").replace(" ", ":").split(":") for name in LOADED_BY_VARIABLES)
        behind = [*_behind_links(engine, settings, self._limits), *itertools.chain(*named)]

        def is_folder(path: str) -> bool:
            return self._is_folder(path) if upper is None else entries[path] == FOLDER

        self.changed_programs = changed_programs(self._changes, *where, is_folder, behind)
        links = deceiving_links({path[1:]: kind for path, kind in entries.items()})
        self._removed = [*compiled_folders(self._changes, *where, behind), *(f"/{path}" for path in links)]
        are_text = not any("\udc80" <= character <= "\udcff" for path in self._removed for character in path)
        if sum(map(len, self._removed)) > _MOST_REMOVED_CHARACTERS or not are_text:  # engines pass on UTF-8 alone
            self.changed_programs = self.changed_programs or self._removed

    def _listed(self) -> Iterator[str]:
        """Yield the changed paths as the engine lists them, for a user that cannot look itself."""
        lines = self._engine.call("diff", self._agent).split("\n")
        paths = [path for _, _, path in (line.partition(" ") for line in lines) if path.startswith("/")]
        if len(paths) == len(lines):  # else a name holds a line break, and could pass for further paths
            self._holders = frozenset(str(above) for path in paths for above in PurePosixPath(path).parents)
        yield from paths

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Copy the agent's container, run the tests in the copy, and read what they left in ``/logs/verifier``."""
        used_bytes = await asyncio.to_thread(self._create, command, environment, directory)
        call = [self._engine.program, "start", "--attach", self._name]
        written_bytes = await asyncio.to_thread(_written, self._engine, self._name)
        executed = await _executed(
            self._engine,
            call,
            self._name,
            subprocess.DEVNULL,
            timeout_s,
            self._limits,
            written_bytes,
            used_bytes=used_bytes,
        )
        executed, self._rewards = await asyncio.to_thread(_ended, self._engine, self._name, executed, self._limits)
        return executed

    def may_block(self) -> bool:
        """Look through the files that the agent has changed or made; the image's own are no doing of its.

        The engine's list of changes cannot hold every name: one that is not as it prints it counts as well.
        """
        export = [self._engine.program, "export", self._agent]
        with subprocess.Popen(
            export, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=client_folder()
        ) as exporting:
            try:
                files = cast(IO[bytes], exporting.stdout)
                paths = waited_at(files)
                return any(path in self._changes or not path.isprintable() or path[-1] == " " for path in paths)
            finally:
                exporting.kill()

    def remove(self) -> None:
        """Remove the copy and its image."""
        self._engine.remove(self._name)
        self._engine.remove_images(self._image)

    def _create(self, command: Sequence[str], environment: Mapping[str, str], directory: str) -> int:
        """Make the container of the tests; return the bytes that the agent has used already."""
        engine = self._engine
        used_bytes = _written(engine, self._agent)(self._limits.disk_bytes)
        engine.call("commit", "--quiet", self._agent, self._image, timeout_s=_COMMIT_S)
        first, *rest = *_WITHOUT, directory, str(len(command)), *command, *self._removed
        with write_variables({**PYCACHE_ELSEWHERE, **environment}) as variables:
            engine.call(
                *("create", "--name", self._name, "--env-file", variables.name),
                *_options(engine, self._settings, self._limits),
                *("--entrypoint", json.dumps([first]) if engine.program == "podman" else first),
                *(self._image, *rest),
            )
            _put(engine, self._name, {"/tests": self._tests}, _LOGS)
        return used_bytes

    def _is_folder(self, path: str) -> bool:
        """Tell from the first word of an archive whether an entry of the agent's container is a folder."""
        if path in self._holders:
            return True
        with tempfile.TemporaryFile() as archive:
            done = subprocess.run(
                [self._engine.program, "cp", f"{self._agent}:{path}", "-"], stdout=archive, stderr=subprocess.DEVNULL
            )
            archive.seek(0)
            kind = archive.read(512)[156:157]
        return not done.returncode and kind == b"5"


class SeparateContainer(TestsContainer):
    """A new container for tests, with the artifacts of the agent's alone."""

    def __init__(self, agent: ContainerMachine, engine: ContainerEngine, tests: Path, separate: SeparateTests) -> None:
        """Name it; ``prepare`` makes it."""
        settings = replace(
            agent.settings,
            image=separate.image,
            network=separate.network,
            cpus=separate.cpus,
            workdir=separate.directory,
            has_separate_tests=True,
        )
        super().__init__(engine, tests)
        self._machine = ContainerMachine(engine, f"{agent.name}-verify", settings, separate.limits)
        self._agent = agent
        self._separate = separate

    def prepare(self) -> None:
        """Make the container, and copy the artifacts and the tests into it. Raises ``InfrastructureError``.

        No program of the agent's is in it, but an engine may find no way into the agent's container.
        """
        (drivers,) = inspected(self._engine, self._agent.name, ["json .GraphDriver"])
        self.changed_programs = lost_accounts(drivers, self._engine.image_accounts(self._agent.settings.image))
        if self.changed_programs:
            return
        self._machine.create()
        if self._separate.given is not None:
            self._machine.upload(self._separate.given, self._separate.directory)
        room_bytes = self._separate.limits.disk_bytes
        found: dict[str, IO[bytes]] = {}
        with contextlib.ExitStack() as opened:
            for path in self._separate.artifacts:
                archive = opened.enter_context(tempfile.TemporaryFile())
                if (taken := self._agent.archive(path, archive, room_bytes)) is not None:
                    archive.seek(0)
                    found[path] = archive
                    room_bytes -= taken
            self._machine.put(self._tests)
            self._machine.replace(found)

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Run the tests, end all that they left, and read what they left in ``/logs/verifier``."""
        executed = await self._machine.run(command, timeout_s=timeout_s, environment=environment, directory=directory)
        limits = self._separate.limits
        executed, self._rewards = await asyncio.to_thread(_ended, self._engine, self._machine.name, executed, limits)
        return executed

    def may_block(self) -> bool:
        """Return False: of the agent's it has files, folders and links within an artifact alone."""
        return False

    def remove(self) -> None:
        """Remove the container."""
        self._engine.remove(self._machine.name)


def _ended(
    engine: ContainerEngine, container: str, executed: CommandEnd, limits: MachineLimits
) -> tuple[CommandEnd, RewardArchive | None]:
    """End all that tests left; return their end as the engine tells it, and what they left in ``/logs/verifier``.

    Tests whose last command was killed (``kill -9 $server; wait $server``) look like those that had no memory, but have
    a reward. Raises ``InfrastructureError`` for tests that no engine could start.
    """
    _end(engine, container)
    if executed.exit_code in _NOT_STARTED:
        (started,) = inspected(engine, container, [".State.StartedAt"])
        if started.startswith(_NEVER):
            raise InfrastructureError(f"the tests cannot be started: {executed.output.strip()[-300:]}")
    if executed.ending not in ("exited", "memory"):
        return executed, None
    with subprocess.Popen(
        [engine.program, "cp", f"{container}:/logs/verifier", "-"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as reading:
        assert reading.stdout is not None
        try:
            rewards = RewardArchive(reading.stdout, REWARD_FILES, 2 * limits.disk_bytes + LARGEST_REWARD_BYTES)
        finally:
            reading.kill()
    if executed.ending == "memory" and rewards.names:
        executed = replace(executed, ending="exited", exit_code=KILLED)
    return executed, rewards


_links_of_images: dict[tuple[str, str], list[str]] = {}


def _behind_links(engine: ContainerEngine, settings: ContainerSettings, limits: MachineLimits) -> list[str]:
    """Return where the links in the image's ``PATH`` lead, as a new container of it says; asked once for each image."""
    if (image := (engine.program, settings.image)) not in _links_of_images:
        with _another(engine, settings, limits) as new:
            _links_of_images[image] = engine.call("exec", new, "sh", "-c", _LINKS_OF_PATH).split("\n")
    return _links_of_images[image]


@contextlib.contextmanager
def _another(engine: ContainerEngine, settings: ContainerSettings, limits: MachineLimits) -> Iterator[str]:
    """Yield the name of a new container that runs, and remove it."""
    new = ContainerMachine(engine, new_name(), settings, limits)
    try:
        new.create()
        engine.call("start", new.name)
        yield new.name
    finally:
        new.remove()


def _put(engine: ContainerEngine, container: str, folders: Mapping[str, Path], empty: Sequence[str] = ()) -> None:
    with tempfile.TemporaryFile() as archive:
        write_archive(archive, folders, empty)
        archive.seek(0)
        engine.call("cp", "-", f"{container}:/", stdin=archive)


def new_name() -> str:
    """Return a name that no container has."""
    return f"plaudit-{secrets.token_hex(8)}"


def _options(engine: ContainerEngine, settings: ContainerSettings, limits: MachineLimits) -> list[str]:
    """Return what every container is created with: not in its folder, which an agent may remove.

    Nothing of the image's runs by itself, and what its ``VOLUME`` names is one of the container's own folders, which
    count and are copied.
    """
    return [
        *("--no-healthcheck", *("--image-volume", "ignore") * (engine.program == "podman")),
        *("--workdir", "/"),
        *("--network", "none") * (settings.network == "none"),
        *("--pull", "never", "--security-opt", "no-new-privileges", "--cap-drop", "ALL"),
        *(word for name in CAPABILITIES for word in ("--cap-add", name)),
        *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
        *("--cpus", str(settings.cpus), "--pids-limit", str(limits.processes)),
        *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=16384:16384", "--ulimit", "core=0:0"),
        *("--ulimit", f"fsize={limits.file_bytes}:{limits.file_bytes}"),
        *("--tmpfs", f"/run:rw,mode=1777,exec,size={_TMPFS_MIB}m", "--shm-size", f"{_TMPFS_MIB}m"),
        *("--hostname", "sandbox", *label_options(settings.labels, settings.holder)),
    ]


async def _executed(
    engine: ContainerEngine,
    call: Sequence[str],
    container: str,
    stdin: int,
    timeout_s: float,
    limits: MachineLimits,
    written_bytes: Callable[[int], int],
    *,
    used_bytes: int = 0,
) -> CommandEnd:
    """Run the engine's client for one command in a container, and end the container at a limit."""
    began_s = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *call,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            cwd=client_folder(),
        )
    except (OSError, ValueError) as error:
        raise start_error(error) from error
    assert process.stdout is not None
    output = KeptOutput(limits.output_bytes)
    reading = asyncio.create_task(output.read(process.stdout))
    try:
        room_bytes = limits.disk_bytes - used_bytes
        ending = await _watch(process, began_s + timeout_s, written_bytes, room_bytes)
        if ending != "exited":
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.kill()  # where it waits for something in the container, it may hold the container's lock
            await asyncio.to_thread(_end, engine, container)
        code = await process.wait()
        await reading
    finally:
        if process.returncode is None:
            process.kill()
        reading.cancel()
    if ending == "exited" and code == KILLED:
        ending = "memory"  # of what can end a whole command by this signal, only the kernel's shortage is not its own
    return CommandEnd(ending, AT_A_LIMIT if ending != "exited" else code, output.text(), time.monotonic() - began_s)


async def _watch(
    process: asyncio.subprocess.Process, until_s: float, written_bytes: Callable[[int], int], room_bytes: int
) -> Ending:
    """Wait for the end of the command; return the limit that it reached first."""
    waiting = asyncio.create_task(process.wait())
    try:
        while True:
            left_s = until_s - time.monotonic()
            done, _ = await asyncio.wait([waiting], timeout=min(_POLL_S, max(left_s, 0.0)))
            if not done and left_s <= 0:
                return "timeout"
            if await asyncio.to_thread(written_bytes, room_bytes) > room_bytes:
                return "disk"
            if done:
                return "exited"
    finally:
        waiting.cancel()


def _written(engine: ContainerEngine, container: str) -> Callable[[int], int]:
    (drivers,) = inspected(engine, container, ["json .GraphDriver"])
    return _counter(engine, container, drivers)


def _counter(engine: ContainerEngine, container: str, drivers: str) -> Callable[[int], int]:
    """Return what counts the space of what was written to a container; above the number that it gets it may stop.

    Root counts faster itself: an engine counts the image as well, before it tells the difference. Holes in files count
    either way: the copy for tests has none, and would fill this host's disk.
    """
    upper = upper_folder(drivers)
    if upper is not None and os.geteuid() == 0:
        return partial(space_of, upper, with_holes=True)

    def counted(most: int) -> int:
        (size,) = inspected(engine, container, [".SizeRw"], "--size")
        return int(size) if size.isdigit() else 0

    return counted


def _end(engine: ContainerEngine, container: str) -> None:
    """End every process of a container."""
    for _ in range(_KILLS):
        if inspected(engine, container, [".State.Running"]) != ["true"]:
            return
        with contextlib.suppress(InfrastructureError):  # it ended by itself meanwhile, which the next look tells
            engine.call("kill", container)
            engine.call("wait", container)
    raise InfrastructureError(f"the container {container} does not end: look at {engine.program} inspect {container}")
