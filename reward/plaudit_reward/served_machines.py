"""Use the machines that a run's broker holds (``python -m plaudit_workers.sandboxes``), as any other provider's.

Rollouts and reward workers run users' code, so they have no right to make machines where these are pods: they ask the
broker over HTTP. Requests and answers are JSON, side by side below; both sides import them from here. A request that
is not done within ``POLL_S`` is answered with 202, and its client sends it again: whoever sends a request a second
time, for whatever reason, gets the answer of the first.

| ``POST`` | request | answer |
| --- | --- | --- |
| ``/v1/claim`` | ``ClaimRequest`` | ``ClaimedMachine``, once a place is free and the machine is made |
| ``/v1/run`` | ``RunRequest`` | ``CommandEnd`` |
| ``/v1/verify`` | ``VerifyRequest`` | ``Verdict`` |
| ``/v1/release`` | ``ReleaseRequest`` | ``{}`` |
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from plaudit_job.spec.rljob import SandboxesSpec
from plaudit_job.tasks import Task
from plaudit_reward.http import MAX_RESPONSE_BYTES, HttpClient, NoResponseError, error_message
from plaudit_reward.providers import Provider, TaskMachine, provider_of
from plaudit_sandbox import machine as folders
from plaudit_sandbox.machine import CommandEnd, MachineLimits, SeparateTests
from plaudit_sandbox.verification import Verdict, VerifierMachine
from plaudit_wire.backoff import backoff_s
from plaudit_wire.errors import CallTimeoutError, DataError, InfrastructureError, RefusedError

URL_VARIABLE: Final = "PLAUDIT_SANDBOXES_URL"
"""Where the broker is, for processes that use its machines; unset: they make machines themselves."""
TOKEN_VARIABLE: Final = "PLAUDIT_SANDBOXES_TOKEN_FILE"  # noqa: S105
"""The file with the token that the broker expects."""
POLL_S: Final = 20.0
"""Seconds after which an unfinished request is answered with 202."""
_ANSWERED_WITHIN_S = POLL_S + 20.0
_PATIENCE_S = 600.0
"""Seconds without an answer after which a request fails: a broker that died is replaced sooner."""
_LEAVE_WITHIN_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECTIONS = 512
Answer = TypeVar("Answer")


class ClaimRequest(msgspec.Struct, frozen=True):
    """Ask for the machine of a sample; ``machine`` is its name in the run, which no other attempt has."""

    machine: str
    task: str = ""
    """The task's folder; empty for a row that is none."""
    digest: str = ""


class ClaimedMachine(msgspec.Struct, frozen=True):
    """Describe a machine that was made."""

    directory: str
    waited_s: float
    """Seconds until a place was free."""
    cpus: float = 0.0
    """As in ``TaskMachine``."""


class RunRequest(msgspec.Struct, frozen=True):
    """Run a command; a machine runs one at a time."""

    machine: str
    id: str
    command: list[str]
    timeout_s: float
    environment: dict[str, str]
    directory: str
    stdin: bytes


class VerifyRequest(msgspec.Struct, frozen=True):
    """Run the tests of a task in a sample's machine."""

    machine: str
    id: str
    task: str
    digest: str
    timeout_s: float
    environment: dict[str, str]


class ReleaseRequest(msgspec.Struct, frozen=True):
    """Remove machines; those that are gone do not matter."""

    machines: list[str] = []
    all: bool = False
    """Remove all of the run, such as after its last step."""
    keep: bool = False
    """Keep before what ``sandboxes.keep`` says."""


class BrokerRefusal(msgspec.Struct, frozen=True):
    """Describe why a request failed, as ``error`` of the answer: 422 for a ``data_error``, else an ``infra_error``."""

    type: str
    message: str


class Nothing(msgspec.Struct, frozen=True):
    """Answer without content."""


