"""Call the tools and the environment of one sample in its process, which the first call forks; kill it at a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from plaudit_wire.records import CallOutcome
from plaudit_workers.agent_processes.messages import (
    AskEnvironment,
    CallTool,
    EnvironmentReply,
    FromSample,
    Tool,
    ToolResult,
)
from plaudit_workers.agent_processes.processes import AgentProcesses, ProcessDiedError, SampleProcess
from plaudit_workers.rollout.agents.chat.tool_calls import ParsedCall


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Hold the end of one call."""

    outcome: CallOutcome
    text: str
    """The text that the model reads."""
    call_s: float = 0.0
    """Seconds from the request to the answer."""
    wait_s: float = 0.0
    """The part of it in which the process was started."""
    reward: float | None = None
    done: bool = False
    """The environment ended the episode."""

    @property
    def failed(self) -> bool:
        """Return True if it passed its limit or its process ended, which ``onToolFailure`` decides on."""
        return self.outcome in ("timeout", "killed")


class ToolProcess:
    """Run the tools of one sample.

    Args:
        create_arguments: by the tool's name, the arguments of ``create`` of verl's tools.
    """

    def __init__(
        self, processes: AgentProcesses, tools: Mapping[str, Tool], create_arguments: Mapping[str, dict[str, Any]]
    ) -> None:
        self._processes = processes
        self._tools = tools
        self._create_arguments = create_arguments
        self._process: SampleProcess | None = None
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()

    @property
    def died(self) -> bool:
        """Return True if the process ended."""
        return self._process is not None and self._process.died.done()

    async def call(self, calls: Sequence[ParsedCall]) -> list[CallEnd]:
        """Run the calls at the same time; return their ends in order. Never raises."""
        began = time.monotonic()
        try:
            process = await self._forked()
        except ProcessDiedError as error:
            return [CallEnd("killed", f"no process can be started: {error}")] * len(calls)
        wait_s = time.monotonic() - began
        return await asyncio.gather(*(self._call(process, call, began, wait_s) for call in calls))

    async def ask(self, method: Literal["reset", "step", "finish"], limit_s: float, **fields: Any) -> EnvironmentReply:
        """Ask the environment; a failure is an outcome of the reply. Never raises.

        Args:
            limit_s: seconds after which the process is killed.
            fields: of ``AskEnvironment``.
        """
        process = self._process
        try:
            if method == "reset":
                process = await self._forked()
            if process is None or process.died.done():
                raise ProcessDiedError("ended before")
            self._num_calls += 1
            number = self._num_calls
            answer = self._awaited[number] = asyncio.get_running_loop().create_future()
            process.send(AskEnvironment(number, method, **fields))
            reply: EnvironmentReply = await asyncio.wait_for(answer, limit_s)
            return reply
        except TimeoutError:
            reason = f"{method} of the environment gave no answer within {limit_s:g} s"
            if process is not None:
                process.kill(f"was killed: {reason}")
            return EnvironmentReply(0, "timeout", reason)
        except ProcessDiedError as error:
            return EnvironmentReply(0, "infra_error", f"the environment's process {error}")

    async def _forked(self) -> SampleProcess:
        if self._process is None or self._process.died.done():
            process = self._process = await self._processes.fork()
            process.on_message = self._on_message
            process.died.add_done_callback(self._on_death)
        return self._process

    async def _call(self, process: SampleProcess, call: ParsedCall, began: float, wait_s: float) -> CallEnd:
        self._num_calls += 1
        number, limit_s = self._num_calls, self._tools[call.name].timeout_s
        answer = self._awaited[number] = asyncio.get_running_loop().create_future()
        process.send(CallTool(number, call.name, call.arguments, dict(self._create_arguments.get(call.name, {}))))
        outcome: CallOutcome
        try:
            result = await asyncio.wait_for(answer, limit_s)
            return CallEnd(result.outcome, result.text, time.monotonic() - began, wait_s, result.reward, result.done)
        except TimeoutError:
            outcome, text = "timeout", f"{call.name} gave no result within {limit_s:g} s"
            process.kill(f"was killed: {text}")
        except ProcessDiedError as error:
            outcome, text = "killed", f"the process that ran {call.name} {error}"
        finally:
            self._awaited.pop(number, None)
        return CallEnd(outcome, text, time.monotonic() - began, wait_s)

    def _on_message(self, message: FromSample) -> bool:
        answer = self._awaited.pop(message.id, None) if isinstance(message, ToolResult | EnvironmentReply) else None
        if answer is None:
            return False
        if not answer.done():
            answer.set_result(message)
        return True

    def _on_death(self, died: asyncio.Future[str]) -> None:
        for answer in self._awaited.values():
            if not answer.done():
                answer.set_exception(ProcessDiedError(died.result()))
