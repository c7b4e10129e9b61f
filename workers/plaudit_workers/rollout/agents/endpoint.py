"""``agent.kind: endpoint``: run a program on a prompt, and answer its requests from the policy.

The program runs in the sample's own process, or in its machine. It gets nothing but its prompt, the URL and a key;
whatever it does between its requests is its own affair. The server speaks OpenAI's Chat Completions and Models API on
loopback: on the rollout's, and on that of each machine, which has no other way out. Machines that are pods reach it at
the address of the rollout's pod, the only one that their network policies open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from plaudit_metrics.service.http_server import HttpServer, listening_socket
from plaudit_sandbox.confinement import abi
from plaudit_sandbox.machine import LOOPBACK_PORT
from plaudit_wire.errors import InfrastructureError
from plaudit_wire.logs import get_logger
from plaudit_wire.messages import Prompt
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.messages import (
    FromSample,
    ProgramEnded,
    RunAgentProgram,
    Trajectory,
    prompt_messages,
)
from plaudit_workers.agents.processes import AgentProcesses, ProcessDiedError, SampleProcess, sample_seed
from plaudit_workers.rollout.agents.agent import AgentError, Generate
from plaudit_workers.rollout.agents.machine_tools import MachineTools, SampleMachine
from plaudit_workers.rollout.agents.session import (
    ChatFormats,
    Completion,
    EndpointSession,
    LimitIgnoredError,
    RequestError,
)
from plaudit_workers.rollout.engine import EngineFailedError

logger = get_logger(__name__)
MODEL = "policy"
"""The id of the model; requests may name any."""
_END_WITHIN_S = 2
_MOST_BYTES = 4 << 20
_LOOPBACK = ("127.0.0.1", "localhost")
_MOST_CONNECTIONS = 64
"""Of one machine: a policy could otherwise use up the rollout's descriptors, or the others' share of them."""
_BACKLOG_OF_PODS = 1024
_INSTRUCTION = "{instruction}"
"""The word of a machine's command that stands for the prompt's last message."""
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class MachineProgram:
    """A program that runs in the sample's machine."""

    machines: MachineTools
    command: Sequence[str]
    path: str = ""
    """A file of this host for its last word; empty: none."""


