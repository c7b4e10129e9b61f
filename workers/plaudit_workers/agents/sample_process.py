"""Run one sample's tool calls, agent or program in its process, until the rollout closes the connection.

Forked by ``template``. Tools and agents: plain functions run in threads, async ones on the event loop. Programs: a
function runs on the main thread, where any library works; a command runs as a child in the same process group, so
killing the group ends both. Nothing here enforces a limit: the rollout has the process killed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from plaudit_sandbox.confinement import hide_neighbours
from plaudit_sandbox.lifetime import end_if_forked, end_when_closed
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.frames import Frames, frame, signal_name
from plaudit_wire.plain import error_text, plain, plain_text
from plaudit_wire.printable import shown
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.environment import answer
from plaudit_workers.agents.functions import MOST_CHARACTERS, cut_text
from plaudit_workers.agents.load import LoadedSources, RunnableProgram
from plaudit_workers.agents.messages import (
    AgentDone,
    AgentFailed,
    AskEnvironment,
    CallTool,
    EnvironmentReply,
    FinishedSample,
    FromSample,
    Generated,
    GenerateTurn,
    MachineReply,
    ProgramEnded,
    RunAgent,
    RunAgentProgram,
    ToolResult,
    ToSample,
    Trajectory,
    to_sample,
)

_PROMPT_FILE = "prompt.json"
_READ_BYTES = 1 << 20
_LINE_BYTES = 1 << 16
_TAIL_LINES = 20
_MOST_CHARACTERS = 4000
_OUTCOMES = "scored, data_error, infra_error, timeout, skipped"


def run_sample(connection: socket.socket, loaded: LoadedSources, seed: int) -> None:
    """Serve one sample."""
    end_when_closed(connection)
    if loaded.environment is not None:
        loaded.environment.seed = seed
    if loaded.program is not None:
        _serve_program(connection, loaded.program)
    else:
        asyncio.run(_Sample(connection, loaded).run())


class _Sample:
    def __init__(self, connection: socket.socket, loaded: LoadedSources) -> None:
        self._connection = connection
        self._loaded = loaded
        self._frames = Frames()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._sandbox = loaded.environment.sandbox if loaded.environment is not None else None
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Serve until the rollout closes the connection."""
        self._connection.setblocking(True)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, self._read)
        if self._sandbox is not None:
            self._sandbox.connect(lambda message: loop.call_soon_threadsafe(self._send, message))
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
        elif isinstance(message, MachineReply):
            assert self._sandbox is not None
            self._sandbox.receive(message)
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
        try:
            answer = await self._loaded.tools[call.tool].call(call.arguments, call.create_arguments)
            end_if_forked()
            data = frame([ToolResult(call.id, "ok", cut_text(answer.text), answer.reward, bool(answer.done))])
        except BaseException as error:  # the user's code: sys.exit and the like included
            end_if_forked(error)
            outcome: Literal["error", "killed"] = "killed" if issubclass(type(error), InfrastructureError) else "error"
            data = frame([ToolResult(call.id, outcome, error_text(error, MOST_CHARACTERS))])
        self._connection.sendall(data)

    async def _ask(self, question: AskEnvironment) -> None:
        assert self._loaded.environment is not None
        try:
            reply = await answer(self._loaded.environment, question)
            end_if_forked()
        except BaseException as error:  # the user's code: sys.exit and the like included
            end_if_forked(error)
            outcome: Any = "infra_error" if issubclass(type(error), (InfrastructureError, OSError)) else "data_error"
            reply = EnvironmentReply(question.id, outcome, error_text(error, MOST_CHARACTERS))
        if question.method == "finish":  # also where there is no reward: other functions may read them
            reply = msgspec.structs.replace(reply, attributes=await self._loaded.environment.attributes())
        self._send(reply)

    async def _run_agent(self, message: RunAgent) -> None:
        assert self._loaded.agent is not None
        try:
            trajectory = await self._loaded.agent.run(message.prompt, self._generate)
            end_if_forked()
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"run returned {type(trajectory).__name__}, not a Trajectory")
            trajectory.make_plain()
            data = frame([AgentDone(msgspec.to_builtins(trajectory, enc_hook=plain))])  # arrays of token ids
        except BaseException as error:  # the user's code: sys.exit and the like included
            end_if_forked(error)
            data = frame([AgentFailed(error_text(error, MOST_CHARACTERS))])
        self._connection.sendall(data)

    async def _generate(self, ids: Any, max_tokens: int | None = None) -> Any:
        number = len(self._awaited) + time.monotonic_ns()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited[number] = future
        self._send(GenerateTurn(number, [int(token) for token in ids], max_tokens))
        return msgspec.convert(await future, FinishedSample)


