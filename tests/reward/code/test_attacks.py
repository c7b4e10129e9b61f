"""Programs that attack: what they try is refused, it costs their own sample, and the next sample is scored right."""

from __future__ import annotations

import platform
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from conftest import Worker

PRELUDE = '''
import ctypes, os, signal, socket, subprocess, sys
WORKER, PORT, ADDRESS, FILE = input().split()
WORKER, PORT, ADDRESS = int(WORKER), int(PORT), int(ADDRESS)
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    """A system call past Python and the C library; raises when it fails."""
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def attempt(name, action):
    try:
        result = action()
    except Exception as error:
        print(f"{name}: refused")
    else:
        print(f"{name}: DONE {result!r}"[:200])
'''

PROCESSES = """
attempt("fork", os.fork)
attempt("forkpty", os.forkpty)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("posix_spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("subprocess", lambda: subprocess.run(["/bin/true"]))
attempt("system", lambda: 1 / 0 if os.system("true") != 0 else "ran")
attempt("raw fork", lambda: call(57))
attempt("raw vfork", lambda: call(58))
attempt("raw clone", lambda: call(56, 17, 0, 0, 0, 0))
attempt("clone with a namespace", lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0))
attempt("clone3", lambda: call(435, ctypes.create_string_buffer(64), 64))
attempt("execveat", lambda: call(322, -100, b"/bin/true", 0, 0, 0))
"""

FORK_BOMB = """
while True:
    try:
        os.fork()
    except OSError:
        print("fork: refused")
        break
"""

SIGNALS = """
attempt("kill the worker", lambda: os.kill(WORKER, signal.SIGKILL))
attempt("probe the worker", lambda: os.kill(WORKER, 0))
attempt("kill the parent", lambda: os.kill(os.getppid(), signal.SIGKILL))
attempt("stop the parent", lambda: os.kill(os.getppid(), signal.SIGSTOP))
attempt("kill all", lambda: os.kill(-1, signal.SIGKILL))
attempt("kill the group", lambda: os.kill(0, signal.SIGKILL))
attempt("killpg of the worker", lambda: os.killpg(os.getpgid(WORKER), signal.SIGKILL))
attempt("kill itself", lambda: os.kill(os.getpid(), signal.SIGKILL))
attempt("queue to the worker", lambda: call(129, WORKER, 9, ctypes.create_string_buffer(128)))
attempt("tkill", lambda: call(200, WORKER, 9))
attempt("tgkill", lambda: call(234, WORKER, WORKER, 9))
attempt("pidfd_open", lambda: os.pidfd_open(WORKER))
attempt("own a pipe for the worker", lambda: __import__("fcntl").fcntl(1, 8, WORKER))
"""

TRACING = """
attempt("ptrace attach", lambda: call(101, 16, WORKER, 0, 0))
attempt("ptrace seize", lambda: call(101, 0x4206, os.getppid(), 0, 0))
attempt("traceme", lambda: call(101, 0, 0, 0, 0))
remote = (ctypes.c_long * 2)(ADDRESS, 64)
buffer = ctypes.create_string_buffer(64)
local = (ctypes.c_long * 2)(ctypes.addressof(buffer), 64)
attempt("process_vm_readv", lambda: (call(310, WORKER, local, 1, remote, 1, 0), buffer.raw))
attempt("process_vm_writev", lambda: call(311, WORKER, local, 1, remote, 1, 0))
attempt("memory of the worker", lambda: os.pread(os.open(f"/proc/{WORKER}/mem", os.O_RDONLY), 64, ADDRESS))
attempt("environment of the worker", lambda: open(f"/proc/{WORKER}/environ").read())
attempt("environment of the parent", lambda: open(f"/proc/{os.getppid()}/environ").read())
attempt("command line of the worker", lambda: open(f"/proc/{WORKER}/cmdline").read())
attempt("maps of the worker", lambda: open(f"/proc/{WORKER}/maps").read())
attempt("files of the worker", lambda: os.listdir(f"/proc/{WORKER}/fd"))
attempt("folder of the worker", lambda: os.readlink(f"/proc/{WORKER}/cwd"))
attempt("own environment", lambda: open("/proc/self/environ").read())
attempt("environment variables", lambda: 1 / 0 if not os.environ else dict(os.environ))
attempt("limits of the worker", lambda: call(302, WORKER, 7, ctypes.create_string_buffer(16), 0))
attempt("CPUs of the worker", lambda: os.sched_setaffinity(WORKER, {0}))
attempt("priority of the worker", lambda: os.setpriority(os.PRIO_PROCESS, WORKER, 19))
"""

