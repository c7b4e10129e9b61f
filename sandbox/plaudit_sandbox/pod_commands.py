"""Run a process in a machine's pod to its end: the agent's commands, and short scripts of the provider.

Commands travel through the API server, each as input of a shell, for Kubernetes may write arguments to its audit log.
Calls block, each in a thread of the pods' own.

An agent can bring about that its pod starts no command: it uses up what a command needs, ends what comes up, or stops
(SIGSTOP) the program by which containerd 1.6 starts one, and then none starts in any container of the pod. A broken
node looks alike. So where a pod that was not lost starts nothing, others on its node are asked (``unanswered``). A pod
gets its agent's first command once the shell that reads it has begun, and a label then: one without it is not blamed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

from plaudit_sandbox.machine import (
    AT_A_LIMIT,
    KILLED,
    CommandEnd,
    Ending,
    KeptOutput,
    MachineLimits,
    UnusableMachineError,
)
from plaudit_sandbox.machine_start import start_error
from plaudit_sandbox.pod_cluster import ClusterError, PodCluster, PodProcess
from plaudit_sandbox.pod_manifests import (
    END,
    KEEPER,
    LABEL,
    MACHINE,
    USED_LABEL,
    WITNESS_LABEL,
    PodSettings,
    ending_of,
    is_running,
    is_used,
    start_problem,
    witness_pod,
    witnesses,
)
from plaudit_wire.errors import InfrastructureError

Answer = TypeVar("Answer")
POLL_S: Final = 0.2
LONGEST_POLL_S: Final = 1.0
REPORTED_S: Final = 3.0
"""For which the report of a node is waited for, that a container has ended."""
STEP_S: Final = 900.0
END_S: Final = 60.0
_NOT_STARTED: Final = 126
_LOOK_S = 20.0
_KILL_S = 10.0
_WITNESS_S, _MOST_WITNESSES = 60.0, 3
"""For which a new witness may start, and how many others are asked before."""
_DRAIN_S, _LONGEST_DRAIN_S = 0.4, 5.0
"""For which the output of a command that has ended is waited for, and is read, where something of it still runs."""
_LONGEST_WORD = 128 << 10
_KILL_ALL = "kill -9 -1"
"""Ends every process that the user may end, but the shell itself and the container's first process."""
_CALLS: Final = concurrent.futures.ThreadPoolExecutor(1024, "plaudit-pod")
"""Each call waits in a thread, an agent's program for all of its time; the event loop's own pool is too small, and
others need it."""


