"""Run the policy's calls of ``bash`` and of the files' tools, or an agent's program, in the sample's own machine.

What the policy brings about itself by a call (a command that does not end, a full disk) is a text that it reads, and
never the end of the sample: it would get rid of a bad score that way.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plaudit_job.spec.rljob import RLJob
from plaudit_job.tasks import Task, expand
from plaudit_reward.machines import RunMachines, task_of, task_problem
from plaudit_reward.providers import ContainerProvider, TaskMachine
from plaudit_reward.served_machines import ServedProvider
from plaudit_sandbox.container import ContainerMachine
from plaudit_sandbox.container_engine import find_engine, require_loopback
from plaudit_sandbox.machine import CommandEnd, Machine, Serve
from plaudit_wire.errors import ConfigurationError, DataError, InfrastructureError, RefusedError
from plaudit_wire.messages import Prompt
from plaudit_wire.records import CallOutcome, SandboxRecord
from plaudit_workers.agents.messages import MachineReply, Tool, Trajectory, UseMachine
from plaudit_workers.agents.processes import sample_seed
from plaudit_workers.agents.sandbox_tools import sandbox_tools
from plaudit_workers.rollout.agents.agent import AgentError, MachineCounts, MachineLostError

_MOST_PATH_BYTES = 4096
_ALL = 1 << 31
_RESTORE = "[ -r /tmp/.session ] && . /tmp/.session 2> /dev/null\n"
_SAVE = "unset BASH_EXECUTION_STRING; { declare -p; declare -f; } 2> /dev/null > /tmp/.session; "
"""A shell of its own for each call, so that one that hangs costs the others nothing."""
_READ = 'cat -- "$1"'
_READ_LINES = 'sed -n "$2,$3p" -- "$1"'
_READ_WITH_DIGEST = 'sha256sum < "$1" && cat -- "$1"'
_READ_PART = 'test -r "$1" && tail -c "+$2" -- "$1" | head -c "$3" | base64 | tr -d "\\n"'
_PART_BYTES = 21_000
_MOST_DOWNLOAD_BYTES = 1 << 20
_COPY_S = 60.0
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Hold the end of one call."""

    outcome: CallOutcome
    text: str
    """The text that the model reads."""
    call_s: float = 0.0
    """Seconds from the request to the answer."""
    wait_s: float = 0.0
    """The part of it in which the process was started, or before the machine began the command."""
    reward: float | None = None
    done: bool = False
    """The environment ended the episode."""
    in_machine: bool = False
    """The call ran in the sample's own machine."""

    def ends_sample(self, fail_on_tool_failure: bool) -> bool:
        """Return True if the sample ends without a score.

        A call that passed its limit or whose process ended does so where ``onToolFailure`` says so. In a machine the
        policy can bring a limit about, and a machine that fails is not the policy's fault.
        """
        if self.in_machine:
            return self.outcome == "killed"
        return fail_on_tool_failure and self.outcome in ("timeout", "killed")


class MachineTools:
    """Hold what the machines of a rollout's samples share.

    Args:
        max_concurrent: Machines that start and commands that run at the same time.
        counts: are kept up to date.
        keeps_variables: variables and functions of ``bash`` stay for its next call.
    """

    def __init__(
        self,
        machines: RunMachines,
        tools: Sequence[Tool],
        max_concurrent: int,
        counts: MachineCounts | None = None,
        *,
        keeps_variables: bool = False,
    ) -> None:
        self.keeps_variables = keeps_variables
        self.machines = machines
        self.counts = counts or MachineCounts()
        self.tools = {tool.name: tool for tool in tools}
        self.is_served = isinstance(machines.provider, ServedProvider)
        # A broker bounds the machines of the whole run: a claim that waits must not keep others' commands back.
        self.places = asyncio.Semaphore(_ALL if self.is_served else max_concurrent)

    @classmethod
    async def of_job(cls, job: RLJob, machines: RunMachines | None, counts: MachineCounts | None = None) -> Self | None:
        """Return the tools of a job, None for one without; raise ``RefusedError`` where machines cannot run."""
        if machines is None:
            return None
        try:
            await asyncio.to_thread(machines.provider.require)
            if job.spec.rollout.agent.kind == "endpoint" and isinstance(machines.provider, ContainerProvider):
                require_loopback(find_engine())
        except ConfigurationError as error:
            raise RefusedError(f"spec.sandboxes: {error}") from error
        agent, places = job.spec.rollout.agent, job.spec.sandboxes.max_concurrent
        session = any(tool.sandbox == "session" for tool in agent.tools)
        return cls(machines, sandbox_tools(agent), places, counts, keeps_variables=session)

    async def play(self, prompt: Prompt, work: Callable[[SampleMachine], Awaitable[Trajectory]]) -> Trajectory:
        """Let the sample that the current task holds work in a machine of its own.

        Raises ``AgentError``, and of it ``MachineLostError`` if the machine was made and broke.
        """
        async with SampleMachine(self, prompt, sample_seed.get() - prompt.seed) as machine:
            try:
                trajectory = await work(machine)
            except AgentError as error:
                if error.outcome == "infra_error" and machine.record.failed:
                    raise MachineLostError(str(error)) from error
                raise
            trajectory.machine, trajectory.sandbox = machine.name, machine.record
            failure = trajectory.failure
            if failure is not None and failure.outcome == "infra_error" and machine.record.failed:
                trajectory.machine = ""
                raise MachineLostError(failure.reason or "", trajectory)
            return trajectory


