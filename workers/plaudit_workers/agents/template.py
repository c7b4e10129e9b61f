"""Load users' files once, and fork a process for each sample that needs them: the template process.

``processes`` starts it as ``python -m plaudit_workers.agents.template <file descriptor> <parent's process id>``. A fork
imports nothing again and shares the memory of everything that the files imported. The template itself never runs a
tool, so it can always kill a process of a sample that hangs. It ends with its parent, and they end with it.

A tool may run what the policy wrote, and must not cost more than its sample. So each fork is confined (``_confine``),
and when it ends, or the processes below it exceed their limits, all that it started is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from plaudit_reward.functions.function import keep_content
from plaudit_sandbox.confinement import keep_apart
from plaudit_sandbox.lifetime import ForkTemplate, kill_with_group
from plaudit_sandbox.privileges import end_with, limit_for_good, no_new_privileges, prctl
from plaudit_sandbox.sandbox import offer_to_the_oom_killer
from plaudit_wire.errors import ConfigurationError
from plaudit_workers.agents.functions import cut_text, first_cause
from plaudit_workers.agents.load import LoadedSources, load
from plaudit_workers.agents.messages import (
    Ended,
    Fork,
    Kill,
    Load,
    Loaded,
    ProcessLimits,
    Refused,
    ToTemplate,
    to_template,
)
from plaudit_workers.agents.sample_process import run_sample

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PR_SET_CHILD_SUBREAPER = 36
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_WATCH_EVERY_S = 1.0
_END_WITHIN_S = 1.0


def main() -> int:
    """Load the files, report, fork."""
    end_with(int(sys.argv[2]))
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The last lines of a killed tool are logged, and no locale makes a print raise.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    template = _Template(socket.socket(fileno=int(sys.argv[1])))
    try:
        return template.run()
    except EOFError:
        template.end()
        return 0


class _Template(ForkTemplate[ToTemplate, int]):
    """Fork the process of each sample, keep it within its limits, and report its end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, to_template)
        self._reasons: dict[int, str] = {}
        """Process id → the limit that it exceeded."""
        self._limits = ProcessLimits()
        self._generators = _Generators([])
        self._imported: set[int] = set()
        """Children that importing the files started."""

    def run(self) -> int:
        """Serve until the rollout closes the connection (``EOFError``)."""
        sources = self.receive()
        assert isinstance(sources[0], Load)
        try:
            keep_content(sources[0].files)
            loaded = load(sources[0].sources)
        except ConfigurationError as error:
            self.send(Refused(cut_text(str(error))))
            return 2
        except Exception as error:  # what users' files and servers describe may have any form
            self.send(Refused(f"its sources cannot be loaded: {first_cause(error)}"))
            return 2
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
            print(f"importing the files started threads ({names}); they do not run in the processes of samples")
        self._limits = sources[0].limits
        if not self._limits.memory_bytes:
            self._limits = ProcessLimits(_machine_memory_bytes() // 2, self._limits.threads)
        self._imported = _children_of_this_process()
        _adopt_orphans()
        self._generators = _Generators.found()
        self.freeze()
        self.send(Loaded([tool.description for tool in loaded.tools.values()], loaded.environment_kind))
        watched_s = time.monotonic()
        while True:
            requests = self.wait(_WATCH_EVERY_S if self.running else None)
            if time.monotonic() - watched_s >= _WATCH_EVERY_S:
                self._watch()
                watched_s = time.monotonic()
            for request in requests:
                self._obey(request, loaded)

    def _obey(self, request: ToTemplate, loaded: LoadedSources) -> None:
        if isinstance(request, Kill):
            self.send_signal(request.number, signal.SIGKILL)
        elif isinstance(request, Fork):
            try:
                connection = self.fork(request.number)
            except OSError as error:
                self.send(Ended(request.number, reason=f"did not start: {error}"))
                return
            if connection is not None:
                self._serve(connection, request.seed, loaded)

    def _serve(self, connection: int, seed: int, loaded: LoadedSources) -> NoReturn:
        """Be the process of a sample."""
        status = 1
        try:
            _confine(self._limits.memory_bytes, hides=loaded.program is not None)
            self._generators.begin(seed)
            run_sample(socket.socket(fileno=connection), loaded, seed)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):  # a tool may have closed or replaced them
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def ended(self, pid: int, key: int | None, code: int) -> None:
        """Report the end of a sample's process, and kill what it left outside its process group."""
        for orphan in _children_of_this_process() - self.running.keys() - self._imported:
            kill_with_group(orphan)
        if key is not None:
            self.send(Ended(key, code, self._reasons.pop(pid, "")))

    def end(self) -> None:
        """Kill the processes of all samples and all that they started."""
        deadline_s = time.monotonic() + _END_WITHIN_S
        while (started := _children_of_this_process() - self._imported) and time.monotonic() < deadline_s:
            for pid in started:
                kill_with_group(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _watch(self) -> None:
        """Kill the processes of samples that exceed their limits."""
        limits = self._limits
        for pid, tree in _trees(self.running).items():
            if tree.num_threads > limits.threads:
                self._reasons[pid] = f"was killed: it had more than {limits.threads} processes and threads"
            elif tree.uses_more_than(limits.memory_bytes):
                self._reasons[pid] = f"was killed: its processes used more than {limits.memory_bytes >> 20} MiB"
            else:
                continue
            tree.kill()


class _Generators:
    """Hold the random generators that importing the files made: a fork would go on with the same numbers as all others.

    Those of the libraries (``random``, ``numpy.random``, torch) as well as those of users' files, wherever they hold
    them: a module's ``default_rng()``, an attribute of a class or of a cached instance, a default argument.
    """

    def __init__(self, made: list[Any]) -> None:
        self._made = made

    @classmethod
    def found(cls) -> _Generators:
        """Find them."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        kinds: tuple[type, ...] = (random.Random,)
        if numpy is not None:
            kinds += (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
        if torch is not None:
            kinds += (torch.Generator,)
        known = gc.get_objects()
        known += gc.get_referents(*known)  # the collector does not track torch's, only what holds them
        found = {kind for kind in set(map(type, known)) if issubclass(kind, kinds)}
        made = [each for each in known if type(each) in found]
        return cls(list({id(each): each for each in made}.values()))

    def begin(self, seed: int) -> None:
        """Begin all sequences anew: the same ones for the same seed."""
        seed &= (1 << 64) - 1
        os.environ["PYTHONHASHSEED"] = str(seed % (1 << 32))  # of Python programs that the sample starts
        random.seed(seed)
        begins: dict[str, Callable[[Any], Any]] = {
            "numpy.random": lambda module: module.seed([seed % (1 << 32), seed >> 32]),
            "torch": lambda module: module.default_generator.manual_seed(seed),
        }
        later: dict[str, Callable[[Any], Any]] = {}
        for name, begin in begins.items():
            if (module := sys.modules.get(name)) is not None:
                begin(module)
            else:
                later[name] = begin
        sys.meta_path.insert(0, _AtImport(later))
        for place, generator in enumerate(self._made):
            with contextlib.suppress(Exception):  # of a kind that cannot begin anew, such as a user's subclass
                _begin_anew(generator, seed, place)


class _AtImport(MetaPathFinder):
    """Call a function with a module when the sample imports it: a library seeds its generator when it is imported.

    numpy takes a number from the system then, which no resume repeats, and torch the same one in each process.
    """

    def __init__(self, functions: dict[str, Callable[[Any], Any]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Find the module as Python does without this finder."""
        function = self._functions.pop(name, None)
        if function is None:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module: Any) -> None:
                execute(module)
                function(module)

            spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def _begin_anew(generator: Any, seed: int, place: int) -> None:
    bits = getattr(generator, "bit_generator", generator)
    if hasattr(bits, "random_raw"):
        bits.state = type(bits)([seed, place]).state
    elif hasattr(generator, "manual_seed"):
        generator.manual_seed(random.Random(f"{seed} {place}").getrandbits(63))
    elif isinstance(generator, random.Random):
        generator.seed(f"{seed} {place}")
    else:
        generator.seed([seed % (1 << 32), seed >> 32, place])


