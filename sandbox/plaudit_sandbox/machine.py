"""Run commands of an agent in a machine of its own: a folder as its disk, Linux namespaces around each command.

A machine is a folder; it needs no server, no root and no image, and any process that sees the folder can go on with it.
Its programs are the host's, read only (``/usr``); what it writes lies below ``files/``, one folder for each writable
folder of its root. Each command runs in namespaces of its own, built anew from the folder by ``util-linux``'s
``unshare``, ``mount`` and ``pivot_root``, and nothing of it outlives its end:

- processes: a PID namespace, whose first process is ours. When it ends the kernel kills all others, daemons too.
- files: a root of its own. The top level, ``/usr`` and ``/etc`` are read only, so that no program, library or
  ``ld.so.preload`` can be replaced; ``/dev`` has five devices; nothing else of the host is there, and no other machine.
- network: none, not even the loopback device of the host.
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
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal

from plaudit_sandbox.lifetime import end_with
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError

Ending = Literal["exited", "timeout", "memory", "disk"]
"""``exited``: by itself. All others: it was stopped at a limit, by its own doing."""
WRITABLE: Final = ("app", "data", "home", "logs", "mnt", "opt", "root", "srv", "tmp", "var", "workspace")
"""Folders of the root that a machine may write to, and keeps."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_ETC_FILES = ("ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "services", "protocols")
_ETC_FOLDERS = ("alternatives", "ssl/certs")
REWARD_FILES: Final = ("reward.json", "reward.txt")
LARGEST_REWARD_BYTES: Final = 1 << 20
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NOBODY: Final = 65534
_POLL_S = 0.25
_READ_BYTES = 1 << 16
_CUT = b"\n[... %d bytes cut ...]\n"
_IN_TABLES = {"\\": r"\134", " ": r"\040", "\t": r"\011", "\n": r"\012"}
_SOCKET_BYTES = 212_992
_BUILT = b"built"
_STATUS = 3
_SETUP = Path(__file__).with_name("machine.sh")


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
class CommandEnd:
    """The end of one command."""

    ending: Ending
    exit_code: int
    """128 + the number of the signal that ended it; 124 at a limit."""
    output: str
    """Standard output and error, in the order of writing."""
    seconds: float


