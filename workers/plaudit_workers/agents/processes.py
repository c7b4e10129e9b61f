"""Run the processes of a rollout's samples: start their template, have it fork, notice their ends, kill them.

``sources_of`` reads from the job what the template loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import ToolSpec
from plaudit_reward.functions.function import user_files
from plaudit_reward.isolation.start import Output, start_child
from plaudit_sandbox.lifetime import kill_with_group
from plaudit_wire.errors import RefusedError
from plaudit_wire.frames import Frames, frame, how_ended
from plaudit_wire.logs import get_logger
from plaudit_workers.agents.messages import (
    AgentClass,
    Ended,
    EnvironmentClass,
    EnvironmentKind,
    EnvironmentServer,
    Fork,
    FromSample,
    FromTemplate,
    FunctionTool,
    Kill,
    Load,
    Loaded,
    McpServer,
    ProcessLimits,
    Program,
    Refused,
    Source,
    Tool,
    ToSample,
    VerlTools,
    from_sample,
    from_template,
)
from plaudit_workers.agents.sandbox_tools import sandbox_tools
from plaudit_workers.job_start import environment_url

logger = get_logger(__name__)
_LOAD_WITHIN_S = 300.0
_STATUS_WITHIN_S = 2.0
"""Seconds that the template may take to report the exit code of a process whose connection closed."""
_DRAIN_WITHIN_S = 2.0
"""Seconds in which the connection of a process that ended is read to its end; another process may hold it open."""
_MOST_BYTES = 64 << 20
"""A process that sends more without completing a message is killed."""
_FULL_PAUSE_S = 0.002
_END_WITHIN_S = 3.0
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


sample_seed: ContextVar[int] = ContextVar("sample_seed", default=0)
"""The seed of the sample that the current task holds."""


class ProcessDiedError(Exception):
    """Report that the process of a sample ended; the message says how."""


class SampleProcess(asyncio.Protocol):
    """Connect to the process of one sample."""

    def __init__(self, number: int, kill: Callable[[int], None]) -> None:
        self.number = number
        self.on_message: Callable[[FromSample], bool] = lambda message: False
        """Takes a message; returns False for one that it did not ask for: the process is then killed."""
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolved with a description of its end, also after ``kill``."""
        self._kill = kill
        self._frames = Frames()
        self._unread_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._exit = ""
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        # A cast: the transports of uvloop, which Ray's actors use, are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass on complete messages; kill a process that sends nonsense or a flood."""
        self._unread_bytes += len(data)
        try:
            for body in self._frames.feed(data):
                self._unread_bytes = 0
                messages = from_sample.decode(body)
                if not messages or not all(self.on_message(message) for message in messages):
                    self.kill("sent a message that nothing asked for")
                    return
        except Exception:  # whatever it sent: the user's code has the connection as well
            self.kill("sent something that is no message")
            return
        if self._unread_bytes > _MOST_BYTES:
            self.kill(f"sent a message of more than {_MOST_BYTES >> 20} MiB")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for its exit code."""
        self._lost = True
        self._kill(self.number)
        if self._exit:
            self.ended(self._exit)
        elif not self.died.done():
            asyncio.get_running_loop().call_later(_STATUS_WITHIN_S, self.ended, "closed its connection")

    def exited(self, how: str) -> None:
        """Record its exit once the connection is read to its end.

        The template's report and the process's last message come through two connections, in any order.
        """
        if self._lost or self._transport is None:
            self.ended(how)
            return
        self._exit = self._exit or how
        asyncio.get_running_loop().call_later(_DRAIN_WITHIN_S, self.ended, self._exit)

    def ended(self, how: str) -> None:
        """Record its end at once, unread messages are lost; the first description stays."""
        if not self.died.done():
            self.died.set_result(how)
        self.close()

    def send(self, message: ToSample) -> None:
        """Send a message; never blocks."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame([message]))

    def kill(self, why: str) -> None:
        """Kill it and everything that it started."""
        self._kill(self.number)
        self.ended(why)

    def close(self) -> None:
        """Close the connection: the process ends by itself, or is killed."""
        if not self._closed:
            self._closed = True
            self._kill(self.number)
            if self._transport is not None:
                self._transport.abort()


