"""Say what every machine of an agent can do, whichever provider runs it.

The providers are ``machine`` (a folder and namespaces of this host), ``container`` (docker or podman) and ``pods``
(Kubernetes). ``verification`` knows them by these protocols alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from plaudit_sandbox.machine import CommandEnd, MachineLimits


class VerifierMachine(Protocol):
    """A machine made ready for tests: nothing of the agent runs, ``/tests`` and ``/logs/verifier`` are new."""

    @property
    def changed_programs(self) -> Sequence[str]:
        """Paths of the image's programs that the agent replaced, and of files that programs run by themselves."""

    async def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], directory: str
    ) -> CommandEnd:
        """Run the tests to their end or to a limit; afterwards no process is left. Call it once."""

    def reward_file(self, name: str) -> str | None:
        """Return the text of a file of ``/logs/verifier``; None if there is none.

        Read by the provider, by no program that the agent could replace. Raises ``DataError`` for a link, a folder, a
        pipe, or a file above ``LARGEST_REWARD_BYTES``.
        """


class AgentMachine(Protocol):
    """One machine. All methods may raise ``InfrastructureError``; those without ``async`` block."""

    @property
    def name(self) -> str:
        """A name for messages."""

    @property
    def limits(self) -> MachineLimits:
        """Its size."""

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
        """Run a command to its end or to a limit; ``mounts`` are folders of the host that it finds at these places."""

    def upload(self, folder: Path, place: str) -> None:
        """Copy the files of a host's folder into a new machine, before the agent's first command."""

    def disk_bytes(self) -> int:
        """Return the space that the agent's files take."""

    def for_tests(self, tests: Path) -> AbstractAsyncContextManager[VerifierMachine]:
        """End the agent's processes, and yield a machine with its files and with ``tests`` as ``/tests``."""

    def remove(self) -> None:
        """Remove the machine with all that it holds; nothing happens if it is gone."""
