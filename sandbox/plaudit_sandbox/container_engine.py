"""Call docker or podman by its command, and remove the containers that nobody holds any more."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Final

from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError

ENGINES: Final = ("podman", "docker")
LABEL: Final = "plaudit.dev/"
"""Begins the name of every label of ours."""
_OWNER = f"{LABEL}owner"
_ANSWER_S = 120.0
_LISTEN = (
    "import socket, sys; made = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "socket.send_fds(socket.socket(fileno=0), [b'l'], [made.fileno()])"
)
"""Run in a container's network: it opens a socket there and passes it on."""
_PULL_S = 3600.0
_LONGEST_ACCOUNTS = 1 << 20
_ACCOUNTS: Final = ("etc/passwd", "etc/group")
"""What an engine reads of a container itself, as it starts a program there. Agents may add accounts."""


class ContainerEngine:
    """One engine; every method blocks until it has answered, and raises ``InfrastructureError`` where it fails."""

    def __init__(self, program: str) -> None:
        """Use ``docker``, ``podman``, or a program with their options."""
        self.program = program

    def call(self, *arguments: str, stdin: IO[bytes] | None = None, timeout_s: float = _ANSWER_S) -> str:
        """Run a command of the engine and return what it printed."""
        try:
            done = subprocess.run(
                [self.program, *arguments],
                stdin=stdin or subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                cwd=client_folder(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InfrastructureError(f"{self.program} {arguments[0]}: {error}") from error
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()[-500:]
            raise InfrastructureError(f"{self.program} {arguments[0]} failed: {why or f'exit code {done.returncode}'}")
        return done.stdout.decode(errors="replace").strip()

    def has_image(self, image: str) -> bool:
        """Tell whether an image is here."""
        return self._has("image", image)

    def ensure_image(self, image: str) -> None:
        """Pull an image that is not here. One that was found by this process is not looked for again."""
        try:
            _image_settings(self.program, image)
        except InfrastructureError:
            self.call("pull", "--quiet", image, timeout_s=_PULL_S)

    def image_variables(self, image: str) -> dict[str, str]:
        """Return the variables that the image gives its programs."""
        variables = _image_settings(self.program, image).get("Env")
        return {name: value for name, _, value in (each.partition("=") for each in variables or ())}

    def image_workdir(self, image: str) -> str:
        """Return the folder in which the image's programs begin; empty if it names none."""
        return str(_image_settings(self.program, image).get("WorkingDir") or "")

    def image_accounts(self, image: str) -> list[str]:
        """Return the user of the image's programs, and the group where one is set; numbers or names."""
        return str(_image_settings(self.program, image).get("User") or "0").split(":")

    def remove(self, *containers: str) -> None:
        """Remove containers with their volumes, running or not; those that are gone count as removed."""
        for container in containers:
            if self.has_container(container):
                self.call("rm", "--force", "--volumes", container)

    def remove_images(self, *images: str) -> None:
        """Remove images; those that are gone count as removed."""
        for image in images:
            if self.has_image(image):
                self.call("image", "rm", "--force", image)

    def remove_of(self, run: str) -> list[str]:
        """Remove the containers and copies that the label ``run`` names; return the containers' ids."""
        containers = self._listed("ps", "--all", label=f"{LABEL}run={run}")
        self.remove(*containers)
        self.remove_images(*self._listed("images", label=f"{LABEL}run={run}"))
        return containers

    def remove_orphans(self) -> list[str]:
        """Remove what belongs to processes of this host that have ended, or to folders that are gone.

        Returns the containers' ids.
        """
        removed = []
        label = f'{{{{index .Config.Labels "{_OWNER}"}}}}'
        for kind, listing in (("container", ("ps", "--all")), ("image", ("images",))):
            for each in self._listed(*listing, label=_OWNER):
                try:
                    owner = self.call(kind, "inspect", "--format", label, each)
                except InfrastructureError:  # somebody else removed it
                    continue
                if _is_gone(owner):
                    self.remove(each) if kind == "container" else self.remove_images(each)
                    removed += [each] if kind == "container" else []
        return removed

    def _listed(self, *listing: str, label: str) -> list[str]:
        """Return the ids of what has a label of ours, and of nothing else."""
        return self.call(*listing, "--quiet", "--no-trunc", "--filter", f"label={label}").split()

    def has_container(self, container: str) -> bool:
        """Tell whether a container exists, running or not."""
        return self._has("container", container)

    def _has(self, kind: str, name: str) -> bool:
        try:
            self.call(kind, "inspect", "--format", "{{.Id}}", name)
        except InfrastructureError:
            return False
        return True


def require_loopback(engine: ContainerEngine) -> None:
    """Raise ``ConfigurationError`` where this user cannot enter the network of an engine's containers."""
    if os.geteuid() != 0 and Path(engine.program).name == "docker":
        raise ConfigurationError(
            "programs in containers of docker are served by root alone: run as root, or install podman"
        )


def listening_in(engine: ContainerEngine, container: str, port: int) -> socket.socket:
    """Return a socket that listens on the loopback device of a running container, of whatever image.

    Raises ``InfrastructureError``.
    """
    (pid,) = inspected(engine, container, [".State.Pid"])
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-I", "-S", "-c", _LISTEN, str(port)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # A rootless engine's containers belong to a namespace of users, which it enters.
        command = enter if os.geteuid() == 0 else [engine.program, "unshare", *enter]
        try:
            done = subprocess.run(command, stdin=theirs.fileno(), capture_output=True, timeout=_ANSWER_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InfrastructureError(f"the network of {container} cannot be entered: {error}") from error
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()[-300:]
            raise InfrastructureError(f"the network of {container} cannot be entered: {why}")
        _, sockets, *_ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        return socket.socket(fileno=sockets[0])


@lru_cache(maxsize=1024)
def _image_settings(program: str, image: str) -> dict[str, Any]:
    """Return what an image says of its programs; each call of an engine costs 60 ms of CPU."""
    found = json.loads(ContainerEngine(program).call("image", "inspect", "--format", "{{json .Config}}", image))
    return found if isinstance(found, dict) else {}


def client_folder() -> str:
    """Return where clients run: podman leaves a file ``oom`` in its folder when memory ran out."""
    return tempfile.gettempdir()


@cache
def find_engine() -> ContainerEngine:
    """Return the first engine that answers; raise ``ConfigurationError`` with each one's problem if none does."""
    problems = []
    for program in ENGINES:
        if not shutil.which(program):
            problems.append(f"{program} is not installed")
            continue
        engine = ContainerEngine(program)
        try:
            engine.call("info")
        except InfrastructureError as error:
            problems.append(str(error))
        else:
            return engine
    raise ConfigurationError(f"no container engine can be used: {'; '.join(problems)}. Install podman or docker")


def label_options(labels: Mapping[str, str], holder: Path | None = None) -> list[str]:
    """Return the options that label a container as ours, as this process's or a folder's, and with further labels."""
    owner = _owner() if holder is None else f"{_processes()}.{holder.absolute()}"
    named = {_OWNER: owner, **{f"{LABEL}{name}": value for name, value in labels.items()}}
    return [word for name, value in named.items() for word in ("--label", f"{name}={value}")]


def write_variables(variables: Mapping[str, str]) -> IO[str]:
    """Write variables to a file that ``--env-file`` reads and nobody else can; raise ``DataError`` for a line break.

    On a command line every user of the host could read them.
    """
    for name, value in variables.items():
        if "\n" in name + value or "\r" in name + value or "\0" in name + value or name.startswith("#"):
            raise DataError(f"the variable {name!r} holds a line break or a NUL, which a container cannot be given")
    file = tempfile.NamedTemporaryFile("w", prefix="plaudit-variables-")  # noqa: SIM115 (the caller closes it)
    file.writelines(f"{name}={value}\n" for name, value in variables.items())
    file.flush()
    return file


def _owner() -> str:
    """Return this process's name among all that ever ran on this host."""
    return ".".join((_processes(), str(os.getpid()), _started(os.getpid())))


def _processes() -> str:
    """Return the name of this boot and of this namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _is_gone(owner: str) -> bool:
    """Tell whether the process or the folder of a label was of this host and is gone."""
    place, _, rest = owner.partition(f"{_processes()}.")
    if not place and rest.startswith("/"):
        return not Path(rest).is_dir()
    pid, _, started = rest.partition(".")
    return not place and pid.isdigit() and _started(int(pid)) != started


def inspected(engine: ContainerEngine, container: str, fields: Sequence[str], *options: str) -> list[str]:
    """Return fields of a container's description."""
    form = "|".join(f"{{{{{field}}}}}" for field in fields)
    return engine.call("container", "inspect", *options, "--format", form, container).split("|")


def upper_folder(drivers: str) -> Path | None:
    """Return the folder of this host that holds what was written to a container; None if it is out of reach."""
    upper = ((json.loads(drivers) or {}).get("Data") or {}).get("UpperDir")
    return Path(upper) if upper and os.access(upper, os.R_OK | os.X_OK) else None


def lost_accounts(drivers: str, accounts: Sequence[str]) -> list[str]:
    """Return which list of accounts is no file any more, or lacks one of these; none where they are out of reach.

    An agent that is root can bring this about, and then no engine can start a program there: podman waits at a pipe
    for ever, with a lock that all other containers need. So no engine is asked.
    """
    if (upper := upper_folder(drivers)) is None:
        return []
    needed = zip_longest(_ACCOUNTS, accounts, fillvalue="0")
    return [f"/{name} (accounts that the engine reads)" for name, account in needed if _is_lost(upper / name, account)]


def _is_lost(path: Path, account: str) -> bool:
    try:
        mode = stat.S_IFLNK if path.parent.is_symlink() else os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            return not stat.S_ISCHR(mode) or not account.isdigit()  # overlayfs marks a removed file as a device
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as file:
            text = file.read(_LONGEST_ACCOUNTS + 1)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # unchanged; or the engine alone may read it
        return False
    except OSError:
        return True
    is_named = account.isdigit() or any(line.startswith(f"{account}:") for line in text.split("\n"))
    return len(text) > _LONGEST_ACCOUNTS or not is_named
