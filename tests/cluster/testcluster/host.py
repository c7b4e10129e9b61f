"""One cluster's footprint on the machine: a folder and a cgroup.

Every process of a cluster lives below its cgroup; networks and mounts are nameless and end with the processes in
them. So removal needs no notes of a previous run, and a run that crashed is removed like any other.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
GOGC = "300"
"""Heaps of small clusters are small: by default their components collect garbage for a tenth of their time and more."""


class FailureError(Exception):
    """Something a person has to know; its text is the whole message."""


def run(*argv: str | Path, text: str | None = None) -> str:
    """Runs a program to its end and returns what it printed."""
    done = subprocess.run([str(word) for word in argv], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailureError(f"{shlex.join(done.args)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def wait(what: str, ready: Callable[[], bool], seconds: float = 90) -> None:
    """Returns once `ready` says so."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise FailureError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets commands that change a folder take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Host:
    """The machine as one cluster uses it. A component is "PLACE/PROGRAM", such as "hub/etcd" or "node1/kubelet"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.cgroup = "plaudit-" + hashlib.sha256(str(self.folder).encode()).hexdigest()[:6]

    def log(self, component: str) -> Path:
        """Where a component's output goes."""
        return self.folder / "logs" / f"{component}.log"

    def pid(self, component: str) -> int | None:
        """A component's process, unless it has ended."""
        with contextlib.suppress(OSError):
            pid, birth = (self.folder / "pids" / component).read_text().split()
            return int(pid) if _birth(int(pid)) == birth else None
        return None

    def joining(self, place: str) -> list[str]:
        """What goes before a command that shall end when its place is removed."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{CGROUPS}/pids/{self.cgroup}/{place}/cgroup.procs"]

    def start(self, component: str, *argv: str | Path, pass_fds: tuple[int, ...] = ()) -> None:
        """Starts a component and leaves it running."""
        place, record = component.partition("/")[0], self.folder / "pids" / component
        _make_cgroups(f"{self.cgroup}/{place}")
        for path in (record, self.log(component)):
            path.parent.mkdir(parents=True, exist_ok=True)
        with self.log(component).open("ab") as log:
            process = subprocess.Popen(
                [*self.joining(place), *map(str, argv)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=pass_fds,
                env={**os.environ, "GOGC": GOGC},
            )  # fmt: skip
        record.write_text(f"{process.pid} {_birth(process.pid)}")
        process.returncode = 0  # it shall outlive this command, which therefore does not wait for it

    def expect_running(self, *components: str) -> None:
        """Fails with the last words of a component that has ended."""
        for component in components:
            if not self.pid(component):
                last = self.log(component).read_text(errors="replace").splitlines()[-5:]
                raise FailureError("\n".join([f"{component} ended; its last words:", *last]))

    def remove(self, place: str) -> None:
        """Ends every process of a place as a power cut would; "." is all places."""
        cgroup = str(Path(self.cgroup, place))
        if f":/{cgroup}" in Path("/proc/self/cgroup").read_text():
            raise FailureError("that would end this command too: leave `cluster exec-net` first")
        wait(f"the end of all processes of {cgroup}", lambda: not _kill(cgroup), 30)
        wait(f"the end of all cgroups of {cgroup}", lambda: _remove_cgroups(cgroup), 30)

    def remove_all(self) -> None:
        """Removes the cluster, except for its logs."""
        self.remove(".")
        run("rm", "-rf", *(path for path in self.folder.iterdir() if path.name not in ("logs", "lock")))


def _birth(pid: int) -> str | None:
    """When a process began; None once it has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else stat[19]


def _make_cgroups(cgroup: str) -> None:
    """Makes a cgroup in every hierarchy, with all the processors and memory there are."""
    for hierarchy in CGROUPS.iterdir():
        (hierarchy / cgroup).mkdir(parents=True, exist_ok=True)
    for level in (Path(cgroup).parent, Path(cgroup)):
        for setting in ("cpuset.cpus", "cpuset.mems"):
            (CGROUPS / "cpuset" / level / setting).write_text((CGROUPS / "cpuset" / setting).read_text())


def _kill(cgroup: str) -> bool:
    """Kills all processes in a cgroup; whether there was any."""
    found = False
    for folder, _, _ in os.walk(CGROUPS / "pids" / cgroup):  # unlike glob, past those that vanish meanwhile
        with contextlib.suppress(OSError):
            for pid in Path(folder, "cgroup.procs").read_text().split():
                found = True
                os.kill(int(pid), signal.SIGKILL)
    return found


def _remove_cgroups(cgroup: str) -> bool:
    """Whether none is left: the kernel may need a moment after the last process."""
    roots = [hierarchy / cgroup for hierarchy in CGROUPS.iterdir() if (hierarchy / cgroup).is_dir()]
    for folder in (folder for root in roots for folder, _, _ in os.walk(root, topdown=False)):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not any(root.is_dir() for root in roots)
