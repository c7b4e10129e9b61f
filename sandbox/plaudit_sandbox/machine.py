"""Run commands of an agent in a machine of its own: a folder as its disk, Linux namespaces around each command.

A machine is a folder; it needs no server, no root and no image, and any process that sees the folder can go on with it.
Its programs are the host's, read only (``/usr``); what it writes lies below ``files/``, one folder for each writable
folder of its root. Each command runs in namespaces of its own, built anew from the folder by ``machine_process``, and
nothing of it outlives its end:

- processes: a PID namespace, whose first process is ours. When it ends the kernel kills all others, daemons too.
- files: a root of its own. The top level, ``/usr`` and ``/etc`` are read only, so that no program, library or
  ``ld.so.preload`` can be replaced; ``/dev`` has five devices; nothing else of the host is there, and no other machine.
- network: none, not even the loopback device of the host. ``run`` may serve one port of a loopback device of its own.
- rights: user 0 of a namespace without a single capability, that maps to a user without rights outside; no new ones.
- size: limits on time, memory, processes, one file and the whole disk. What a program holds open without a name (a
  removed file, a ``memfd``, a socket) counts too.

It is as strong as the kernel that the machine shares with its host. Code that attacks the kernel needs a provider with
a kernel of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Literal, cast

from plaudit_sandbox.archives import (
    LARGEST_REWARD_BYTES,
    LINK,
    MOST_ENTRIES,
    PIPE,
    copy_files,
    deceiving_links,
    entries_below,
    may_wait_at,
    unpack,
)
from plaudit_sandbox.machine_process import MachineCommand, Mount
from plaudit_sandbox.machine_start import StartedCommand, started
from plaudit_sandbox.privileges import NOBODY
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError
from plaudit_wire.logs import get_logger

logger = get_logger(__name__)
Ending = Literal["exited", "timeout", "blocked", "memory", "disk"]
"""``exited``: by itself. All others: it was stopped at a limit, by its own doing. ``blocked``: tests that did not end
in time, in a machine that holds a file at which a reader may wait for ever."""
Serve = Callable[[socket.socket], contextlib.AbstractAsyncContextManager[None]]
"""Answers those who connect to a listening socket, which it closes, while it is entered."""
LOOPBACK_PORT: Final = 9339
"""Where a command finds what serves it from outside, on the loopback device of its own machine."""
WRITABLE: Final = ("app", "data", "home", "logs", "mnt", "opt", "root", "srv", "tmp", "var", "workspace")
"""Folders of the root that a machine may write to, and keeps."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_ETC_FILES = ("ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "services", "protocols")
_ETC_FOLDERS = ("alternatives", "ssl/certs")
REWARD_FILES: Final = ("reward.json", "reward.txt")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_POLL_S = 0.25
_READ_BYTES = 1 << 16
_CUT = b"\n[... %d bytes cut ...]\n"
AT_A_LIMIT: Final = 124
KILLED: Final = 128 + 9
LOG_FOLDERS: Final = ("verifier", "agent", "artifacts")
_SOCKET_BYTES = 212_992


@dataclass(frozen=True)
class MachineLimits:
    """The size of a machine."""

    memory_bytes: int = 1 << 30
    """Resident memory of all its processes together."""
    disk_bytes: int = 1 << 30
    processes: int = 256
    file_bytes: int = 1 << 29
    """The largest single file."""
    output_bytes: int = 32_000
    """Of a longer output the first and the last half of this are kept."""


@dataclass(frozen=True)
class SeparateTests:
    """A machine of their own for tests: it gets some files of the agent's machine, and nothing else of it."""

    artifacts: Sequence[str]
    """Absolute paths of these files and folders. Each takes the place of what the new machine has there; no link is
    followed, and none that leads out of them is copied."""
    limits: MachineLimits
    directory: str
    """Where the tests run."""
    given: Path | None = None
    """A folder of this host whose files are in ``directory`` first."""
    image: str = ""
    """Of a machine with an image."""
    cpus: float = 1.0
    network: Literal["none", "public"] = "none"