class SampleMachine:
    """Hold the machine of one sample; leaving it by an error removes the machine, else the sample's tests need it."""

    def __init__(self, shared: MachineTools, prompt: Prompt, index: int) -> None:
        self.name = ""
        """Its name in the run, for whoever runs the sample's tests."""
        self._shared = shared
        self._prompt = prompt
        self._index = index
        self._made: TaskMachine | None = None
        self._directory = ""
        self._limit_s = math.inf
        self._environment: dict[str, str] = {}
        self._claim_s = self._start_s = self._wait_s = self._exec_s = 0.0
        self._num_commands = 0
        self._failed = False

    @property
    def record(self) -> SandboxRecord:
        """Return its times so far."""
        return SandboxRecord(
            start_s=self._start_s,
            claim_s=self._claim_s,
            wait_s=self._wait_s,
            exec_s=self._exec_s,
            num_commands=self._num_commands,
            cpus=self._made.cpus if self._made is not None else 0.0,
            failed=self._failed,
        )

    async def __aenter__(self) -> Self:
        """Make the machine; raise ``AgentError`` if it cannot be made."""
        places, counts, began_s = self._shared.places, self._shared.counts, time.monotonic()
        try:
            with counts.waiting():
                await places.acquire()
            self._claim_s = time.monotonic() - began_s
            waited_s = 0.0
            try:
                # The wait for a place of the run's broker is the longer part.
                with counts.waiting() if self._shared.is_served else counts.starting():
                    waited_s = await self._make()
            finally:
                places.release()
                self._claim_s += waited_s
                self._start_s = time.monotonic() - began_s - self._claim_s
        except DataError as error:
            raise AgentError(str(error)) from error
        except InfrastructureError as error:
            self._failed = True
            raise AgentError(str(error), "infra_error", self.record) from error
        counts.change_held(1)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._shared.counts.change_held(-1)
        if isinstance(error, AgentError):
            error.sandbox = self.record
        if kind is not None and self._made is not None:
            await self._shared.machines.remove(self.name)

    async def _make(self) -> float:
        """Make the machine; return the seconds in which it waited for a place of the run's broker."""
        task = await asyncio.to_thread(self._task)
        self.name, self._made = await self._shared.machines.claim(self._prompt.group, self._index, task)
        self._directory = self._made.directory
        return self._made.waited_s

    def _task(self) -> Task | None:
        task = task_of(self._prompt.extra_info)
        if task is not None:
            if problem := task_problem(self._shared.machines.provider, task):
                raise DataError(problem)
            self._environment = expand(task.config.environment.env)
            self._limit_s = task.agent_limit_s
        return task

    def limit_s(self, of_job: float) -> float:
        """Return the seconds of an agent in it: the job's, or those of its task if they are fewer."""
        return min(of_job, self._limit_s)

    def runs(self, tool: str) -> bool:
        """Return True for a tool of the machine."""
        return tool in self._shared.tools

    async def call(self, name: str, arguments: dict[str, Any]) -> CallEnd:
        """Run one call, after the one before has ended; never raises."""
        began_s, wait_s = time.monotonic(), 0.0
        try:
            async with self._place() as wait_s:
                outcome, text = await _CALLS[name](self, arguments, self._shared.tools[name].timeout_s)
        except DataError as error:
            outcome, text = "error", f"Error: {error}"
        except InfrastructureError as error:
            outcome, text = "killed", str(error)
        return CallEnd(outcome, text, time.monotonic() - began_s, wait_s, in_machine=True)

    async def run_program(
        self,
        command: Sequence[str],
        path: str,
        given: bytes,
        environment: Mapping[str, str],
        limit_s: float,
        serve: Serve | None,
    ) -> CommandEnd:
        """Run an agent's program to its end or to a limit, which begins after the wait for a place.

        Raises ``AgentError`` for a program that cannot be run, ``InfrastructureError`` where the machine fails.

        Args:
            path: A file of this host that is copied into the machine, and is then the command's last word; empty: none.
            given: Its standard input.
            serve: Answers it at the machine's own loopback device; None: it needs none.
        """
        assert self._made is not None
        machine, run = self._made.machine, self._made.machine.run
        if serve is not None:
            assert isinstance(machine, Machine | ContainerMachine)
            run = partial(machine.run, serve=serve)
        try:
            async with self._place():
                if path:
                    place = f"/tmp/{Path(path).name}"  # noqa: S108 (of the machine)
                    content = await asyncio.to_thread(Path(path).read_bytes)
                    copied = await self._run(["sh", "-c", _WRITE, "sh", place], _COPY_S, content)
                    if copied.exit_code:
                        raise DataError(f"{path} cannot be copied into the machine: {copied.output}")
                    command = [*command, place]
                variables = {**self._environment, **environment}
                return await run(
                    command, timeout_s=limit_s, environment=variables, directory=self._directory, stdin=given
                )
        except (DataError, OSError) as error:
            raise AgentError(str(error)) from error

    async def use(self, asked: UseMachine) -> MachineReply:
        """Do what the class of an environment asks for; never raises."""
        try:
            async with self._place():
                return await _USES[asked.method](self, asked)
        except DataError as error:
            return MachineReply(asked.id, problem=str(error))
        except InfrastructureError as error:
            return MachineReply(asked.id, problem=str(error), failed=True)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[float]:
        """Hold a place for a call, and count its times; yield the seconds of its wait."""
        began_s = time.monotonic()
        async with self._shared.places:
            wait_s = time.monotonic() - began_s
            try:
                yield wait_s
            except InfrastructureError:
                self._failed = True
                raise
            finally:
                self._wait_s += wait_s
                self._exec_s += time.monotonic() - began_s - wait_s
                self._num_commands += 1

    async def bash(self, arguments: dict[str, Any], limit_s: float) -> _Outcome:
        """Run a command where the one before ended."""
        # A mark that the shell prints at its end tells its folder; a command that writes one moves only itself.
        mark = secrets.token_hex(8)
        before, after = (_RESTORE, _SAVE) if self._shared.keeps_variables else ("", "")
        script = f'{before}trap \'{after}printf "\\n%s%s" {mark} "$PWD"\' EXIT\n{_text(arguments, "command")}'
        ended = await self._run(["bash", "-c", script], limit_s)
        output, found, directory = ended.output.rpartition(f"\n{mark}")
        if not found:
            output = ended.output
        elif directory.startswith("/") and len(directory.encode()) < _MOST_PATH_BYTES:
            self._directory = directory
        return _described(ended, output, limit_s)

    async def read_file(self, arguments: dict[str, Any], limit_s: float) -> _Outcome:
        """Read a file, or some of its lines."""
        path = _text(arguments, "path")
        if "first_line" not in arguments and "num_lines" not in arguments:
            ended = await self._run(["sh", "-c", _READ, "sh", path], limit_s)
        else:
            first = _number(arguments, "first_line", 1)
            last = first + _number(arguments, "num_lines", 200) - 1
            ended = await self._run(["sh", "-c", _READ_LINES, "sh", path, str(first), str(last)], limit_s)
        return _described(ended, ended.output, limit_s)

    async def write_file(self, arguments: dict[str, Any], limit_s: float) -> _Outcome:
        """Write a whole file."""
        ended = await self._write(_text(arguments, "path"), _text(arguments, "content"), limit_s)
        return _described(ended, ended.output or "written", limit_s)

    async def edit_file(self, arguments: dict[str, Any], limit_s: float) -> _Outcome:
        """Replace the one place where a file holds a text."""
        path, old, new = (_text(arguments, name) for name in ("path", "old", "new"))
        ended = await self._run(["sh", "-c", _READ_WITH_DIGEST, "sh", path], limit_s)
        if ended.exit_code:
            return _described(ended, ended.output, limit_s)
        digest, _, content = ended.output.partition("\n")
        if hashlib.sha256(content.encode()).hexdigest() != digest.partition(" ")[0]:
            raise DataError(f"{path} is too large to edit, or no text in UTF-8: change it with a command")
        if not old or (count := content.count(old)) != 1:
            raise DataError(
                f"{path} holds the text {count if old else 0} times, not once: give more of its surroundings"
            )
        ended = await self._write(path, content.replace(old, new), limit_s)
        return _described(ended, ended.output or "edited", limit_s)

    async def exec(self, asked: UseMachine) -> MachineReply:
        """Run a command where the machine's commands begin."""
        ended = await self._run(["bash", "-c", asked.text], asked.timeout_s)
        output = "\n".join(filter(None, (ended.output, _stopped(ended, asked.timeout_s))))
        return MachineReply(asked.id, ended.exit_code, output)

    async def upload(self, asked: UseMachine) -> MachineReply:
        """Write a file."""
        return _succeeded(asked, await self._run(["sh", "-c", _WRITE, "sh", asked.text], _COPY_S, asked.content))

    async def download(self, asked: UseMachine) -> MachineReply:
        """Read a file part by part, each no longer than an output may be."""
        content = bytearray()
        while len(content) <= _MOST_DOWNLOAD_BYTES:
            part = [str(len(content) + 1), str(_PART_BYTES)]
            ended = await self._run(["sh", "-c", _READ_PART, "sh", asked.text, *part], _COPY_S)
            try:
                read = base64.b64decode(_succeeded(asked, ended).output)
            except ValueError as error:
                raise DataError(f"{asked.text} cannot be read: the machine's base64 prints {error}") from error
            content += read
            if len(read) < _PART_BYTES:
                return MachineReply(asked.id, content=bytes(content))
        raise DataError(f"{asked.text} has more than {_MOST_DOWNLOAD_BYTES} bytes")

    async def _write(self, path: str, content: str, limit_s: float) -> CommandEnd:
        return await self._run(["sh", "-c", _WRITE, "sh", path], limit_s, content.encode(errors="replace"))

    async def _run(self, command: Sequence[str], limit_s: float, stdin: bytes = b"") -> CommandEnd:
        assert self._made is not None
        return await self._made.machine.run(
            command, timeout_s=limit_s, environment=self._environment, directory=self._directory, stdin=stdin
        )


