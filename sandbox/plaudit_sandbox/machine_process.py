"""Build the namespaces and the root of a machine for one command after another, and run the commands in them.

``machine_start`` starts it once for each process that uses machines. It stays small, so that forking it is cheap, and
never holds data of a command: it forks a child for each, which reads its ``MachineCommand`` from a file in memory. Four
processes take part in a command, and each ends with the one before it:

1. This process forks.
2. The *keeper* leaves the host's namespaces, and ends the command when the other side closes its connection.
3. The *first process* of the new namespaces builds the root and waits. When it ends, the kernel ends all others.
4. The *command* gives up every right, and is executed.

It needs no other program, and Linux 5.12. The numbers are from ``linux/sched.h``, ``mount.h`` and ``prctl.h``.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from plaudit_sandbox.privileges import (
    NOBODY,
    drop_capabilities,
    end_with,
    forbid_inspection,
    limit_for_good,
    no_new_privileges,
    prctl,
)

NUM_DESCRIPTORS: Final = 4
"""Of a command: its task, its input, its output, its connection."""
STARTED, BUILT, TOO_LARGE, FAILED, ENDED = b"s", b"b", b"l", b"f", b"e"
"""Begins each message of a command: the pid of its first process; its root is built; it is too large to be executed; it
cannot be started, with the reason; it has ended, with the exit code."""
_NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""Mounts, processes, network, System V objects, host name, cgroups."""
_NEW_USERS = 0x10000000
_BIND, _PRIVATE, _ALL_BELOW, _DETACHED = 1 << 12, 1 << 18, 1 << 14, 2
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _READ_ONLY, _HERE = 442, 1, -100
_END_WITH_PARENT, _DUMPABLE, _DROP_FROM_BOUNDING_SET = 1, 4, 24
_SET_FLAGS, _UP = 0x8914, 1
"""Of a network device, from ``linux/sockios.h`` and ``if.h``."""
_COUNTED_FOR_EACH_USER: Final = {
    "inotify_instances": 8,
    "inotify_watches": 8192,
    "fanotify_groups": 8,
    "fanotify_marks": 8192,
}
"""All machines are one user of the host's, so one of them must not take what there is."""
_OPEN_FILES = 4096
_NOT_FOUND, _NOT_EXECUTED = 127, 126
_libc = ctypes.CDLL(None, use_errno=True)


class Mount(NamedTuple):
    """A file or folder of the host at a place of the machine; no program of it gains rights."""

    source: str
    place: str
    writable: bool = False
    device: bool = False


class MachineCommand(NamedTuple):
    """One command."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    root: str
    """An empty folder of the host to build the root on; no mount's source is below it."""
    mounts: list[Mount]
    folders: list[str]
    links: dict[str, str]
    files: dict[str, str]
    """What the root holds beside mounts."""
    processes: int
    file_bytes: int
    port: int = 0
    """Where a socket listens on the machine's loopback device, which ``BUILT`` brings; 0: the device is off."""


