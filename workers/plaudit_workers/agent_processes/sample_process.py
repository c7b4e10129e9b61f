"""Run one sample's tool calls, or its agent, in its process until the rollout closes the connection.

Forked by ``template``. Plain functions run in threads, async ones on the event loop. Nothing here enforces a limit: the
rollout has the process killed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from plaudit_reward.isolation.child.lifetime import end_when_closed
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.frames import Frames, frame
from plaudit_workers.agent_processes.messages import (
    AgentDone,
    AgentFailed,
    AskEnvironment,
    CallTool,
    EnvironmentReply,
    FromSample,
    Generated,
    GenerateTurn,
    RunAgent,
    ToolResult,
    ToSample,
    to_sample,
)
from plaudit_workers.agent_processes.program_process import serve_program
from plaudit_workers.agent_processes.sources.environments.environment import answer
from plaudit_workers.agent_processes.sources.user_code import error_text, plain_text
from plaudit_workers.agent_processes.trajectory import FinishedSample, Trajectory

if TYPE_CHECKING:
    from plaudit_workers.agent_processes.sources.load import LoadedSources

_READ_BYTES = 1 << 20


def run_sample(connection: socket.socket, loaded: LoadedSources) -> None:
    """Serve one sample."""
    end_when_closed(connection)
    if loaded.program is not None:
        serve_program(connection, loaded.program)
        return
    asyncio.run(_Sample(connection, loaded).run())


class _Sample:
    def __init__(self, connection: socket.socket, loaded: LoadedSources) -> None:
        self._connection = connection
        self._loaded = loaded
        self._frames = Frames()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Serve until the rollout closes the connection."""
        self._connection.setblocking(True)
        asyncio.get_running_loop().add_reader(self._connection, self._read)
        await self._closed.wait()

    def _read(self) -> None:
        data = self._connection.recv(_READ_BYTES)
        if not data:
            self._closed.set()
            return
        for body in self._frames.feed(data):
            for message in to_sample.decode(body):
                self._obey(message)

    def _obey(self, message: ToSample) -> None:
        if isinstance(message, CallTool):
            self._start(self._call(message))
        elif isinstance(message, AskEnvironment):
            self._start(self._ask(message))
        elif isinstance(message, RunAgent):
            self._start(self._run_agent(message))
        elif isinstance(message, Generated):
            future = self._awaited.pop(message.id)
            if message.sample is None:
                future.set_exception(RuntimeError(message.error))
            else:
                future.set_result(message.sample)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, message: FromSample) -> None:
        self._connection.sendall(frame([message]))

    async def _call(self, call: CallTool) -> None:
        began = time.perf_counter()
        try:
            answer = await self._loaded.tools[call.tool].call(call.arguments, call.create_arguments)
            text, seconds = plain_text(answer.text), time.perf_counter() - began
            data = frame([ToolResult(call.id, "ok", text, seconds, answer.reward, bool(answer.done))])
        except BaseException as error:  # the user's code: sys.exit and the like included
            outcome: Literal["error", "killed"] = "killed" if isinstance(error, InfrastructureError) else "error"
            data = frame([ToolResult(call.id, outcome, error_text(error), time.perf_counter() - began)])
        self._connection.sendall(data)

    async def _ask(self, question: AskEnvironment) -> None:
        assert self._loaded.environment is not None
        try:
            reply = await answer(self._loaded.environment, question)
            frame([reply])
        except BaseException as error:  # the user's code: sys.exit and the like included
            outcome: Any = "infra_error" if isinstance(error, InfrastructureError | OSError) else "data_error"
            reply = EnvironmentReply(question.id, outcome, error_text(error))
        if question.method == "finish":  # also where there is no reward: other functions may read them
            reply = msgspec.structs.replace(reply, attributes=await self._loaded.environment.attributes())
        self._send(reply)

    async def _run_agent(self, message: RunAgent) -> None:
        assert self._loaded.agent is not None
        try:
            trajectory = await self._loaded.agent.run(message.prompt, self._generate)
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"run returned {type(trajectory).__name__}, not a Trajectory")
            data = frame([AgentDone(msgspec.to_builtins(trajectory, enc_hook=_plain))])
        except BaseException as error:  # the user's code: sys.exit and the like included
            data = frame([AgentFailed(error_text(error))])
        self._connection.sendall(data)

    async def _generate(self, ids: Any, max_tokens: int | None = None) -> Any:
        number = len(self._awaited) + time.monotonic_ns()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited[number] = future
        self._send(GenerateTurn(number, [int(token) for token in ids], max_tokens))
        return msgspec.convert(await future, FinishedSample)


def _plain(value: Any) -> Any:
    """Turn numpy's numbers and arrays, which agents may put into a trajectory, into Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a trajectory cannot hold a {type(value).__name__}")