FILES = """
attempt("passwd", lambda: open("/etc/passwd").read())
attempt("a readable file", lambda: open(FILE).read())
attempt("a file through the root of the process", lambda: open("/proc/self/root" + FILE).read())
attempt("a file beside a module", lambda: open(os.path.dirname(os.__file__) + "/../../../.." + FILE).read())
attempt("a handle to a folder", lambda: open(os.open("/", os.O_PATH)).read())
folder = os.open("/", os.O_PATH)
attempt("a file under a handle", lambda: os.open(FILE.lstrip("/"), os.O_RDONLY, dir_fd=folder))
attempt("write", lambda: open(FILE, "a"))
attempt("new file", lambda: open(FILE + ".new", "w"))
attempt("file without a name", lambda: os.open(os.path.dirname(FILE), os.O_TMPFILE | os.O_RDWR))
attempt("shared memory", lambda: open("/dev/shm/plaudit", "w"))
attempt("memfd", lambda: os.memfd_create("more"))
attempt("mkdir", lambda: os.mkdir(FILE + ".folder"))
attempt("symlink", lambda: os.symlink("/etc/passwd", FILE + ".link"))
attempt("hard link", lambda: os.link(FILE, FILE + ".link"))
attempt("rename", lambda: os.rename(FILE, FILE + ".moved"))
attempt("unlink", lambda: os.unlink(FILE))
attempt("truncate", lambda: os.truncate(FILE, 0))
attempt("chmod", lambda: os.chmod(FILE, 0o777))
attempt("chown", lambda: os.chown(FILE, 0, 0))
attempt("times", lambda: os.utime(FILE, (0, 0)))
attempt("list the root", lambda: os.listdir("/"))
attempt("list processes", lambda: os.listdir("/proc"))
attempt("chroot", lambda: os.chroot("/"))
attempt("mkfifo", lambda: os.mkfifo(FILE + ".fifo"))
"""

SYMLINK = """
attempt("where a link leads", lambda: os.readlink(FILE + ".outside"))
attempt("a link to a file outside", lambda: open(FILE + ".outside").read())
attempt("a link to a folder outside", lambda: os.listdir(FILE + ".folder"))
"""

LIMITS = """
import resource
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_STACK, resource.RLIMIT_NOFILE):
    soft, hard = resource.getrlimit(kind)
attempt("its CPU limit", lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 1)))
attempt("its memory limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20)))
attempt("the same limit", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
attempt("its limit by prlimit", lambda: resource.prlimit(0, resource.RLIMIT_CPU, (1, 1)))
attempt("its limit by its own number", lambda: resource.prlimit(os.getpid(), resource.RLIMIT_CPU, (1, 1)))
attempt("its limit by a system call", lambda: call(302, 0, 0, ctypes.create_string_buffer(16), 0))
attempt("its limit by the old call", lambda: call(160, 0, ctypes.create_string_buffer(16)))
"""

NETWORK = """
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
attempt("tcp6", lambda: socket.socket(socket.AF_INET6))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("unix", lambda: socket.socket(socket.AF_UNIX))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("socketpair", lambda: socket.socketpair())
attempt("name", lambda: socket.getaddrinfo("example.org", 80))
attempt("io_uring", lambda: call(425, 8, ctypes.create_string_buffer(120)))
"""