def serve(connection: socket.socket) -> None:
    """Fork for each command, until the other side is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a command may send its first process what that handles
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors = _received(connection)
        if not data:
            return
        if len(descriptors) == NUM_DESCRIPTORS:
            parent, report = os.getpid(), descriptors[3]
            if os.fork() == 0:
                connection.close()
                _in_child(report, partial(_keep, descriptors, parent))
        for descriptor in descriptors:
            os.close(descriptor)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(NUM_DESCRIPTORS * descriptors.itemsize)
    data, ancillary, _, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _in_child(report: int, work: Callable[[], NoReturn]) -> NoReturn:
    """Do the work of a forked child; report an error of it, and never return into the parent's code."""
    try:
        work()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(report, FAILED + f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    finally:
        os._exit(1)


def _keep(descriptors: Sequence[int], parent: int) -> NoReturn:
    end_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(descriptors[0], "rb") as file:
        task = MachineCommand(*json.load(file))
    report = descriptors[3]
    is_root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    _call(_libc.unshare, _NEW_NAMESPACES | (0 if is_root else _NEW_USERS))
    if not is_root:
        _map_root(user, group)
    alive, ours = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(ours)
        _in_child(report, partial(_build_and_run, task, descriptors, alive, is_root=is_root))
    for descriptor in descriptors[1:3]:
        os.close(descriptor)
    os.write(report, STARTED + b"%d" % first)
    handle = os.pidfd_open(first)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(report, select.POLLRDHUP)
    if any(descriptor == report for descriptor, _ in poll.poll()):
        os.kill(first, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    with contextlib.suppress(OSError):
        os.write(report, ENDED + b"%d" % (code if code >= 0 else 128 - code))
    os._exit(0)


def _build_and_run(task: MachineCommand, descriptors: Sequence[int], alive: int, *, is_root: bool) -> NoReturn:
    """Be the first process: it reaps all others, until the command ends."""
    prctl(_END_WITH_PARENT, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # the keeper ended before the line above
        os._exit(1)
    _build(task)
    listening = [_listening(task.port)] if task.port else []
    command = os.fork()
    if command == 0:
        _in_child(descriptors[3], partial(_execute, task, descriptors, is_root=is_root))
    forbid_inspection()
    socket.send_fds(socket.socket(fileno=descriptors[3]), [BUILT], [each.fileno() for each in listening])
    os.closerange(0, _OPEN_FILES)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _build(task: MachineCommand) -> None:
    """Build the root from the task, and enter it."""
    os.umask(0o022)
    _mount(None, "/", None, _PRIVATE | _ALL_BELOW)
    _mount("root", task.root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=4m,nr_inodes=4000")
    os.chdir(task.root)
    for name in task.folders:
        os.makedirs(name, exist_ok=True)
    for name, text in task.files.items():
        _write(name, text)
    for name, target in task.links.items():
        os.symlink(target, name)
    for each in task.mounts:
        _bind(Mount(*each))
    _mount("shm", "dev/shm", "tmpfs", _NOSUID | _NODEV, "mode=1777,size=64m,nr_inodes=2000")
    _mount("run", "run", "tmpfs", _NOSUID | _NODEV, "mode=1777,size=16m,nr_inodes=2000")
    _mount("proc", "proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    # The new root on the old one at the same place, and the old one away.
    _call(_libc.syscall, _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call(_libc.umount2, b".", _DETACHED)
    _set("/", _READ_ONLY | _NOSUID | _NODEV)
    os.chdir("/")
    socket.sethostname("sandbox")
    # Shared memory and messages of System V stay without a process that holds them: 64 MiB and a few queues.
    for name, value in (("shmall", "16384"), ("msgmni", "64")):
        with contextlib.suppress(OSError):
            _write(f"/proc/sys/kernel/{name}", value)
    with contextlib.suppress(OSError, ValueError):
        os.chdir(task.directory)


def _listening(port: int) -> socket.socket:
    """Turn the loopback device of these namespaces on, and listen there."""
    with socket.socket() as device:
        fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
    return socket.create_server(("127.0.0.1", port))


def _bind(mount: Mount) -> None:
    place = mount.place.lstrip("/")
    if os.path.isdir(mount.source):
        with contextlib.suppress(FileExistsError):
            os.makedirs(place)
    else:
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT))
    _mount(mount.source, place, None, _BIND)
    if not mount.device:
        _set(place, _NOSUID | _NODEV | (0 if mount.writable else _READ_ONLY))


def _mount(source: str | None, place: str, kind: str | None, flags: int, options: str = "") -> None:
    values = [None if text is None else os.fsencode(text) for text in (source, place, kind)]
    _call(_libc.mount, *values, ctypes.c_ulong(flags), options.encode() or None, about=f"mounting {source} at {place}")


def _set(place: str, attributes: int) -> None:
    """Add attributes to a mount; those of its source stay."""
    given = struct.pack("=4Q", attributes, 0, 0, 0)
    _call(_libc.syscall, _MOUNT_SETATTR, _HERE, os.fsencode(place), 0, given, ctypes.c_size_t(len(given)), about=place)


def _call(function: Any, *arguments: Any, about: str = "") -> None:
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}{about and f' ({about})'}")


def _map_root(user: int, group: int) -> None:
    """Be user 0 of the new namespace, which is this user outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        _write(f"/proc/self/{name}", text)


def _execute(task: MachineCommand, descriptors: Sequence[int], *, is_root: bool) -> NoReturn:
    """Become the command, without a capability, and without a way to get one or to make a namespace."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # which this process ignores
        signal.signal(number, signal.SIG_DFL)
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        prctl(_DUMPABLE, 1)  # else its map of users would be root's; it holds nothing but the task
        _call(_libc.unshare, _NEW_USERS)
        _map_root(NOBODY, NOBODY)
    _write("/proc/sys/user/max_user_namespaces", "0")
    for name, value in _COUNTED_FOR_EACH_USER.items():
        with contextlib.suppress(OSError):  # this kernel has no such limit
            _write(f"/proc/sys/user/max_{name}", str(value))
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last_capability = int(file.read())
    for capability in range(last_capability + 1):
        prctl(_DROP_FROM_BOUNDING_SET, capability)
    drop_capabilities()
    no_new_privileges()
    _limit(task)
    _, stdin, stdout, report = descriptors
    report = os.dup(report)  # closed by exec, and above the three
    for place, descriptor in enumerate((stdin, stdout, stdout)):
        os.dup2(descriptor, place)
    os.closerange(3, report)
    os.closerange(report + 1, _OPEN_FILES)
    try:
        os.execvpe(task.command[0], task.command, task.environment)  # noqa: S606 (its words are the agent's own)
    except OSError as error:
        if error.errno == errno.E2BIG:
            os.write(report, TOO_LARGE)
        os.write(2, f"{task.command[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTED)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _limit(task: MachineCommand) -> None:
    for kind, value in (
        (resource.RLIMIT_NPROC, task.processes),
        (resource.RLIMIT_FSIZE, task.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        limit_for_good(kind, value)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