class _Connection(asyncio.Protocol):
    """Hold the connection to the template."""

    def __init__(self, on_message: Callable[[FromTemplate], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            for message in from_template.decode(body):
                self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


class AgentProcesses:
    """Hold the processes of all samples of a rollout."""

    def __init__(self, sources: Sequence[Source], limits: ProcessLimits | None = None) -> None:
        self._sources = list(sources)
        self._files: dict[str, bytes] = {}
        self._limits = limits or ProcessLimits()
        self._numbers = itertools.count()
        self._running: dict[int, SampleProcess] = {}
        self._loaded: asyncio.Future[list[Tool]] | None = None
        self.environment: EnvironmentKind = ""
        """The kind of environment that was loaded."""
        self._process: subprocess.Popen[bytes] | None = None
        self._sender: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._output = Output("agent", "agent printed", "process")
        self._opening = asyncio.Lock()

    async def open(self) -> list[Tool]:
        """Start the template; return the tools that it loaded. Raise ``RefusedError`` if a file cannot be used.

        Without sources there is nothing to start.
        """
        if not self._sources:
            return []
        async with self._opening:
            if self._loaded is None:
                await self._start()
            assert self._loaded is not None
            try:
                async with asyncio.timeout(_LOAD_WITHIN_S):
                    return await asyncio.shield(self._loaded)
            except TimeoutError:
                self._end()
                raise RefusedError(
                    f"spec.rollout.agent: its files did not finish importing within {_LOAD_WITHIN_S:.0f} s; move slow "
                    "work at import into the functions"
                ) from None

    async def fork(self) -> SampleProcess:
        """Return a new process of the sample, which the caller closes; its random sequences begin with ``sample_seed``.

        Raises ``ProcessDiedError`` if no template starts.
        """
        try:
            await self.open()
        except RefusedError as error:
            raise ProcessDiedError(str(error)) from error
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        try:
            process = self._running[number] = SampleProcess(number, lambda each: self._send(Kill(each)))
            await asyncio.get_running_loop().create_connection(lambda: process, sock=ours)
            await self._send_fork(number, theirs)
        except OSError as error:
            self._running.pop(number, None)
            ours.close()
            raise ProcessDiedError(f"the template process is gone: {error}") from error
        finally:
            theirs.close()
        process.died.add_done_callback(lambda _: self._running.pop(number, None))
        return process

    async def close(self) -> None:
        """End all processes."""
        process, self._process = self._process, None
        self._end()
        if process is not None:
            await asyncio.to_thread(_wait, process)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._loaded = loop.create_future()
        process, ours, read_end = start_child("plaudit_workers.agents.template")
        self._process = process
        self._output = Output("agent", "agent printed", "process")
        await loop.connect_read_pipe(lambda: self._output, os.fdopen(read_end, "rb"))
        self._sender = ours.dup()
        self._transport, _ = await loop.create_connection(
            lambda: _Connection(self._on_message, lambda: self._on_lost(process)), sock=ours
        )
        if not self._files:
            paths = {path for source in self._sources if (path := getattr(source, "path", "")).endswith(".py")}
            self._files = {file: content for path in paths for file, content in user_files(path).items()}
        # Not by ``_send``: the socket takes 200 KiB at once, and files may be larger.
        self._transport.write(frame([Load(self._sources, self._limits, self._files)]))

    def _on_message(self, message: FromTemplate) -> None:
        loaded = self._loaded
        if isinstance(message, Ended):
            sample = self._running.get(message.number)
            if sample is not None:
                sample.exited(message.reason or how_ended(message.status))
        elif loaded is not None and not loaded.done():
            if isinstance(message, Loaded):
                self.environment = message.environment
                loaded.set_result(message.tools)
            elif isinstance(message, Refused):
                loaded.set_exception(RefusedError(f"spec.rollout.agent: {message.message}"))

    def _on_lost(self, process: subprocess.Popen[bytes]) -> None:
        """Fail all samples; the next fork starts another template."""
        if process is not self._process:
            return
        tail = self._output.tail()
        refused = self._loaded is not None and self._loaded.done() and self._loaded.exception() is not None
        if not refused:  # it ends by itself after it has said why it loads nothing
            logger.warning("template process of agents ended", printed=tail)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(RefusedError(f"spec.rollout.agent: importing its files ended Python: {tail}"))
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            kill_with_group(self._process.pid)
            asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        for sample in list(self._running.values()):
            sample.ended("ended with the template process")
        if self._sender is not None:
            self._sender.close()
        if self._transport is not None:
            self._transport.close()
        self._output.close()
        self._loaded = self._process = self._sender = self._transport = None

    def _send(self, message: Kill) -> None:
        if self._sender is not None:
            with contextlib.suppress(OSError):  # the end of the template is noticed by its connection
                self._sender.sendall(frame([message]))

    async def _send_fork(self, number: int, connection: socket.socket) -> None:
        data = frame([Fork(number, sample_seed.get())])
        while self._sender is not None:
            try:
                socket.send_fds(self._sender, [data], [connection.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL_PAUSE_S)
        raise OSError("it ended")


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until the template, whose connection is closed, has killed what the samples started, and ends."""
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:  # it is still importing
        kill_with_group(process.pid)
        process.wait()


def sources_of(job: RLJob) -> list[Source]:
    """Return what the processes of the job's agent load; nothing for ``singleTurn``."""
    agent = job.spec.rollout.agent
    if agent.kind == "custom":
        return [AgentClass(agent.path, agent.class_name)]
    if agent.kind == "endpoint":
        return [] if agent.sandbox else [Program(list(agent.command), agent.path, agent.function)]
    tools = [_tool_source(tool) for tool in agent.tools if not tool.sandbox]
    if agent.kind == "environment":
        return [_environment_source(job), *tools]
    return tools if agent.kind == "tools" else []


async def described_tools(job: RLJob, *, loads_all: bool = False) -> list[dict[str, Any]]:
    """Return the tools that prompts list for the model, in OpenAI's format; empty for agents without tools.

    Args:
        loads_all: Load the class or program of an agent without tools as well, and raise ``RefusedError`` for it.
    """
    kind = job.spec.rollout.agent.kind
    if kind == "singleTurn" or (kind in ("custom", "endpoint") and not loads_all):
        return []
    processes = AgentProcesses(sources_of(job))
    try:
        return [tool.schema for tool in await opened_tools(job, processes)]
    finally:
        await processes.close()


async def opened_tools(job: RLJob, processes: AgentProcesses) -> list[Tool]:
    """Return every tool that the job's samples may call: those that the processes load, then those of machines.

    Raises ``RefusedError`` if a file cannot be used, or two tools have the same name.
    """
    tools = [*await processes.open(), *sandbox_tools(job.spec.rollout.agent)]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise RefusedError(f"spec.rollout.agent.tools: two tools have the name {twice!r}; rename or remove one")
    return tools


def environment_server(job: RLJob) -> EnvironmentServer | None:
    """Return the server that is the job's environment; None for a class.

    ``arguments.secrets`` of a session are filled from the environment variables that they name. Raises
    ``RefusedError`` if one is not set.
    """
    agent = job.spec.rollout.agent
    url = environment_url(agent.environment) if agent.environment else agent.url
    if not url:
        return None
    arguments = dict(agent.arguments)
    if isinstance(secrets := arguments.get("secrets"), dict):
        arguments["secrets"] = {
            name: _filled(f"arguments.secrets.{name}", str(value)) for name, value in secrets.items()
        }
    spread = _spread_server(job, agent.environment)
    return EnvironmentServer(url, arguments, agent.environment_timeout_seconds, spread)


def _environment_source(job: RLJob) -> Source:
    agent = job.spec.rollout.agent
    limit_s = agent.environment_timeout_seconds
    if server := environment_server(job):
        return server
    model = job.spec.model.model_dump(mode="json")
    return EnvironmentClass(
        agent.path, agent.class_name, agent.arguments, agent.max_turns, limit_s, model, agent.sandbox
    )


def _spread_server(job: RLJob, name: str) -> str:
    """Return the field that spreads an environment's connections over servers; empty if one server has them all."""
    for number, server in enumerate(job.spec.environments):
        if server.name == name and server.replicas > 1 and server.session_affinity == "none":
            return f"spec.environments[{number}].replicas: {server.replicas}"
    return ""


def _tool_source(tool: ToolSpec) -> Source:
    if tool.mcp is not None:
        headers = {name: _filled(f"tools: mcp.headers.{name}", value) for name, value in tool.mcp.headers.items()}
        return McpServer(tool.mcp.url, list(tool.mcp.command), tool.timeout_seconds, headers)
    if tool.config:
        return VerlTools(tool.config, tool.timeout_seconds)
    return FunctionTool(tool.path, tool.function, tool.timeout_seconds)


def _filled(field: str, value: str) -> str:
    """Replace ``${NAME}`` by the environment variable."""

    def variable(found: re.Match[str]) -> str:
        if (content := os.environ.get(found[1])) is None:
            raise RefusedError(
                f"spec.rollout.agent.{field} needs the environment variable {found[1]}, which is "
                "not set. Set it for rollouts and trainer (on Kubernetes from a Secret, in their pod's env)"
            )
        return content

    return _VARIABLE.sub(variable, value)