def _serve_program(connection: socket.socket, program: RunnableProgram) -> None:
    """Receive the order to run the program, run it, report its end."""
    frames = Frames()
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            return
        for body in frames.feed(data):
            for order in to_sample.decode(body):
                assert isinstance(order, RunAgentProgram)
                connection.sendall(frame([_run_program(program, order)]))
                return


def _run_program(program: RunnableProgram, order: RunAgentProgram) -> ProgramEnded:
    """Run a program to its end; never raises."""
    os.chdir(order.folder)
    os.environ.update(order.environment)
    Path(_PROMPT_FILE).write_text(json.dumps(order.document, ensure_ascii=False), encoding="utf-8")
    hide_neighbours(Path(order.folder), map(Path, order.hidden))
    if program.function is None:
        return _run_command(program.command)

    async def awaited(returned: Any) -> Any:
        return await returned

    try:
        returned = program.function(order.document)
        if inspect.isawaitable(returned):
            returned = asyncio.run(awaited(returned))
        end_if_forked()
        return ProgramEnded(_reward_of(returned))
    except BaseException as error:  # the user's code, also of what it returned: sys.exit and the like included
        end_if_forked(error)
        return _failed("data_error", error_text(error, _MOST_CHARACTERS))


def _run_command(command: list[str]) -> ProgramEnded:
    with open(_PROMPT_FILE, "rb") as prompt:
        try:
            process = subprocess.Popen(command, stdin=prompt, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            return _failed("infra_error", f"{command[0]} cannot be started: {error}")
    assert process.stdout is not None
    assert process.stderr is not None
    printed: deque[str] = deque(maxlen=_TAIL_LINES)
    errors: deque[str] = deque(maxlen=_TAIL_LINES)
    readers = [
        threading.Thread(target=_read, args=pair, daemon=True)
        for pair in ((process.stdout, printed), (process.stderr, errors))
    ]
    for reader in readers:
        reader.start()
    status = process.wait()
    for reader in readers:
        reader.join(timeout=1.0)  # a child that outlives the program may hold the pipe
    if status == 0:
        return ProgramEnded(_printed_reward(printed))
    ended = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with {status}"
    tail = "\n".join(errors or printed)[-_MOST_CHARACTERS:]
    return _failed("infra_error" if status < 0 else "data_error", f"the program {ended}: {tail}")


def _read(pipe: IO[bytes], lines: deque[str]) -> None:
    """Keep the last lines of a pipe, and print them for the rollout's log."""
    for line in iter(lambda: pipe.readline(_LINE_BYTES), b""):
        text = line.decode(errors="replace").rstrip("\n")
        lines.append(text)
        print(text, file=sys.stdout, flush=True)


def _printed_reward(lines: deque[str]) -> AgentReward | None:
    """Return the reward in the last line, where that is a JSON object with ``reward`` or ``outcome``."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        return None
    return _reward_of(value) if isinstance(value, dict) else None


def _reward_of(value: Any) -> AgentReward | None:
    """Read what a program returned or printed as a reward.

    That is a number, ``{"reward": number}`` or ``{"outcome": …, "reason": …}``; anything else is no reward.
    """
    if isinstance(value, AgentReward):
        value = {"outcome": value.outcome, "reason": value.reason, "reward": value.value}
    if isinstance(value, dict):
        outcome = value.get("outcome", "scored")
        if outcome != "scored":
            reason = plain_text(str(value.get("reason") or ""))[:_MOST_CHARACTERS]
            try:
                return msgspec.convert({"outcome": outcome, "reason": reason}, AgentReward)
            except msgspec.ValidationError:
                problem = f"the program's outcome is {shown(outcome)}; known are {_OUTCOMES}"
                return AgentReward("data_error", reason=problem)
        value = value.get("reward")
    if value is None or isinstance(value, str | bytes | list | tuple | set):
        return None
    try:
        number = float(value)
    except Exception:  # an object's own code
        return AgentReward("data_error", reason=f"the program's reward {shown(value)} is no number")
    if not math.isfinite(number):
        return AgentReward("data_error", reason=f"the program's reward is {number}")
    return AgentReward("scored", number)


def _failed(outcome: Literal["data_error", "infra_error"], reason: str) -> ProgramEnded:
    return ProgramEnded(failure=AgentReward(outcome, reason=plain_text(reason[:_MOST_CHARACTERS])))