class ServedProvider:
    """Let the run's broker make, hold and remove machines. ``own`` is the provider that the broker uses."""

    def __init__(self, own: Provider, url: str, token: str, *, patience_s: float = _PATIENCE_S) -> None:
        self._own = own
        self._url = url.rstrip("/")
        self._token = token
        self._patience_s = patience_s
        self._client: HttpClient | None = None

    def require(self) -> None:
        """Do nothing: the broker checks what it needs, and until it is ready claims wait."""

    def problem(self, task: Task) -> str:
        """Return what the broker's provider says."""
        return self._own.problem(task)

    def make(self, folder: Path, task: Task | None) -> TaskMachine:
        """Claim a machine, as ``claim`` does."""
        claimed = asyncio.run(self._alone("/v1/claim", _claim(folder, task), ClaimedMachine, self._patience_s))
        return self._made(folder, claimed)

    async def claim(self, folder: Path, task: Task | None) -> TaskMachine:
        """Wait for a place and a machine.

        Raises ``DataError`` for a task that changed, ``InfrastructureError`` if no machine can be made.
        """
        return self._made(folder, await self.ask("/v1/claim", _claim(folder, task), ClaimedMachine))

    async def release(self, folder: Path) -> None:
        """Remove one machine; give up soon, because the broker removes the machines of ended samples itself."""
        try:
            await self.ask("/v1/release", ReleaseRequest([_name(folder)]), Nothing, _LEAVE_WITHIN_S)
        finally:
            await asyncio.to_thread(folders.remove, folder)

    def find(self, folder: Path, task: Task | None) -> TaskMachine:
        """Return the machine of a sample; whether it is gone shows when it is used."""
        return TaskMachine(ServedMachine(self, _name(folder)), "")

    def remove(self, *places: Path) -> None:
        """Have machines removed, with what this side keeps of them."""
        if places:
            request = ReleaseRequest([_name(folder) for folder in places])
            asyncio.run(self._alone("/v1/release", request, Nothing, _LEAVE_WITHIN_S))
        folders.remove(*places)

    def keep(self, *places: Path) -> None:
        """Have machines removed, after their files were put into their folders here for tests that run again."""
        if places:
            request = ReleaseRequest([_name(folder) for folder in places], keep=True)
            asyncio.run(self._alone("/v1/release", request, Nothing, _LEAVE_WITHIN_S))

    def end(self) -> None:
        """Have all machines of the run removed."""
        asyncio.run(self._alone("/v1/release", ReleaseRequest(all=True), Nothing, _LEAVE_WITHIN_S))

    async def ask(self, path: str, request: msgspec.Struct, kind: type[Answer], patience_s: float = 0.0) -> Answer:
        """Send a request until it is answered, in the event loop that always asks.

        Raises ``DataError`` and ``InfrastructureError`` as the broker did, the second also without an answer in time.
        """
        if self._client is None:
            self._client = HttpClient(max_connections=_CONNECTIONS, bearer_token=self._token, key_field=TOKEN_VARIABLE)
        return await self._ask(self._client, path, request, kind, patience_s or self._patience_s)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    def _made(self, folder: Path, claimed: ClaimedMachine) -> TaskMachine:
        return TaskMachine(ServedMachine(self, _name(folder)), claimed.directory, claimed.waited_s, claimed.cpus)

    async def _alone(self, path: str, request: msgspec.Struct, kind: type[Answer], patience_s: float) -> Answer:
        """Send a request in an event loop of a thread's own."""
        async with HttpClient(max_connections=1, bearer_token=self._token, key_field=TOKEN_VARIABLE) as client:
            return await self._ask(client, path, request, kind, patience_s)

    async def _ask(
        self, client: HttpClient, path: str, request: msgspec.Struct, kind: type[Answer], patience_s: float
    ) -> Answer:
        body, failures, until_s = msgspec.json.encode(request), 0, time.monotonic() + patience_s
        while True:
            try:
                response = await client.post(
                    self._url + path, body, _ANSWERED_WITHIN_S, max_bytes=4 * MAX_RESPONSE_BYTES
                )
            except (NoResponseError, CallTimeoutError) as error:
                problem = str(error)
            else:
                if response.status == 200:
                    return msgspec.json.decode(response.body, type=kind)
                if response.status == 202:
                    failures, until_s = 0, time.monotonic() + patience_s
                    continue
                problem = error_message(response.body, self._token)
                if response.status == 422:
                    raise DataError(problem)
                if response.status != 503:
                    raise InfrastructureError(problem)
            if time.monotonic() > until_s:
                raise InfrastructureError(f"the broker of the machines gave no answer for {patience_s:g} s: {problem}")
            failures += 1
            await asyncio.sleep(backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))


class ServedMachine:
    """A machine that the broker holds: an ``AgentMachine`` whose files the broker copies and whose tests it runs."""

    limits = MachineLimits()
    """What the broker's machine has may be less."""

    def __init__(self, provider: ServedProvider, name: str) -> None:
        self.name = name
        self._provider = provider

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] = {},
        directory: str = "/app",
        mounts: Mapping[str, Path] = {},
        stdin: bytes = b"",
    ) -> CommandEnd:
        """Run a command to its end or to a limit, which the broker keeps. ``mounts`` cannot be given."""
        if mounts:
            raise InfrastructureError("folders of this host cannot be mounted in a machine of the broker")
        given = dict(environment), directory, stdin
        request = RunRequest(self.name, secrets.token_hex(8), list(command), timeout_s, *given)
        return await self._provider.ask("/v1/run", request, CommandEnd)

    async def verify(self, task: Task, *, timeout_s: float, environment: Mapping[str, str]) -> Verdict:
        """Have the task's tests run; see ``plaudit_sandbox.verification.verify``."""
        about = str(task.folder), task.digest
        request = VerifyRequest(self.name, secrets.token_hex(8), *about, timeout_s, dict(environment))
        return await self._provider.ask("/v1/verify", request, Verdict)

    def upload(self, folder: Path, place: str) -> None:
        """Refuse: the broker copies a task's files when it makes the machine."""
        raise InfrastructureError(f"{folder} cannot be copied into a machine of the broker")

    def disk_bytes(self) -> int:
        """Return 0: the broker counts."""
        return 0

    def for_tests(
        self, tests: Path, separate: SeparateTests | None = None
    ) -> AbstractAsyncContextManager[VerifierMachine]:
        """Refuse: tests run by ``verify``."""
        raise InfrastructureError("the broker runs the tests of its machines")

    def remove(self) -> None:
        """Have the machine removed."""
        self._provider.remove(Path(self.name))


def run_provider(spec: SandboxesSpec, run_folder: Path, environment: Mapping[str, str] = os.environ) -> Provider:
    """Return the provider by which a process of a run gets its machines: the run's broker, where it has one.

    Raises ``RefusedError``.
    """
    own, url = provider_of(spec, run_folder), environment.get(URL_VARIABLE, "")
    return ServedProvider(own, url, read_token(environment.get(TOKEN_VARIABLE, ""))) if url else own


def read_token(file: str) -> str:
    """Read the token of a broker; raise ``RefusedError``."""
    try:
        token = Path(file).read_text().strip() if file else ""
    except OSError as error:
        raise RefusedError(f"{TOKEN_VARIABLE}: {file} cannot be read: {error.strerror}") from error
    if not token:
        raise RefusedError(f"{TOKEN_VARIABLE} names no file with a token: the operator sets both")
    return token


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _claim(folder: Path, task: Task | None) -> ClaimRequest:
    return ClaimRequest(_name(folder), str(task.folder), task.digest) if task else ClaimRequest(_name(folder))