class EndpointAgent:
    """Run a program for each sample: ``max_turns`` requests within ``limit_s``.

    Args:
        processes: have loaded the program, unless it runs in machines.
        ground_truth: the program reads the answer of its prompt, and so may what the policy writes.
        inside: the program of machines; None: it runs in the sample's process.
    """

    def __init__(
        self,
        processes: AgentProcesses,
        server: EndpointServer,
        chat_formats: ChatFormats,
        max_turns: int,
        limit_s: float,
        *,
        ground_truth: bool = False,
        inside: MachineProgram | None = None,
    ) -> None:
        self._ground_truth = ground_truth
        self._inside = inside
        self._processes = processes
        self._server = server
        self._chat_formats = chat_formats
        self._max_turns = max_turns
        self._limit_s = limit_s
        self._reported: set[str] = set()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Run the program on one prompt; raise ``AgentError`` if it ends without a finished turn."""
        if self._inside is None:
            return await self._captured(prompt, generate, self._in_process)
        return await self._inside.machines.play(prompt, partial(self._played, prompt, generate, self._inside))

    async def _played(
        self, prompt: Prompt, generate: Generate, inside: MachineProgram, machine: SampleMachine
    ) -> Trajectory:
        trajectory = await self._captured(prompt, generate, partial(self._in_machine, machine, inside))
        if trajectory.failure is not None and trajectory.failure.outcome == "timeout":
            # A policy could use up the program's time whenever it fears the tests of its machine.
            trajectory.failure, trajectory.finish_reason = None, "timeout"
        return trajectory

    async def _captured(
        self,
        prompt: Prompt,
        generate: Generate,
        program: Callable[[Prompt, EndpointSession, str], Awaitable[ProgramEnded]],
    ) -> Trajectory:
        session = EndpointSession(prompt, generate, self._chat_formats, self._max_turns)
        with self._server.serving(session) as key:
            ended = await program(prompt, session, key)
        self._report(session.replaced)
        trajectory = session.trajectory()
        if trajectory is None:
            raise _without_a_turn(ended.failure, session.refusal)
        trajectory.reward = ended.reward
        if not session.at_limit:  # a limit that the policy reached is no failure of the program
            trajectory.failure = ended.failure
        return trajectory

    async def _in_process(self, prompt: Prompt, session: EndpointSession, key: str) -> ProgramEnded:
        folder = await asyncio.to_thread(_make_folder)
        process: SampleProcess | None = None
        try:
            async with asyncio.timeout(self._limit_s):
                process = await self._processes.fork()
                document = _document(prompt, ground_truth=self._ground_truth)
                environment = {**_environment(self._server.url, key), "TMPDIR": folder}
                order = RunAgentProgram(document, environment, folder, _hidden())
                return await _end(process, order, session)
        except TimeoutError:
            return _late(self._limit_s)
        except LimitIgnoredError:
            return ProgramEnded()
        except ProcessDiedError as error:
            return ProgramEnded(failure=AgentReward("infra_error", reason=f"the process of the program {error}"))
        finally:
            if process is not None:
                process.close()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _in_machine(
        self, machine: SampleMachine, program: MachineProgram, prompt: Prompt, session: EndpointSession, key: str
    ) -> ProgramEnded:
        """Run the program in the sample's machine.

        What it prints is no reward, and a bad end no failure: the policy works beside it, and could bring both about.
        """
        document = _document(prompt, ground_truth=self._ground_truth)
        given, limit_s = document["messages"][-1]["content"], machine.limit_s(self._limit_s)
        of_pods = self._server.url_of_pods
        running = asyncio.ensure_future(
            machine.run_program(
                [given if word == _INSTRUCTION else word for word in program.command],
                program.path,
                json.dumps(document).encode(),
                _environment(of_pods or f"http://127.0.0.1:{LOOPBACK_PORT}/v1", key),
                limit_s,
                None if of_pods else self._server.listening,
            )
        )
        try:
            await _first(session, running)
            ended = running.result()
        except LimitIgnoredError:
            return ProgramEnded()
        except InfrastructureError as error:
            return ProgramEnded(failure=AgentReward("infra_error", reason=str(error)))
        finally:
            running.cancel()
            await asyncio.wait([running])
        if ended.ending == "timeout":
            return _late(limit_s)
        how = f"ended with exit code {ended.exit_code}" if ended.ending == "exited" else f"has no more {ended.ending}"
        if ended.exit_code:
            logger.info("a program in a machine failed", group=prompt.group, end=how)
        if session.num_turns == 0:  # the policy had no part in it
            raise AgentError(f"the program {how} without a turn of the policy: {ended.output[-_SHOWN_CHARACTERS:]}")
        return ProgramEnded()

    def _report(self, replaced: set[str]) -> None:
        """Log each replaced parameter once."""
        for name in sorted(replaced - self._reported):
            logger.warning("the program's request has a parameter that the job's own value replaces", parameter=name)
        self._reported |= replaced


def _environment(url: str, key: str) -> dict[str, str]:
    own = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = ",".join(dict.fromkeys(filter(None, (own, *_LOOPBACK, urlsplit(url).hostname))))
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


async def _end(process: SampleProcess, order: RunAgentProgram, session: EndpointSession) -> ProgramEnded:
    """Run the program to its end."""
    ended: asyncio.Future[ProgramEnded] = asyncio.get_running_loop().create_future()

    def on_message(message: FromSample) -> bool:
        if not isinstance(message, ProgramEnded) or ended.done():
            return False
        ended.set_result(message)
        return True

    process.on_message = on_message
    process.send(order)
    await _first(session, ended, process.died)
    if not ended.done():
        raise ProcessDiedError(process.died.result())
    return ended.result()


async def _first(session: EndpointSession, *ends: asyncio.Future[Any]) -> None:
    """Return when one of these is done; raise what the session failed with."""
    await asyncio.wait([*ends, session.failed], return_when=asyncio.FIRST_COMPLETED)
    if session.failed.done():
        session.failed.result()


def _late(limit_s: float) -> ProgramEnded:
    return ProgramEnded(failure=AgentReward("timeout", reason=f"the program took longer than {limit_s:g} s"))


def _without_a_turn(failure: AgentReward | None, refusal: str) -> AgentError:
    reason = "" if failure is None else failure.reason
    request = f"its request was refused: {refusal}" if refusal else "" if reason else "it made no request"
    message = f"the program ended without a turn of the policy: {'. '.join(filter(None, (request, reason)))}"
    if failure is None or failure.outcome == "scored" or failure.outcome == "skipped":
        return AgentError(message)
    return AgentError(message, failure.outcome)


def _make_folder() -> str:
    """Make the working folder of one program.

    Those of all runs lie in one folder, which ``hide_neighbours`` takes from each program. It lies where a program
    hardly needs to make files beside it: not in ``/tmp`` if there is another place.
    """
    places = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir()]  # noqa: S108 (a folder of this user)
    place = next(place for place in places if place and os.access(place, os.W_OK | os.X_OK))
    shared = Path(place) / f"plaudit-programs-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    about = shared.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():  # somebody else's
        shared = Path(tempfile.mkdtemp(prefix="plaudit-programs-", dir=place))
    return tempfile.mkdtemp(prefix="sample-", dir=shared)


def _hidden() -> list[str]:
    """Return the run's folder: under ``plaudit run`` it holds Redis's password, and it holds answers of all samples."""
    run_folder = os.environ.get("PLAUDIT_RUN_FOLDER")
    return [run_folder] if run_folder else []


def _document(prompt: Prompt, *, ground_truth: bool) -> dict[str, Any]:
    """Return what the program reads about its prompt."""
    return {
        "messages": prompt_messages(prompt),
        "data_source": prompt.data_source,
        **({"ground_truth": prompt.ground_truth} if ground_truth else {}),
        "extra_info": prompt.extra_info,
        "split": prompt.split,
        "group": prompt.group,
        "seed": sample_seed.get(),
    }


class EndpointServer:
    """Serve the programs of a rollout's samples, as an asynchronous context manager.

    A request belongs to the sample whose key it carries; keys are random and end with their sample.

    Args:
        of_pods: Host and port at which programs in pods reach it; None: none of them do.
    """

    def __init__(self, of_pods: tuple[str, int] | None = None) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._socket = listening_socket("127.0.0.1", 0)
        self._of_pods = listening_socket(*of_pods) if of_pods else None
        self._open = contextlib.AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/{path:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
        ]
        self._server = HttpServer(Starlette(routes=routes), end_within_s=_END_WITHIN_S)

    async def __aenter__(self) -> Self:
        if not abi():
            logger.warning(
                "this kernel has no Landlock: an agent's program can read the keys and folders of other samples' "
                "programs. Start it with Landlock (Linux 5.13 or newer, lsm=landlock,…)"
            )
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))
        if self._of_pods is not None:
            await self._open.enter_async_context(self.listening(self._of_pods, many=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()

    @property
    def url(self) -> str:
        """Return the value of ``OPENAI_BASE_URL``."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"

    @property
    def url_of_pods(self) -> str:
        """Return that value for a program in a pod; empty if none of them reach it."""
        if self._of_pods is None:
            return ""
        host, port = self._of_pods.getsockname()
        return f"http://{host}:{port}/v1"

    @contextmanager
    def serving(self, session: EndpointSession) -> Iterator[str]:
        """Serve a sample; the key is that of its program."""
        key = f"sk-plaudit-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            session.close()

    @asynccontextmanager
    async def listening(self, place: socket.socket, *, many: bool = False) -> AsyncIterator[None]:
        """Serve those who connect to a further socket, as of a machine's loopback device; close it at the end.

        Args:
            many: Machines with an address each connect to it, and not one with as many addresses as it likes.
        """
        states: dict[str, ServerState] = {}
        entrance = partial(_Entrance, self._server.config, states, many)
        backlog = _BACKLOG_OF_PODS if many else _MOST_CONNECTIONS
        server = await asyncio.get_running_loop().create_server(entrance, sock=place, backlog=backlog)
        try:
            yield
        finally:
            server.close()
            for connection in [each for state in states.values() for each in state.connections]:
                connection.shutdown()

    async def _complete(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _unauthorized()
        try:
            async with session.room(_most_bytes(request)):
                chat = await session.read(await _body(request))
                completion = await _unless_disconnected(request, session.complete(chat))
        except RequestError as error:
            session.refusal = str(error)
            return _error(400, str(error), param=error.param, code=error.code)
        except ClientDisconnect:
            return Response(status_code=499)
        except EngineFailedError as error:  # the session ends its sample, and the engine its rollout
            return _error(503, str(error), "server_error")
        except Exception as error:  # it costs this request only
            logger.warning("a request of an agent's program failed", error=repr(error))
            return _error(500, f"{type(error).__name__}: {error}", "server_error")
        if completion is None:
            return Response(status_code=499)
        if chat.stream:
            events = _completion_events(completion, chat.model, include_usage=chat.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(_completion_document(completion, chat.model))

    async def _models(self, request: Request) -> Response:
        if self._session(request) is None:
            return _unauthorized()
        return JSONResponse({"object": "list", "data": [_model_document(MODEL)]})

    async def _model(self, request: Request) -> Response:
        if self._session(request) is None:
            return _unauthorized()
        return JSONResponse(_model_document(request.path_params["name"]))

    async def _unknown(self, request: Request) -> Response:
        message = (
            f"{request.method} {request.url.path} is not served: a policy in training speaks Chat Completions "
            "(POST /v1/chat/completions) and Models. Configure the client to use Chat Completions"
        )
        if (session := self._session(request)) is not None:
            session.refusal = message
        return _error(404, message, code="unknown_url")

    def _session(self, request: Request) -> EndpointSession | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None


class _Entrance(asyncio.Protocol):
    """Hand a new connection to uvicorn, or close it where its machine has as many as it may have.

    Args:
        states: The open connections, by the address of their machine if they are of many.
    """

    def __init__(self, config: uvicorn.Config, states: dict[str, ServerState], many: bool) -> None:
        self._config = config
        self._states = states
        self._many = many

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it."""
        peer = transport.get_extra_info("peername") if self._many else None
        machine: str = peer[0] if peer else ""
        if machine not in self._states:
            for gone in [name for name, state in self._states.items() if not state.connections]:
                del self._states[gone]
        state = self._states.setdefault(machine, ServerState())
        if len(state.connections) >= _MOST_CONNECTIONS:
            transport.close()
            return
        made: Any = self._config.http_protocol_class
        protocol = made(config=self._config, server_state=state, app_state={})
        cast(asyncio.Transport, transport).set_protocol(protocol)
        protocol.connection_made(transport)


def _most_bytes(request: Request) -> int:
    """Return how large a request's body can be before it is refused."""
    said = request.headers.get("content-length", "")
    return min(int(said), _MOST_BYTES) if said.isdecimal() else _MOST_BYTES


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise RequestError(f"the request has more than {_MOST_BYTES >> 20} MiB")
    return b"".join(parts)


async def _unless_disconnected(request: Request, work: Any) -> Completion | None:
    """Return the completion; None if the client closed its connection or the sample ended first."""
    completion: asyncio.Task[Completion] = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({completion, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not completion.done() or completion.cancelled():
            return None
        return completion.result()
    finally:
        completion.cancel()
        disconnected.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _unauthorized() -> Response:
    message = "the key belongs to no running sample: use OPENAI_API_KEY of this program's environment"
    return _error(401, message, "authentication_error", code="invalid_api_key")


def _error(
    status: int, message: str, kind: str = "invalid_request_error", *, param: str | None = None, code: str | None = None
) -> Response:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)


def _completion_document(completion: Completion, model: str) -> dict[str, Any]:
    """Return a whole answer."""
    choice = {"index": 0, "message": completion.message, "finish_reason": completion.finish_reason, "logprobs": None}
    return {**_head(completion, model, "chat.completion"), "choices": [choice], "usage": _usage(completion)}


def _completion_events(completion: Completion, model: str, *, include_usage: bool) -> Iterator[str]:
    """Yield an answer as server-sent events, in few parts."""

    def event(document: dict[str, Any]) -> str:
        return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"

    head = _head(completion, model, "chat.completion.chunk")
    message = completion.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    deltas += [{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(message.get("tool_calls") or [])]
    for delta in deltas:
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": completion.finish_reason}]})
    if include_usage:
        yield event({**head, "choices": [], "usage": _usage(completion)})
    yield "data: [DONE]\n\n"


def _model_document(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "plaudit"}


def _head(completion: Completion, model: str, kind: str) -> dict[str, Any]:
    identity = {"id": f"chatcmpl-{completion.number}", "object": kind}
    return {**identity, "created": int(time.time()), "model": model or MODEL}


def _usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": completion.num_tokens,
        "total_tokens": completion.num_prompt_tokens + completion.num_tokens,
    }