@dataclass(frozen=True)
class CommandEnd:
    """The end of one command."""

    ending: Ending
    exit_code: int
    """128 + the number of the signal that ended it; 124 at a limit."""
    output: str
    """Standard output and error, in the order of writing."""
    seconds: float


class UnusableMachineError(InfrastructureError):
    """A machine in which nothing can be started any more, by its agent's doing: it earns 0, and no error."""


class Machine:
    """One machine, in a folder that this object makes or takes over."""

    def __init__(self, folder: Path, limits: MachineLimits = MachineLimits(), *, readable: Sequence[Path] = ()) -> None:
        """Make the folder's parts. ``readable``: further folders of the host that its programs may read."""
        self.folder = folder = folder.resolve()
        self.limits = limits
        self.readable = [path.resolve() for path in readable if path.is_dir()]
        (folder / "root").mkdir(parents=True, exist_ok=True)
        for name in WRITABLE:
            self.own(folder / "files" / name)
        (folder / "files" / "tmp").chmod(0o1777)

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] = {},
        directory: str = "/app",
        mounts: Mapping[str, Path] = {},
        writable: Mapping[str, Path] = {},
        stdin: bytes = b"",
        serve: Serve | None = None,
    ) -> CommandEnd:
        """Run a command to its end or to a limit.

        Raises ``InfrastructureError`` where no machine can be built, ``DataError`` for a command that cannot be run.

        Args:
            environment: All of its variables beside PATH, HOME, LANG and TERM; nothing is inherited.
            directory: Where it runs; ``/`` if that is no folder of the machine.
            mounts: Folders of the host at further places of the root, read only.
            writable: Folders made by ``own`` in place of the root's own.
            serve: Answers the command at ``LOOPBACK_PORT`` of a loopback device that is this command's alone.
        """
        began_s = time.monotonic()
        for path in self.readable:
            self._make_place(path)
        if mounts and os.geteuid() == 0:
            mounts = await asyncio.to_thread(self._legible, mounts)
        port = 0 if serve is None else LOOPBACK_PORT
        task = self._task(command, environment, directory, [*self._mounts(mounts, writable)], port)
        async with started(task, stdin) as process, contextlib.AsyncExitStack() as serving:
            if serve is not None:
                await serving.enter_async_context(serve(await process.listening()))
            output = KeptOutput(self.limits.output_bytes)
            reading = asyncio.create_task(output.read(process))
            try:
                ending = await self._watch(process, began_s + timeout_s)
                await process.ended()
                await reading
            finally:
                await _cancelled(reading)
            code = await process.wait() if ending == "exited" else AT_A_LIMIT
        return CommandEnd(ending, code, output.text(), time.monotonic() - began_s)

    def _task(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str, mounts: list[Mount], port: int
    ) -> MachineCommand:
        links, etc, folders = _top_level()
        return MachineCommand(
            command=[*command],
            environment={"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "PATH": PATH, **environment},
            directory=directory,
            root=str(self.folder / "root"),
            mounts=mounts,
            folders=folders,
            links=links,
            files=etc,
            processes=self.limits.processes,
            file_bytes=self.limits.file_bytes,
            port=port,
        )

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.folder.name

    def upload(self, folder: Path, place: str) -> None:
        """Copy the files of a host's folder into a folder of a new machine; links stay links.

        Raises ``InfrastructureError`` for a place that the machine cannot write to. Only before an agent's first
        command: what an agent has put there may be a link.
        """
        parts = Path(place).parts[1:]
        if not parts or parts[0] not in WRITABLE or ".." in parts:
            raise InfrastructureError(f"{place} is no folder that a machine can write to: it has {', '.join(WRITABLE)}")
        target = self.folder / "files" / Path(*parts)
        target.mkdir(parents=True, exist_ok=True)
        copy(folder, target, "--no-preserve=ownership")
        _own_all(self.folder / "files" / parts[0])

    @contextlib.asynccontextmanager
    async def for_tests(self, tests: Path, separate: SeparateTests | None = None) -> AsyncIterator[MachineCopy]:
        """Yield a copy for tests: its files as the agent left them, ``tests`` as ``/tests``, and new ``/logs``.

        Tests run in a copy so that they can be repeated after a crash; separate ones in a new machine. Raises
        ``InfrastructureError``.
        """
        with _folder_beside(self.folder) as folder:
            yield await asyncio.to_thread(MachineCopy, self, folder, tests, separate)

    def copy_artifacts(self, target: Machine, artifacts: Sequence[str]) -> None:
        """Put files and folders in the place of what another machine has there; those that are missing stay out.

        Raises ``FilesTooLargeError``, and ``InfrastructureError``.
        """
        source, to = self.folder / "files", target.folder / "files"
        names = [path[1:] for path in artifacts if _is_reached_without_links(source, path[1:])]
        if not names:
            return
        remove(*(to / name for name in names))
        reading = [*_as_owner(), "tar", "-c", "-f", "-", "--hard-dereference", "-C", str(source), "--", *names]
        with (
            tempfile.TemporaryFile() as archive,
            subprocess.Popen(reading, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
        ):
            try:
                source_files = cast(IO[bytes], process.stdout)
                copy_files(source_files, archive, names, target.limits.disk_bytes, are_artifacts=True)
            finally:
                process.kill()
            archive.seek(0)
            unpack(archive, to)
        for top in {name.partition("/")[0] for name in names}:
            _own_all(to / top)

    def remove(self) -> None:
        """Remove the machine with all that it holds."""
        remove(self.folder)

    def disk_bytes(self) -> int:
        """Return the space that its files take; more than its limit if they cannot be counted."""
        return space_of(self.folder / "files", self.limits.disk_bytes)

    def _mounts(self, mounts: Mapping[str, Path], writable: Mapping[str, Path]) -> Iterator[Mount]:
        """Yield what the root is built of."""
        for program in _programs():
            yield Mount(program, program)
        for name in WRITABLE:
            yield Mount(str(self.folder / "files" / name), f"/{name}", writable=True)
        for readable in self.readable:
            yield Mount(str(readable), str(readable))
        for place, path in mounts.items():
            yield Mount(str(path), place)
        for place, path in writable.items():
            yield Mount(str(path), place, writable=True)
        for name in _DEVICES:
            yield Mount(f"/dev/{name}", f"/dev/{name}", device=True)

    def _legible(self, mounts: Mapping[str, Path]) -> dict[str, Path]:
        """Return folders of the host, and copies of those that only their owner may read (a ``umask`` of 077)."""
        found = dict(mounts)
        for number, (place, folder) in enumerate(mounts.items()):
            if not all(os.lstat(path).st_mode & stat.S_IROTH for path in (folder, *folder.rglob("*"))):
                found[place] = copied = self.folder / f"mounted-{number}"
                copied.mkdir(exist_ok=True)
                copy(folder, copied)
                _own_all(copied)
        return found

    def _make_place(self, path: Path) -> None:
        """Make the place of a readable folder, whatever an agent put there if it lies below a writable one."""
        place = self.folder / ("files" if path.parts[1] in WRITABLE else "root")
        for part in path.parts[1:]:
            place /= part
            if place.is_symlink() or not place.is_dir():
                place.unlink(missing_ok=True)
                place.mkdir()

    async def _watch(self, process: StartedCommand, until_s: float) -> Ending:
        """Wait for the end of the command; return the limit that it reached first."""
        waiting = asyncio.create_task(process.wait())
        looking: asyncio.Task[Ending | None] | None = None  # which takes long where there is much to count
        try:
            while True:
                left_s = max(until_s - time.monotonic(), 0.0)
                if looking is None:
                    await asyncio.wait([waiting], timeout=min(_POLL_S, left_s))
                else:
                    await asyncio.wait([waiting, looking], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    waiting.result()
                    used_bytes = await asyncio.to_thread(self.disk_bytes)
                    return "disk" if used_bytes > self.limits.disk_bytes else "exited"
                if not left_s:
                    return "timeout"
                if looking is None:
                    looking = asyncio.create_task(asyncio.to_thread(self._limit_reached, process.first_pid))
                elif looking.done():
                    if limit := looking.result():
                        return limit
                    looking = None
        finally:
            await _cancelled(waiting)
            if looking is not None:
                looking.cancel()

    def _limit_reached(self, pid: int) -> Ending | None:
        """Return the limit that the processes below this one are beyond."""
        resident, memory, disk = _held_bytes(pid, os.stat(self.folder).st_dev)
        if resident + memory > self.limits.memory_bytes:
            return "memory"
        return "disk" if disk + self.disk_bytes() > self.limits.disk_bytes else None

    @staticmethod
    def own(folder: Path) -> None:
        """Make a folder that the machine's user may write to."""
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)


class MachineCopy:
    """A copy of a machine, for tests alone."""

    changed_programs: Sequence[str] = ()
    """None: the programs of a machine are the host's, read only."""

    def __init__(self, machine: Machine, folder: Path, tests: Path, separate: SeparateTests | None = None) -> None:
        """Make the copy in a new folder. Raises ``InfrastructureError``."""
        target = folder / "machine"
        self._tests, self._logs = tests.resolve(), folder / "logs"
        self._left = machine.folder / "files" if separate is None else None
        if separate is None:
            (target / "files").mkdir(parents=True)
            copy(machine.folder / "files", target / "files")
            _remove_links(target / "files")
            self._machine = Machine(target, machine.limits, readable=machine.readable)
        else:
            self._machine = Machine(target, separate.limits)
            self._logs = target / "files" / "logs"
        for each in (self._logs, *(self._logs / name for name in LOG_FOLDERS)):
            machine.own(each)
        if separate is not None:
            self._fill(machine, separate)

    def _fill(self, machine: Machine, separate: SeparateTests) -> None:
        if separate.given is not None:
            self._machine.upload(separate.given, separate.directory)
        machine.copy_artifacts(self._machine, separate.artifacts)

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Run the tests, which find ``/tests`` read only."""
        return await self._machine.run(
            command,
            timeout_s=timeout_s,
            environment=environment,
            directory=directory,
            mounts={"/tests": self._tests},
            writable={"/logs": self._logs},
        )

    def may_block(self) -> bool:
        """Look through the files that the agent left."""
        found = {} if self._left is None else entries_below(self._left, *_as_owner())
        return any(kind == PIPE or (kind[0] == LINK and may_wait_at(path, kind[1:])) for path, kind in found.items())

    def reward_file(self, name: str) -> str | None:
        """Return the text of a regular file of ``/logs/verifier`` that is no link; None if there is none.

        Its folder may be a link as well. Raises ``DataError``.
        """
        try:
            folder = os.open(self._logs / "verifier", os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError as error:
            raise DataError(f"/logs/verifier is no folder ({error.strerror})") from error
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{name} is no file ({error.strerror})") from error
        finally:
            os.close(folder)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_REWARD_BYTES:
                raise DataError(f"{name} is no file of at most {LARGEST_REWARD_BYTES >> 20} MiB")
            return os.read(descriptor, LARGEST_REWARD_BYTES).decode(errors="replace").strip()
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _folder_beside(machine: Path) -> Iterator[Path]:
    """Yield a new folder beside the machine, and remove it; also those that a killed process left."""
    for left in machine.parent.glob(f".{machine.name}-verify-*"):
        remove(left)
    try:
        made = Path(tempfile.mkdtemp(dir=machine.parent, prefix=f".{machine.name}-verify-"))
    except OSError as error:
        raise InfrastructureError(f"the machine {machine.name} cannot be copied: {error}") from error
    try:
        yield made
    finally:
        remove(made)


@cache
def problem() -> str:
    """Return why this host cannot run machines, with the remedy; empty if it can."""
    with tempfile.TemporaryDirectory(prefix="plaudit-machine-") as folder:
        Path(folder).chmod(0o755)
        probe = Machine(Path(folder) / "probe")

        def tried() -> str:
            try:
                executed = asyncio.run(probe.run(["true"], timeout_s=30.0))
            except InfrastructureError as error:
                return str(error)
            return f"a first command failed: {executed.output.strip()[-300:]}" if executed.exit_code else ""

        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
            found = thread.submit(tried).result()
    if not found:
        return ""
    return (
        f"{found}. Machines need user namespaces (user.max_user_namespaces above 0, and no seccomp profile "
        "that forbids unshare and mount). Use another provider of sandboxes where they are not allowed"
    )


def require() -> None:
    """Raise ``ConfigurationError`` if this host cannot run machines."""
    if found := problem():
        raise ConfigurationError(found)


@cache
def _programs() -> list[str]:
    """Return what of the host every machine reads: programs, and the files and folders of ``/etc`` that they need."""
    tops = (Path("/usr"), *(path for name in _LINKS if not (path := Path("/", name)).is_symlink()))
    etc = (Path("/etc", name) for name in (*_ETC_FOLDERS, *_ETC_FILES))
    return [str(path) for path in (*tops, *etc) if path.exists()]


@cache
def _top_level() -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return what a machine's root holds beside mounts: links such as ``/bin``, files of ``/etc``, folders."""
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "fd/0", "dev/stdout": "fd/1", "dev/stderr": "fd/2"}
    links |= {name: os.readlink(path) for name in _LINKS if (path := Path("/", name)).is_symlink()}
    outside = f"nobody:x:{NOBODY}:{NOBODY}:nobody:/:/bin/false\n"
    etc = {
        "etc/passwd": f"root:x:0:0:root:/root:/bin/bash\n{outside}",
        "etc/group": f"root:x:0:\nnogroup:x:{NOBODY}:\n",
        "etc/hosts": "127.0.0.1 localhost\n",
        "etc/hostname": "sandbox\n",
    }
    return links, etc, ["etc", "proc", "run", "dev/shm", *WRITABLE]


class KeptOutput:
    """Keep the beginning and the end of a stream."""

    def __init__(self, most_bytes: int) -> None:
        self._half = most_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._num_cut = 0

    async def read(self, stream: asyncio.StreamReader | StartedCommand) -> None:
        """Read to the end, whatever its length."""
        while data := await stream.read(_READ_BYTES):
            self.add(data)

    def add(self, data: bytes) -> None:
        """Keep of these further bytes what there is room for."""
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if (more := len(self._tail) - self._half) > 0:
            self._num_cut += more
            del self._tail[:more]

    def text(self) -> str:
        """Return what was kept, with a line about what was cut."""
        cut = _CUT % self._num_cut if self._num_cut else b""
        return bytes(self._head + cut + self._tail).decode(errors="replace")


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for its end: two tasks must not wait for the same descriptor."""
    task.cancel()
    await asyncio.wait([task])


def _held_bytes(pid: int, disk: int) -> tuple[int, int, int]:
    """Return what all below a process hold: resident memory, memory without a mapping, files without a name.

    Files of the device ``disk`` that were removed take space until they are closed; all others that have no name
    (``memfd``) take memory. A socket counts with the buffer that the kernel gives it by default.
    """
    resident, pids = 0, _children(pid)
    held: dict[tuple[int, int], tuple[bool, int]] = {}
    while pids:
        each = pids.pop()
        with contextlib.suppress(OSError, IndexError):  # it has ended
            resident += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        pids += _children(each)
        for kind in ("fd", "map_files"):  # the second may be for root alone
            with contextlib.suppress(OSError):
                for name in os.listdir(f"/proc/{each}/{kind}"):
                    with contextlib.suppress(OSError):
                        found = os.stat(f"/proc/{each}/{kind}/{name}")
                        if stat.S_ISSOCK(found.st_mode):
                            held[found.st_dev, found.st_ino] = (False, _SOCKET_BYTES)
                        elif stat.S_ISREG(found.st_mode) and not found.st_nlink:
                            held[found.st_dev, found.st_ino] = (found.st_dev == disk, found.st_blocks * 512)
    on_disk = sum(size for is_on_disk, size in held.values() if is_on_disk)
    return resident, sum(size for _, size in held.values()) - on_disk, on_disk


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):  # it has ended
        tasks = [Path(f"/proc/{pid}/task/{task}/children") for task in os.listdir(f"/proc/{pid}/task")]
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def space_of(folder: Path, most: int, *, with_holes: bool = False) -> int:
    """Return the space of all files below a folder; stop counting above ``most``. Inodes count a page.

    ``with_holes``: as a copy takes it that does not keep them.

    A folder that cannot be read, such as one whose path is too long for the kernel, hides its size: more than ``most``.
    So are more than ``MOST_ENTRIES``, which would keep whoever counts or copies them.
    """
    total, number, folders = 0, 0, [folder]
    while folders and total <= most:
        try:
            entries = list(os.scandir(folders.pop()))
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError:
            return most + 1
        number += len(entries)
        if number > MOST_ENTRIES:
            return most + 1
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        raise
                    return most + 1
                total += max(found.st_blocks * 512, found.st_size if with_holes else 0, 4096)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(Path(entry.path))
    return total


def _own_all(top: Path) -> None:
    """Give a folder with all that it holds to the machines' user."""
    if os.geteuid() == 0:
        for above, folders, files in os.walk(top):
            for name in (*folders, *files):
                os.chown(os.path.join(above, name), NOBODY, NOBODY, follow_symlinks=False)
        os.chown(top, NOBODY, NOBODY)


def _is_reached_without_links(folder: Path, name: str) -> bool:
    """Tell whether a path below a folder exists, and no part of it is a link that an agent could have made."""
    try:
        return not any(stat.S_ISLNK(os.lstat(folder := folder / part).st_mode) for part in Path(name).parts)
    except OSError:
        return False


def _remove_links(files: Path) -> None:
    """Remove what ``deceiving_links`` finds, whatever the rights of the folders; raise ``InfrastructureError``."""
    if links := deceiving_links(entries_below(files, *_as_owner())):
        names = b"\0".join(map(os.fsencode, links))
        done = subprocess.run(
            [*_as_owner(), "xargs", "-0", "rm", "-f", "--"], cwd=files, input=names, capture_output=True
        )
        if done.returncode:
            why = done.stderr.decode(errors="replace")[-300:].strip()
            raise InfrastructureError(f"links of an agent cannot be removed: {why}")


def copy(folder: Path, target: Path, *options: str) -> None:
    """Copy a folder's content into another: no link is followed, holes stay holes, blocks are shared where they can.

    Raises ``InfrastructureError``.
    """
    command = ["cp", "-a", "--reflink=auto", *options, "--", f"{folder.resolve()}/.", "."]
    try:
        copying = subprocess.run([*_as_owner(), *command], cwd=target, capture_output=True)
    except OSError as error:
        raise InfrastructureError(f"{folder} cannot be copied: {error}") from error
    if copying.returncode:
        why = copying.stderr.decode(errors="replace")[-300:].strip()
        raise InfrastructureError(f"{folder} cannot be copied: {why}")


def remove(*folders: Path) -> None:
    """Remove folders, however deep and whatever their rights; those that are gone count as removed.

    It needs no namespace, which not every user may make. What is left all the same is logged.
    """
    problem = ""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        left = [str(folder) for folder in folders if os.path.lexists(folder)]
        if not left:
            return
        done = subprocess.run([*command, "--", *left], capture_output=True)
        problem = done.stderr.decode(errors="replace").strip()[-300:]
    if problem:
        logger.warning("a folder cannot be removed", error=problem)


def _as_owner() -> list[str]:
    """Return the command with which a user reads its own files whose rights forbid it."""
    return [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