class _Process(NamedTuple):
    """Describe a living process."""

    pid: int
    parent: int
    num_threads: int
    resident_bytes: int
    """Pages that it shares with others count in full."""


class _ProcessTree(NamedTuple):
    """Hold a process and its descendants."""

    processes: list[_Process]

    @property
    def num_threads(self) -> int:
        """Return the threads of all processes; a process has at least one."""
        return sum(process.num_threads for process in self.processes)

    def uses_more_than(self, memory_bytes: int) -> bool:
        """Return True if the processes together hold more memory; shared pages count once."""
        if sum(process.resident_bytes for process in self.processes) <= memory_bytes:
            return False
        return sum(_proportional_bytes(process.pid) for process in self.processes) > memory_bytes

    def kill(self) -> None:
        """Kill all of them, and the groups that they lead."""
        for process in self.processes:
            kill_with_group(process.pid)


def _trees(roots: Collection[int]) -> dict[int, _ProcessTree]:
    """Return the process tree of each living root."""
    by_pid = {process.pid: process for process in _living()}
    children: dict[int, list[int]] = defaultdict(list)
    for process in by_pid.values():
        children[process.parent].append(process.pid)
    return {root: _ProcessTree(list(_below(root, by_pid, children))) for root in roots if root in by_pid}


def _children_of_this_process() -> set[int]:
    """Return the ids of this process's children, including adopted and ended ones."""
    pid = os.getpid()
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return {process.pid for process in _living() if process.parent == pid}


def _below(root: int, by_pid: dict[int, _Process], children: dict[int, list[int]]) -> Iterator[_Process]:
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield by_pid[pid]
        waiting += children[pid]


def _living() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        # Behind the name, which may hold anything: state, parent, …; see proc_pid_stat(5), where state is field 3.
        fields = text.rpartition(")")[2].split()
        if fields[0] not in "ZX":
            yield _Process(int(name), int(fields[1]), int(fields[17]), int(fields[21]) * _PAGE_BYTES)


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _confine(memory_bytes: int, *, hides: bool) -> None:
    """Confine this process and all that it starts, for good. Each may allocate ``memory_bytes`` on top of what it has.

    The kernel hides all other processes from it, also from a root (Landlock), keeps its signals away from them (since
    Linux 6.12), refuses it memory beyond the limit, and ends it first when memory runs out. What it starts stays below
    it in the process tree. ``hides``: it will hide the folders of its neighbours as well.
    """
    _adopt_orphans()
    no_new_privileges()
    keep_apart(hides=hides)
    offer_to_the_oom_killer()
    data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE_BYTES
    limit_for_good(resource.RLIMIT_DATA, data_bytes + memory_bytes)
    limit_for_good(resource.RLIMIT_CORE, 0)


def _adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end, so that none leaves the process tree."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _machine_memory_bytes() -> int:
    """Return the memory of this container, or of the machine where no container limits it."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    for path in _CGROUP_LIMITS:
        try:
            sizes.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # another version of cgroups, or no limit ("max")
    return min(sizes)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the user's files must not keep the process alive