KERNEL = """
for name, number in CALLS.items():
    attempt(name, lambda: call(number, 0, 0, 0, 0, 0, 0))
"""

CALLS = {
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "unshare": 272,
    "setns": 308,
    "keyctl": 250,
    "add_key": 248,
    "request_key": 249,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "io_uring_register": 427,
    "init_module": 175,
    "kexec_load": 246,
    "shmget": 29,
    "msgget": 68,
    "semget": 64,
    "mq_open": 240,
    "timer_create": 222,
    "prctl": 157,
    "seccomp": 317,
    "landlock_create_ruleset": 444,
    "setuid": 105,
    "setresuid": 117,
    "capset": 126,
    "personality": 135,
    "kcmp": 312,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "memfd_secret": 447,
    "inotify_init1": 294,
    "fanotify_init": 300,
    "open_by_handle_at": 304,
    "setsid": 112,
    "mlock": 149,
    "ioprio_set": 251,
    "sched_setscheduler": 144,
    "syslog": 103,
    "quotactl": 179,
    "acct": 163,
    "swapon": 167,
    "reboot": 169,
    "sethostname": 170,
    "settimeofday": 164,
    "adjtimex": 159,
    "iopl": 172,
    "modify_ldt": 154,
    "arch_prctl": 158,
    "vmsplice": 278,
    "splice": 275,
    "fallocate": 285,
    "sendfile": 40,
    "a call from the future": 499,
}
"""Numbers of x86_64."""

ATTACKS = {
    "processes": PROCESSES,
    "signals": SIGNALS,
    "tracing": TRACING,
    "files": FILES,
    "links": SYMLINK,
    "limits": LIMITS,
    "network": NETWORK,
    "kernel": f"CALLS = {CALLS!r}\n{KERNEL}",
}
"""Each prints what came of its attempts."""

MISFORTUNES: dict[str, tuple[str, str]] = {
    "fork bomb": ("import os\nwhile True: os.fork()", "raised: PermissionError"),
    "endless loop": ("while True: pass", "time limit"),
    "endless loop with signals ignored": (
        "import signal\nfor n in (signal.SIGTERM, signal.SIGXCPU): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "time limit",
    ),
    "sleeping past the limit": ("import time\ntime.sleep(1000)", "time limit"),
    "stopping itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "time limit"),
    "closing its output and going on": ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "time limit"),
    "memory at once": ("x = bytearray(1 << 40)", "memory limit"),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory limit"),
    "output flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", "output limit"),
    "error flood": ("import os\nwhile True: os.write(2, b'x' * 65536)", "output limit"),
    "threads bomb": (
        "import threading, time\nthreading.stack_size(65536)\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: time.sleep(0.01)  # no memory for more, before a starved server has counted them",
        "thread limit",
    ),
    "deep recursion": ("def f(n): return [f(n + 1)]\nf(0)", ""),
    "deep recursion in C": ("x = []\nfor _ in range(10 ** 6): x = [x]\nprint(repr(x))", ""),
    "leaving without a word": ("import os\nos._exit(7)", "exited: exit code 7"),
    "pretending that the sandbox failed": ("import os\nos._exit(113)", "exited: exit code 113"),
    "a null pointer": ("import ctypes\nctypes.string_at(0)", "crashed: SIGSEGV"),
    "an error that cannot be told": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E()",
        "raised: E",
    ),
    "an abort": ("import os\nos.abort()", "crashed: SIGABRT"),
    "no program at all": ("for for", "raised: SyntaxError"),
}
"""Program → what the score says of it; of deep recursion, whatever it may be."""

LONG_S = 20
"""For what ends by itself, on a busy machine."""