class PodExecution:
    """One command in the machine of a pod, in a thread of its own.

    Args:
        is_agent_s: The pod is an agent's. In another, a command that cannot be started is an error.
        is_first: Nothing of the agent may have run there yet.
    """

    def __init__(
        self,
        cluster: PodCluster,
        name: str,
        settings: PodSettings,
        limits: MachineLimits,
        *,
        is_agent_s: bool,
        is_first: bool = False,
    ) -> None:
        self.unusable = ""
        """Why the pod starts no further command, by the doing of what ran in it; empty if it may."""
        self._is_agent_s, self._is_first = is_agent_s, is_first
        self._cluster = cluster
        self._name = name
        self._output = KeptOutput(limits.output_bytes)
        self._processes = limits.processes if settings.has_own_user else None
        self._is_stopped = threading.Event()

    async def finished(
        self, command: Sequence[str], timeout_s: float, environment: Mapping[str, str], directory: str, stdin: bytes
    ) -> CommandEnd:
        """Run it to its end or to a limit. When the caller gives up, it is ended as well."""
        script = script_of(command, environment, directory, self._processes)
        try:
            return await in_thread(self._timed, script, stdin, timeout_s)
        except asyncio.CancelledError:
            self._is_stopped.set()
            raise

    def _timed(self, script: bytes, stdin: bytes, timeout_s: float) -> CommandEnd:
        began_s = time.monotonic()  # a wait for a thread does not count
        try:
            ending, code = self._execute(script, stdin, began_s + timeout_s)
        except UnusableMachineError as error:
            self.unusable, ending, code = str(error), "timeout", AT_A_LIMIT
        code = code if ending == "exited" else AT_A_LIMIT
        return CommandEnd(ending, code, self._output.text(), time.monotonic() - began_s)

    def _execute(self, script: bytes, stdin: bytes, until_s: float) -> tuple[Ending, int]:
        # The shell reads the script to its last byte and no further, so that the rest is the command's own input, whose
        # end does not depend on that of the connection. What the command left in the background may hold its output
        # open, so the shell reports the exit code by itself.
        reading = f"dd bs=1 count={len(script)} 2>/dev/null" if stdin else f"head -c {len(script)}"
        command = f'head -c {len(stdin)} | (eval "$script")' if stdin else '(eval "$script" </dev/null)'
        shell = f"echo >&2; script=$({reading}); {command}; code=$?; echo $code >&2; exit $code"
        try:
            process = self._cluster.execute(self._name, MACHINE, shell)
        except ClusterError as error:
            return self._ended(str(error))
        try:
            if self._is_first:
                self._hand_over(process)
            process.write(script + stdin)
            if (limit := self._watch(process, until_s)) is not None:
                return limit, AT_A_LIMIT
        except ClusterError as error:
            return self._ended(str(error), is_refused=process.is_refused)
        finally:
            process.close()
        if (code := _code_of_shell(process)) is None and (code := process.exit_code) is None:
            return self._ended(process.problem, is_refused=process.is_refused)
        if code == KILLED:
            # Of what can end a whole command by this signal, only a shortage is not its own: of memory, or its pod's.
            return "disk" if self._reported_ending() == "disk" else "memory", KILLED
        return "exited", code

    def _hand_over(self, process: PodProcess) -> None:
        """Wait until a shell has begun that gets the pod's first command, and label the pod. Raise ``ClusterError``."""
        until_s = time.monotonic() + END_S
        while not process.errors:
            if process.is_over or time.monotonic() > until_s or self._is_stopped.is_set():
                raise ClusterError(process.problem or f"it did not begin within {END_S:g} s", 0)
            process.receive(LONGEST_POLL_S)
        self._cluster.label(self._name, {USED_LABEL: "yes"})

    def _watch(self, process: PodProcess, until_s: float) -> Ending | None:
        """Take in the output until the end; return the limit that the command reached first."""
        look_s = time.monotonic() + _LOOK_S
        while not process.is_over:
            if _code_of_shell(process) is not None:
                self._drain(process)
                return None
            now_s = time.monotonic()
            if now_s >= until_s or self._is_stopped.is_set():
                self._raise_if_lost()
                self._end_processes()
                return "timeout"
            if now_s >= look_s:
                look_s = now_s + _LOOK_S
                if self._raise_if_lost() == "disk":
                    return "disk"
            self._output.add(process.receive(min(LONGEST_POLL_S, until_s - now_s)))
        return None

    def _drain(self, process: PodProcess) -> None:
        """Take in what a command had written when it ended."""
        until_s = time.monotonic() + _LONGEST_DRAIN_S
        while not process.is_over and time.monotonic() < until_s and (data := process.receive(_DRAIN_S)):
            self._output.add(data)

    def _raise_if_lost(self) -> str:
        pod = self._cluster.read(self._name)
        raise_if_lost(self._name, pod)
        return ending_of(pod)

    def _ended(self, problem: str, *, is_refused: bool = False) -> tuple[Ending, int]:
        """Return how the machine ended, where the connection to a command did; raise ``InfrastructureError``.

        Args:
            is_refused: Its node reported that the command could not be started.
        """
        raise_if_lost(self._name, pod := self._cluster.read(self._name))
        if self._is_agent_s and not is_used(pod):
            raise InfrastructureError(f"the first command of the pod {self._name} did not start: {problem}")
        ending = self._reported_ending()
        if not ending and is_refused and self._is_agent_s:
            self._end_processes()
            self._output.add(f"\n[the command could not be started: {problem}]\n".encode())
            return "exited", _NOT_STARTED
        if not ending:
            raise InfrastructureError(f"the command in the pod {self._name} was lost: {problem}")
        if ending == "exited":
            self._output.add(b"\n[the machine has ended: its first process is gone]\n")
        return cast(Ending, ending), KILLED

    def _reported_ending(self) -> str:
        """Return how the machine ended, as its node reports it a moment later; raise ``InfrastructureError``."""
        until_s = time.monotonic() + REPORTED_S
        while not (ending := self._raise_if_lost()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return ending

    def _end_processes(self) -> None:
        """End every process of the agent but the first; where there is no room for one more, that one as well."""
        try:
            answer(self._cluster, self._name, MACHINE, _KILL_ALL, _KILL_S)
        except InfrastructureError:
            end_machine(self._cluster, self._name)


async def in_thread(function: Callable[..., Answer], *arguments: object) -> Answer:
    """Call a function that waits for the cluster in a thread of the pods' own."""
    return await asyncio.get_running_loop().run_in_executor(_CALLS, partial(function, *arguments))


def script_of(
    command: Sequence[str], environment: Mapping[str, str], directory: str, processes: int | None = None
) -> bytes:
    """Return the shell's way to a command: its folder, its variables, and itself. Raises ``DataError``."""
    words = [*command, directory, *environment, *environment.values()]
    if any("\0" in word for word in words) or not all(name.isidentifier() and name.isascii() for name in environment):
        raise start_error(ValueError(words))
    if any(len(word.encode()) >= _LONGEST_WORD for word in words):
        raise start_error(OSError(errno.E2BIG, "too large"))
    limit = f"ulimit -u {processes} 2>/dev/null || ulimit -p {processes} 2>/dev/null\n" if processes else ""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    folder = f"cd {shlex.quote(directory)} 2>/dev/null || cd /\n"
    return f"exec 2>&1\n{folder}{exports}{limit}exec {shlex.join(command)}".encode(errors="surrogateescape")


def _code_of_shell(process: PodProcess) -> int | None:
    """Return the exit code of a command, once the shell that ran it has reported it."""
    text = bytes(process.errors)
    return int(text) if text.endswith(b"\n") and text.strip().isdigit() else None


def raise_if_lost(name: str, pod: Mapping[str, Any]) -> None:
    """Raise ``InfrastructureError`` if something other than the machine itself ended its pod."""
    if (ending := ending_of(pod)) not in ("", "exited", "memory", "disk"):
        raise InfrastructureError(f"the pod {name} was lost: {ending}")


def receiving(cluster: PodCluster, name: str, container: str, place: str) -> PodProcess:
    """Start a process that extracts its standard input, an archive, below a folder of a container."""
    where = shlex.quote(place)
    return cluster.execute(name, container, f"mkdir -p {where} && exec tar -x -p -f - -C {where}")


@contextlib.contextmanager
def extracted(receiver: PodProcess) -> Iterator[Any]:
    """Yield a receiver as a file: the archive that is written to it lies in its folder at the end."""
    with contextlib.closing(receiver):
        yield receiver
        receiver.end_input()
        wait_until_extracted(receiver)


def wait_until_extracted(receiver: PodProcess) -> None:
    """Wait until the files that a receiver got lie in their folder. Raises ``InfrastructureError``."""
    _finish(receiver, f"files cannot be put into {receiver.where}", STEP_S)


def end_machine(cluster: PodCluster, name: str) -> None:
    """Tell the first process of a machine to end. Raises as ``ask_keeper`` does."""
    ask_keeper(cluster, name, END)


def ask_keeper(cluster: PodCluster, name: str, script: str) -> str:
    """Return what a script prints beside a machine.

    Raises ``UnusableMachineError`` if the pod starts no process by its agent's doing, else ``InfrastructureError``.
    """
    try:
        return answer(cluster, name, KEEPER, f"echo >&2\n{script}", begins_within_s=END_S)
    except InfrastructureError as error:
        raise unanswered(cluster, name, error) from error


def unanswered(cluster: PodCluster, name: str, error: InfrastructureError) -> InfrastructureError:
    """Return what it means that a pod did not run a script of ours: ``UnusableMachineError`` or the error itself.

    It is the agent's doing if it has run something there, the pod was not lost, and its node runs a script in another
    pod, but then still none in this one. Raises ``InfrastructureError`` for a pod that was lost.
    """
    pod = cluster.read(name)
    raise_if_lost(name, pod)
    is_alone = is_used(pod) and _has_witness(cluster, pod) and not _answers(cluster, name)
    raise_if_lost(name, cluster.read(name))
    if not is_alone:
        return error
    return UnusableMachineError(f"no process can be started in the pod {name}, and others of its node start them")


def _has_witness(cluster: PodCluster, pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod's node starts processes in another pod: one of the machines', or else a new one."""
    if any(_answers(cluster, each) for each in witnesses(cluster.find({}), pod)[:_MOST_WITNESSES]):
        return True
    new = f"{pod['metadata']['labels'][LABEL]}-{secrets.token_hex(3)}"
    try:
        cluster.create(witness_pod(new, pod))
        wait_for(cluster, new, lambda made: is_running(made, KEEPER), _WITNESS_S)
        return _answers(cluster, new)
    except InfrastructureError:  # the node is full, or something does not admit it
        return False
    finally:
        with contextlib.suppress(InfrastructureError):  # else it goes with the machine
            cluster.remove({LABEL: pod["metadata"]["labels"][LABEL], WITNESS_LABEL: "yes"})


def _answers(cluster: PodCluster, name: str) -> bool:
    try:
        answer(cluster, name, KEEPER, ":", _KILL_S)
    except InfrastructureError:
        return False
    return True


def wait_for(cluster: PodCluster, name: str, reached: Callable[[Mapping[str, Any]], bool], limit_s: float) -> None:
    """Wait for a stage of a pod's start; raise ``InfrastructureError`` in Kubernetes's words if it is not reached."""
    until_s, wait_s = time.monotonic() + limit_s, POLL_S
    while not reached(pod := cluster.read(name)):
        problem, is_over = start_problem(pod)
        if is_over or time.monotonic() > until_s:
            raise InfrastructureError(f"the pod {name} cannot start: {problem}")
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.3, LONGEST_POLL_S)


def answer(
    cluster: PodCluster,
    name: str,
    container: str,
    script: str,
    limit_s: float = STEP_S,
    *,
    begins_within_s: float = STEP_S,
) -> str:
    """Return the beginning of what a script of ours prints; raise ``InfrastructureError`` if it fails.

    Args:
        begins_within_s: For a script that begins with a line of its standard error.
    """
    process = cluster.execute(name, container, script)
    try:
        return _finish(process, f"{name}/{container} does not do as it should", limit_s, begins_within_s)
    finally:
        process.close()


def _finish(process: PodProcess, failure: str, limit_s: float, begins_within_s: float = STEP_S) -> str:
    began_s, output = time.monotonic(), KeptOutput(1000)
    while not process.is_over:
        output.add(process.receive(LONGEST_POLL_S))
        most_s = limit_s if process.errors else min(limit_s, begins_within_s)
        if time.monotonic() - began_s > most_s:
            raise InfrastructureError(f"{failure} within {most_s:g} s")
    if process.exit_code != 0:
        why = process.errors.decode(errors="replace").strip() or process.problem or f"exit code {process.exit_code}"
        raise InfrastructureError(f"{failure}: {why}")
    return output.text()
