"""Turn a prompt into a trajectory by calling ``generate`` any number of times: the protocol of agents.

Here are ``agent.kind: singleTurn``, one response to the prompt, and ``custom``, a user's class.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import msgspec

from plaudit_wire.messages import Prompt
from plaudit_wire.records import SandboxRecord, SandboxWork
from plaudit_workers.agents.messages import (
    AgentDone,
    AgentFailed,
    FinishedSample,
    FromSample,
    Generated,
    GenerateTurn,
    RunAgent,
    Trajectory,
    prompt_messages,
    prompt_tokens,
)
from plaudit_workers.agents.processes import AgentProcesses, ProcessDiedError, SampleProcess
from plaudit_workers.rollout.engine import Chat, EngineFailedError

_MOST_TURNS_AT_ONCE = 64


class Generate(Protocol):
    """Continue a sample; passed to ``Agent.run``.

    The n-th call of a sample has its own seed, so a repeated run gives the same trajectory. Time spent in ``generate``
    counts as generation; the rest of ``run`` counts as tools.
    """

    async def __call__(
        self, ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = (), chat: Chat | None = None
    ) -> FinishedSample:
        """Continue ``ids`` with the prompt's sampling parameters.

        Args:
            max_tokens: most tokens of this turn; at most, and by default, the prompt's own limit.
            stop: texts that end this turn, beside the prompt's own; they stay part of it.
            chat: the messages of ``ids``, where the agent keeps them.
        """


class Agent(Protocol):
    """Generate one sample of a prompt. One instance serves all samples of a process, many at a time."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Return the trajectory; an exception fails this sample only.

        Raises:
            AgentError: the sample has no trajectory; it ends without a score, for this reason.
        """


class AgentError(Exception):
    """Report that what holds a sample failed before there was a trajectory: a user's code, or its server."""

    def __init__(
        self,
        reason: str,
        outcome: Literal["data_error", "infra_error", "timeout"] = "data_error",
        sandbox: SandboxRecord | None = None,
    ) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.sandbox = sandbox
        """The times of the sample's machine; None: it has none."""
        self.trajectory: Trajectory | None = None
        """What the sample had done, with this failure; None if it had done nothing."""


class MachineLostError(AgentError):
    """Report that a sample's machine broke through no fault of the policy: the sample can begin again in another."""

    def __init__(self, reason: str, trajectory: Trajectory | None = None) -> None:
        super().__init__(reason, "infra_error")
        self.trajectory = trajectory


class MachineCounts:
    """Count the machines of a rollout's samples, for its heartbeat."""

    def __init__(self) -> None:
        self._held = self._starting = 0
        self._waits_since_s: list[float] = []
        """When each wait began (monotonic)."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a sample that waits for a place for its machine."""
        began_s = time.monotonic()
        self._waits_since_s.append(began_s)
        try:
            yield
        finally:
            self._waits_since_s.remove(began_s)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Count a machine that is being made."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1

    def change_held(self, count: int) -> None:
        """Add ``count`` to the machines in which conversations work."""
        self._held += count

    @property
    def work(self) -> SandboxWork:
        """Return the counts of now."""
        now_s = time.monotonic()
        wait_s = now_s - min(self._waits_since_s, default=now_s)
        return SandboxWork(self._held, self._starting, len(self._waits_since_s), wait_s)


class SingleTurn:
    """Call the policy once."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Return the policy's response unchanged."""
        trajectory = Trajectory()
        response = await generate(prompt_tokens(prompt), chat=Chat(prompt_messages(prompt)))
        trajectory.prompt_ids = response.prompt_ids
        trajectory.add_turn(response)
        return trajectory


class CustomAgent:
    """Run the user's class in a process for each sample, at most ``limit_s``; answer its calls of ``generate``."""

    def __init__(self, processes: AgentProcesses, limit_s: float) -> None:
        self._processes = processes
        self._limit_s = limit_s

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Run the class on one prompt; raise ``AgentError`` if it raises, its process ends, or it passes its limit."""
        process = await self._processes.fork()
        try:
            async with asyncio.timeout(self._limit_s):
                return await _CustomRun(process, generate).result(prompt)
        except TimeoutError:
            raise AgentError(f"no trajectory within {self._limit_s:g} s", "timeout") from None
        except ProcessDiedError as error:
            raise AgentError(f"the process that ran it {error}", "infra_error") from error
        finally:
            process.close()


class _CustomRun:
    """Answer the process's calls of ``generate`` for one sample, until it has a trajectory."""

    def __init__(self, process: SampleProcess, generate: Generate) -> None:
        self._process = process
        self._generate = generate
        self._ended: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def result(self, prompt: Prompt) -> Trajectory:
        self._process.on_message = self._on_message
        self._process.died.add_done_callback(lambda died: self._fail(ProcessDiedError(died.result())))
        self._process.send(RunAgent(prompt))
        try:
            return await self._ended
        finally:
            for task in self._tasks:
                task.cancel()

    def _on_message(self, message: FromSample) -> bool:
        if self._ended.done():
            return False
        if isinstance(message, GenerateTurn):
            if len(self._tasks) >= _MOST_TURNS_AT_ONCE:
                self._fail(AgentError(f"it asked for more than {_MOST_TURNS_AT_ONCE} turns at once"))
                return True
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, AgentFailed):
            self._fail(AgentError(message.reason))
        elif isinstance(message, AgentDone):
            try:
                self._ended.set_result(msgspec.convert(message.trajectory, Trajectory, strict=False))
            except msgspec.ValidationError as error:
                self._fail(AgentError(f"its trajectory is invalid: {error}"))
        else:
            return False
        return True

    async def _answer(self, call: GenerateTurn) -> None:
        try:
            sample = await self._generate(call.ids, call.max_tokens)
        except EngineFailedError as error:
            self._fail(error)
        except Exception as error:
            self._process.send(Generated(call.id, error=f"{type(error).__name__}: {error}"))
        else:
            self._process.send(Generated(call.id, msgspec.to_builtins(sample)))

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