_USES: dict[str, Callable[[SampleMachine, UseMachine], Awaitable[MachineReply]]] = {
    "exec": SampleMachine.exec,
    "upload": SampleMachine.upload,
    "download": SampleMachine.download,
}
_Outcome = tuple[CallOutcome, str]
_CALLS: dict[str, Callable[[SampleMachine, dict[str, Any], float], Awaitable[_Outcome]]] = {
    "bash": SampleMachine.bash,
    "read_file": SampleMachine.read_file,
    "write_file": SampleMachine.write_file,
    "edit_file": SampleMachine.edit_file,
}


def _described(ended: CommandEnd, output: str, limit_s: float) -> _Outcome:
    """Return a command's end as the model reads it."""
    output = output.strip("\n")
    remark = _stopped(ended, limit_s)
    if not remark:
        remark = f"(exit code {ended.exit_code})" if ended.exit_code else "" if output else "(no output)"
    text = "\n".join(filter(None, (output, remark)))
    return "timeout" if ended.ending == "timeout" else "ok" if ended.ending == "exited" else "error", text


def _stopped(ended: CommandEnd, limit_s: float) -> str:
    """Return the limit that stopped a command; empty where none did."""
    if ended.ending == "exited":
        return ""
    if ended.ending == "timeout":
        return f"(stopped: it did not end within {limit_s:g} s)"
    return f"(stopped: your machine has no more {ended.ending})"


def _succeeded(asked: UseMachine, ended: CommandEnd) -> MachineReply:
    """Return the reply to a command that ended well; raise ``DataError`` otherwise."""
    if ended.exit_code:
        raise DataError(f"{asked.method} of {asked.text}: {_described(ended, ended.output, _COPY_S)[1]}")
    return MachineReply(asked.id, output=ended.output)


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise DataError(f"the argument {name} is missing or no text")
    return value


def _number(arguments: dict[str, Any], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"the argument {name} is no whole number from 1")
    return value