@pytest.fixture
def surroundings(worker: Worker) -> Iterator[str]:
    """What an attack is told: the worker's process id, a port, an address in the worker, a file that all may change."""
    with (
        tempfile.TemporaryDirectory(prefix="attacked-") as name,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        folder = Path(name)
        folder.chmod(0o777)
        file = folder / "file"
        file.write_text(f"{worker.secret} in a file")
        file.chmod(0o666)
        (folder / "file.outside").symlink_to("/etc/passwd")
        (folder / "file.folder").symlink_to("/etc")
        yield f"{worker.pid} {server.getsockname()[1]} {worker.hello['address']} {file}"
        assert file.read_text() == f"{worker.secret} in a file"
        assert sorted(path.name for path in folder.iterdir()) == ["file", "file.folder", "file.outside"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks' system calls have x86_64's numbers")
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attempt_of_an_attack_is_refused(worker: Worker, surroundings: str, name: str) -> None:
    names = [line.split('"')[1] for line in ATTACKS[name].splitlines() if line.startswith("attempt(")] or list(CALLS)
    expected = "\n".join(f"{attempt}: refused" for attempt in names)
    score = worker.score(PRELUDE + ATTACKS[name], surroundings, expected)
    assert score["extra"].get("failure") is None, attempts_done(worker, PRELUDE + ATTACKS[name], surroundings)
    assert score["value"] == 1.0
    assert_next_sample_is_scored_right(worker)


@pytest.mark.alike
@pytest.mark.parametrize("name", MISFORTUNES)
def test_a_program_that_misbehaves_costs_its_own_sample_and_says_why(worker: Worker, name: str) -> None:
    program, failure = MISFORTUNES[name]
    options = {
        "timeSeconds": LONG_S if "recursion" in name or "threads" in name else 0.5,
        "memory": "64Mi",
        "output": "1Mi",
    }
    score = worker.score(program, expected="right", **options)
    assert (score["outcome"], score["value"]) == ("scored", 0.0)
    assert score["extra"]["failure"].startswith(f"case 0: {failure}")
    assert_next_sample_is_scored_right(worker, **options)


def test_no_process_of_a_program_outlives_it(worker: Worker) -> None:
    worker.score("import time\ntime.sleep(1000)", timeSeconds=0.5)
    servers = children_of(worker.pid)
    templates = [children_of(server) for server in servers]
    assert servers
    assert [len(children) for children in templates] == [1] * len(servers)
    assert [children_of(template) for (template,) in templates] == [[]] * len(servers)


def test_input_that_is_not_read_and_long_output_are_no_misfortune(worker: Worker) -> None:
    text = "0123456789abcde\n" * 300_000
    assert worker.score("print('done')", text, "done")["value"] == 1.0
    assert worker.score("print('0123456789abcde\\n' * 300_000)", "", text)["value"] == 1.0


def test_a_program_has_no_privilege_and_no_name_of_its_own(worker: Worker) -> None:
    user = worker.hello["uid"] or 65534
    program = "import os\nprint(os.getresuid(), os.environ, sys.argv)"
    assert worker.score(program, expected=f"({user}, {user}, {user}) environ({{}}) ['program.py']")["value"] == 1.0


def assert_next_sample_is_scored_right(worker: Worker, **options: Any) -> None:
    score = worker.score("print(int(input()) * 2)", "21", "42", **options)
    assert (score["outcome"], score["value"], score["extra"]) == ("scored", 1.0, {"passed": 1.0, "cases": 1.0})
    assert Path(f"/proc/{worker.pid}").exists()


def attempts_done(worker: Worker, program: str, surroundings: str) -> str:
    """For the message of a failed test: what the program could do, told through its exit."""
    score = worker.score(
        f"import io, sys\nout = sys.stdout = io.StringIO()\n{program}\n"
        "raise SystemError([line for line in out.getvalue().splitlines() if 'DONE' in line])",
        surroundings,
    )
    return str(score)


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]
