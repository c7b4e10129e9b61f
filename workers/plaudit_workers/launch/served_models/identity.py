"""Identify the model's server that a process runs, and publish the server's address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from plaudit_workers.job.model_server_command import HOST_VARIABLE, PORT_VARIABLE, SERVER_VARIABLE
from plaudit_workers.launch.redis.server import free_port

FOLDER = "model-servers"
"""In the run's folder: one folder a scorer, one file a server."""
_EVERYWHERE = "0.0.0.0"  # noqa: S104


@dataclass(frozen=True)
class ServerIdentity:
    """Identify a server."""

    scorer: str
    number: int | None
    """None where a Service gives callers the address."""
    host: str
    port: int
    """0: one that is free when the server starts."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServerIdentity:
        """Read ``PLAUDIT_MODEL_SERVER`` (``scorer/number``, or ``scorer``) and its host and port.

        ``PLAUDIT_MODEL_SERVER_HOST`` is this node if empty, ``PLAUDIT_MODEL_SERVER_PORT`` a free port.
        """
        scorer, _, number = environment[SERVER_VARIABLE].partition("/")
        host = environment.get(HOST_VARIABLE) or own_address()
        return cls(scorer, int(number) if number else None, host, int(environment.get(PORT_VARIABLE) or 0))

    def with_port(self) -> ServerIdentity:
        """Return the same with a port to listen on."""
        return self if self.port else replace(self, port=free_port(self.host))

    @property
    def url(self) -> str:
        """Return the address for requests from this machine."""
        return f"http://{'127.0.0.1' if self.host == _EVERYWHERE else self.host}:{self.port}"

    def publish(self, run_folder: Path) -> None:
        """Write the file that gives callers the address."""
        if self.number is None:
            return
        file = self.file(run_folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(f"{self.url}\n")
        new.rename(file)

    def withdraw(self, run_folder: Path) -> None:
        """Remove that file."""
        if self.number is not None:
            self.file(run_folder).unlink(missing_ok=True)

    def file(self, run_folder: Path) -> Path:
        """Return the file that holds its address."""
        return run_folder / FOLDER / self.scorer / f"{self.number}.url"


def own_address() -> str:
    """Return the address under which other nodes of a Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