class Machine:
    """One machine, in a folder that this object makes or takes over."""

    def __init__(self, folder: Path, limits: MachineLimits = MachineLimits(), *, readable: Sequence[Path] = ()) -> None:
        """Make the folder's parts. ``readable``: further folders of the host that its programs may read."""
        self.folder = folder = folder.resolve()
        self.limits = limits
        self._readable = [path.resolve() for path in readable if path.is_dir()]
        for name in WRITABLE:
            self.own(folder / "files" / name)
        (folder / "files" / "tmp").chmod(0o1777)
        _write_etc(folder / "etc")
        _write_root(folder / "root")

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
    ) -> CommandEnd:
        """Run a command to its end or to a limit.

        Raises ``InfrastructureError`` where no machine can be built, ``DataError`` for a command that cannot be run.

        Args:
            environment: All of its variables beside PATH, HOME, LANG and TERM; nothing is inherited.
            directory: Where it runs; ``/`` if that is no folder of the machine.
            mounts: Folders of the host at further places of the root, read only.
            writable: Folders made by ``own`` in place of the root's own.
        """
        began_s = time.monotonic()
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            table = [*self._mounts(mounts, writable)]
            async with self._started(command, environment, directory, table, given.fileno()) as (process, status):
                assert process.stdout is not None
                output = KeptOutput(self.limits.output_bytes)
                reading = asyncio.create_task(output.read(process.stdout))
                ending = await self._watch(process, began_s + timeout_s)
                _kill(process)
                code = await process.wait()
                await reading
                built = os.read(status, len(_BUILT)) == _BUILT
        if not built and ending == "exited":
            raise InfrastructureError(f"the machine {self.folder.name} cannot be built: {output.text().strip()[-500:]}")
        code = 124 if ending != "exited" else code if code >= 0 else 128 - code
        return CommandEnd(ending, code, output.text(), time.monotonic() - began_s)

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.folder.name

    def at(self, folder: Path) -> Machine:
        """Return a machine of the same size in another folder, such as a copy."""
        return Machine(folder, self.limits, readable=self._readable)

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
        if os.geteuid() == 0:
            top = str(self.folder / "files" / parts[0])
            subprocess.run(["chown", "-hR", f"{_NOBODY}:{_NOBODY}", top], capture_output=True)

    @contextlib.asynccontextmanager
    async def for_tests(self, tests: Path) -> AsyncIterator[MachineCopy]:
        """Yield a copy for tests: its files as the agent left them, ``tests`` as ``/tests``, and new ``/logs``.

        Tests run in a copy so that they can be repeated after a crash. Raises ``InfrastructureError``.
        """
        with _folder_beside(self.folder) as folder:
            yield await asyncio.to_thread(MachineCopy, self, folder, tests)

    def remove(self) -> None:
        """Remove the machine with all that it holds."""
        remove(self.folder)

    def disk_bytes(self) -> int:
        """Return the space that its files take; more than its limit if they cannot be counted."""
        return space_of(self.folder / "files", self.limits.disk_bytes)

    @contextlib.asynccontextmanager
    async def _started(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        mounts: Sequence[str],
        stdin: int,
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
        for path in self._readable:
            self._make_place(path)
        variables = {"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "PATH": PATH, **environment}
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix="mounts-") as table:
            table.writelines(mounts)
            table.flush()
            settings = {
                "PATH": PATH,
                "ROOT": str(self.folder / "root"),
                "MOUNTS": table.name,
                "OUTSIDE": str(_NOBODY) if os.geteuid() == 0 else "",
                "PROCESSES": str(self.limits.processes),
                "FILE_BYTES": str(self.limits.file_bytes),
                "DIRECTORY": directory,
            }
            async with _process(
                [*(f"{name}={value}" for name, value in variables.items()), *command], settings, stdin
            ) as each:
                yield each

    def _mounts(self, mounts: Mapping[str, Path], writable: Mapping[str, Path]) -> Iterator[str]:
        """Yield the lines of an fstab that builds the root from the folder."""
        root = self.folder / "root"
        yield _line(root, root, "bind,ro,nosuid,nodev")
        for path in (Path("/usr"), *(Path("/", name) for name in _LINKS if not Path("/", name).is_symlink())):
            if path.is_dir():
                yield _line(path, root / path.name, "bind,ro,nosuid,nodev")
        yield _line(self.folder / "etc", root / "etc", "bind,ro,nosuid,nodev")
        for name in _ETC_FOLDERS:
            if (path := Path("/etc", name)).is_dir():
                yield _line(path, root / "etc" / name, "bind,ro,nosuid,nodev")
        for name in WRITABLE:
            yield _line(self.folder / "files" / name, root / name, "bind,nosuid,nodev")
        for path in self._readable:
            yield _line(path, root / path.relative_to("/"), "bind,ro,nosuid,nodev")
        for places, options in ((mounts, "bind,ro,nosuid,nodev"), (writable, "bind,nosuid,nodev")):
            for place, path in places.items():
                (root / place.strip("/")).mkdir(exist_ok=True)
                yield _line(path, root / place.strip("/"), options)
        for name in _DEVICES:
            yield _line(Path("/dev", name), root / "dev" / name, "bind")
        yield _line(Path("shm"), root / "dev/shm", "mode=1777,nosuid,nodev,size=64m,nr_inodes=2000", kind="tmpfs")
        yield _line(Path("run"), root / "run", "mode=1777,nosuid,nodev,size=16m,nr_inodes=2000", kind="tmpfs")
        yield _line(Path("proc"), root / "proc", "nosuid,nodev,noexec", kind="proc")

    def _make_place(self, path: Path) -> None:
        """Make the place of a readable folder, whatever an agent put there if it lies below a writable one."""
        place = self.folder / ("files" if path.parts[1] in WRITABLE else "root")
        for part in path.parts[1:]:
            place /= part
            if place.is_symlink() or not place.is_dir():
                place.unlink(missing_ok=True)
                place.mkdir()

    async def _watch(self, process: asyncio.subprocess.Process, until_s: float) -> Ending:
        """Wait for the end of the command; return the limit that it reached first."""
        waiting = asyncio.create_task(process.wait())
        try:
            while True:
                left_s = until_s - time.monotonic()
                done, _ = await asyncio.wait([waiting], timeout=min(_POLL_S, max(left_s, 0.0)))
                if done:
                    return "disk" if self.disk_bytes() > self.limits.disk_bytes else "exited"
                if left_s <= 0:
                    return "timeout"
                if limit := await asyncio.to_thread(self._limit_reached, process.pid):
                    return limit
        finally:
            waiting.cancel()

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
            os.chown(folder, _NOBODY, _NOBODY)


class MachineCopy:
    """A copy of a machine, for tests alone."""

    def __init__(self, machine: Machine, folder: Path, tests: Path) -> None:
        """Make the copy in a new folder. Raises ``InfrastructureError``."""
        target = folder / "machine"
        (target / "files").mkdir(parents=True)
        copy(machine.folder / "files", target / "files")
        self._machine = machine.at(target)
        self._tests, self._logs = folder / "tests", folder / "logs"
        self._tests.mkdir()
        copy(tests, self._tests, "--no-preserve=ownership")
        for each in (self._logs, *(self._logs / name for name in ("verifier", "agent", "artifacts"))):
            machine.own(each)

    @property
    def changed_programs(self) -> Sequence[str]:
        """Return none: the programs of a machine are the host's, read only."""
        return ()

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
    missing = [
        name for name in ("unshare", "setpriv", "prlimit", "mount", "pivot_root") if not shutil.which(name, path=PATH)
    ]
    if missing:
        return f"{', '.join(missing)} of util-linux is missing: install the package util-linux"

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


@contextlib.asynccontextmanager
async def _process(
    command: Sequence[str], settings: Mapping[str, str], stdin: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Start a command in new namespaces. Yield its process, and a descriptor that tells whether its root was built."""
    status, told = os.pipe()
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *_unshare(),
                *("/bin/sh", str(_SETUP)),
                *command,
                env=dict(settings),
                cwd="/",
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[_STATUS],
                start_new_session=True,
                preexec_fn=partial(_begin, os.getpid(), told),
            )
        except (OSError, ValueError) as error:
            raise start_error(error) from error
        finally:
            os.close(told)
        try:
            yield process, status
        finally:
            _kill(process)
            await process.wait()
    finally:
        os.close(status)


def start_error(error: OSError | ValueError) -> DataError | InfrastructureError:
    """Return what it means that a command could not be started: its own fault, or this host's."""
    if isinstance(error, ValueError) or error.errno == errno.E2BIG:
        return DataError(
            "the command, its folder or its variables hold a NUL or a word above 128 KiB: put it into a file"
        )
    return InfrastructureError(f"no process can be started: {error}")


def _begin(parent: int, told: int) -> None:
    """Tie the child to its parent, and give it the descriptor for its report."""
    end_with(parent)
    os.dup2(told, _STATUS)


def _unshare() -> list[str]:
    """Return the command that makes the namespaces. A user without rights needs one of users first."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    kinds = ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"]
    return ["unshare", *user, *kinds, "--fork", "--kill-child=KILL"]


def _line(source: Path, place: Path, options: str, kind: str = "none") -> str:
    """Return a line of an fstab."""
    fields = (str(source), str(place), kind, options, "0", "0")
    return " ".join("".join(_IN_TABLES.get(each, each) for each in field) for field in fields) + "\n"


def _write_root(folder: Path) -> None:
    """Write the top level of the machine's root: places to mount on, and the host's links such as ``/bin``."""
    for name in ("usr", "etc", "proc", "run", "old", "dev", "dev/shm", *WRITABLE):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in _DEVICES:
        (folder / "dev" / name).touch()
    links = {"dev/fd": "/proc/self/fd", "dev/stdin": "fd/0", "dev/stdout": "fd/1", "dev/stderr": "fd/2"}
    for name in _LINKS:
        path = Path("/", name)
        if path.is_symlink():
            links[name] = os.readlink(path)
        elif path.is_dir():
            (folder / name).mkdir(exist_ok=True)
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(target)


def _write_etc(folder: Path) -> None:
    """Write the machine's ``/etc``: the host's files that programs need, and users of its own."""
    if folder.is_dir():
        return
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="etc-"))
    for name in _ETC_FOLDERS:
        (made / name).mkdir(parents=True)
    for name in _ETC_FILES:
        if (source := Path("/etc", name)).is_file():
            shutil.copyfile(source, made / name)
    outside = f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:/:/bin/false\n"
    (made / "passwd").write_text(f"root:x:0:0:root:/root:/bin/bash\n{outside}")
    (made / "group").write_text(f"root:x:0:\nnogroup:x:{_NOBODY}:\n")
    (made / "hosts").write_text("127.0.0.1 localhost\n")
    (made / "hostname").write_text("sandbox\n")
    made.chmod(0o755)
    with contextlib.suppress(OSError):  # another process was faster
        made.rename(folder)


class KeptOutput:
    """Keep the beginning and the end of a stream."""

    def __init__(self, most_bytes: int) -> None:
        self._half = most_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._num_cut = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
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


def _kill(process: asyncio.subprocess.Process) -> None:
    """End the namespaces: their first process is in this group, and the kernel ends all others with it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _held_bytes(pid: int, disk: int) -> tuple[int, int, int]:
    """Return what a process and all below it hold: resident memory, memory without a mapping, files without a name.

    Files of the device ``disk`` that were removed take space until they are closed; all others that have no name
    (``memfd``) take memory. A socket counts with the buffer that the kernel gives it by default.
    """
    resident, pids = 0, [pid]
    held: dict[tuple[int, int], tuple[bool, int]] = {}
    while pids:
        each = pids.pop()
        with contextlib.suppress(OSError, IndexError):  # it has ended
            resident += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for task in os.listdir(f"/proc/{each}/task"):
                pids += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
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


def space_of(folder: Path, most: int) -> int:
    """Return the space of all files below a folder; stop counting above ``most``. Inodes count a page.

    A folder that cannot be read, such as one whose path is too long for the kernel, hides its size: more than ``most``.
    """
    total, folders = 0, [folder]
    while folders and total <= most:
        try:
            entries = list(os.scandir(folders.pop()))
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError:
            return most + 1
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        raise
                    return most + 1
                total += max(found.st_blocks * 512, 4096)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(Path(entry.path))
    return total


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


def remove(folder: Path) -> None:
    """Remove a folder, however deep; nothing happens if there is none."""
    subprocess.run([*_as_owner(), "rm", "-rf", "--", str(folder)], capture_output=True)


def _as_owner() -> list[str]:
    """Return the command with which a user reads and removes its own files whose rights forbid it."""
    return [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
