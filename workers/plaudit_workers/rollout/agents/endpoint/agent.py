"""``agent.kind: endpoint``: run a program on a prompt, and answer its requests from the policy.

The program runs in the sample's own process (``agent_processes.program_process``). It gets nothing but its prompt, the
URL and a key; whatever it does between its requests is its own affair.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from typing import Any

from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_wire.sample import AgentReward
from plaudit_workers.agent_processes.messages import FromSample, ProgramEnded, RunAgentProgram
from plaudit_workers.agent_processes.processes import AgentProcesses, ProcessDiedError, SampleProcess
from plaudit_workers.rollout.agents.agent import AgentError, Generate, Trajectory
from plaudit_workers.rollout.agents.endpoint.chat_format import ChatFormats
from plaudit_workers.rollout.agents.endpoint.response import MODEL
from plaudit_workers.rollout.agents.endpoint.server import EndpointServer
from plaudit_workers.rollout.agents.endpoint.session import EndpointSession, LimitIgnoredError

logger = get_logger(__name__)

_LOOPBACK = "127.0.0.1,localhost"


class EndpointAgent:
    """Run a program for each sample; ``processes`` have loaded it.

    Args:
        max_turns: most requests of a sample.
        limit_s: seconds after which a sample's process is killed.
    """

    def __init__(
        self,
        processes: AgentProcesses,
        server: EndpointServer,
        chat_formats: ChatFormats,
        max_turns: int,
        limit_s: float,
    ) -> None:
        self._processes = processes
        self._server = server
        self._chat_formats = chat_formats
        self._max_turns = max_turns
        self._limit_s = limit_s
        self._reported: set[str] = set()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Run the program on one prompt.

        Raises:
            AgentError: it ended without a finished turn.
            EngineFailedError: the engine broke.
        """
        session = EndpointSession(prompt, generate, self._chat_formats, self._max_turns)
        with self._server.serving(session) as key:
            ended = await self._program(prompt, session, key)
        self._report(session.replaced)
        trajectory = session.trajectory()
        if trajectory is None:
            raise _without_a_turn(ended.failure)
        trajectory.reward = ended.reward
        if not session.at_limit:  # a limit that the policy reached is no failure of the program
            trajectory.failure = ended.failure
        return trajectory

    async def _program(self, prompt: Prompt, session: EndpointSession, key: str) -> ProgramEnded:
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="plaudit-program-")
        process: SampleProcess | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                process = await self._processes.fork()
                order = RunAgentProgram(_document(prompt), self._environment(key), folder)
                return await _end(process, order, session)
        except TimeoutError:
            reason = f"the program took longer than {self._limit_s:g} s"
            return ProgramEnded(failure=AgentReward("timeout", reason=reason))
        except LimitIgnoredError:
            return ProgramEnded()
        except ProcessDiedError as error:
            return ProgramEnded(failure=AgentReward("infra_error", reason=f"the process of the program {error}"))
        finally:
            if process is not None:
                process.close()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _environment(self, key: str) -> dict[str, str]:
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), _LOOPBACK)))
        return {
            "OPENAI_BASE_URL": self._server.url,
            "OPENAI_API_BASE": self._server.url,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }

    def _report(self, replaced: set[str]) -> None:
        """Log each replaced parameter once."""
        for name in sorted(replaced - self._reported):
            logger.warning("the program's request has a parameter that the job's own value replaces", parameter=name)
        self._reported |= replaced


async def _end(process: SampleProcess, order: RunAgentProgram, session: EndpointSession) -> ProgramEnded:
    """Run the program to its end.

    Raises:
        ProcessDiedError: its process ended.
        EngineFailedError: the engine broke.
        LimitIgnoredError: it goes on asking after its sample reached a limit.
    """
    ended: asyncio.Future[ProgramEnded] = asyncio.get_running_loop().create_future()

    def on_message(message: FromSample) -> bool:
        if not isinstance(message, ProgramEnded) or ended.done():
            return False
        ended.set_result(message)
        return True

    process.on_message = on_message
    process.send(order)
    first: list[asyncio.Future[Any]] = [ended, process.died, session.failed]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if session.failed.done():
        session.failed.result()
    if not ended.done():
        raise ProcessDiedError(process.died.result())
    return ended.result()


def _without_a_turn(failure: AgentReward | None) -> AgentError:
    reason = "it made no request" if failure is None else failure.reason
    message = f"the program ended without a turn of the policy: {reason}"
    if failure is None or failure.outcome == "scored" or failure.outcome == "skipped":
        return AgentError(message)
    return AgentError(message, failure.outcome)


def _document(prompt: Prompt) -> dict[str, Any]:
    """Return what the program reads about its prompt."""
    return {
        "messages": prompt.messages or [{"role": "user", "content": prompt.prompt}],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "split": prompt.split,
        "group": prompt.group,
    }
