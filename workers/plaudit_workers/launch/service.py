"""Report where a scoring service is and how to submit to it."""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from plaudit_workers.client.connect import ServiceError, connect
from plaudit_workers.job.spec.rewards.reward import GatewaySpec
from plaudit_workers.launch.plan import TOKENS_FOLDER
from plaudit_workers.launch.redis.private_files import write_private
from plaudit_workers.launch.redis.server import free_port
from plaudit_workers.stream.connection import RedisAddress

ADDRESS_FILE = "service.json"
"""In the run's folder, for ``plaudit submit`` on the same machine; only its owner can read it."""

_READY_WITHIN_S = 600.0
_STRETCH_S = 600.0


@dataclass(frozen=True)
class GatewayAddress:
    """Hold the HTTP address of a service and the token of its one caller; empty without a gateway."""

    url: str = ""
    token: str = field(default="", repr=False)

    @property
    def port(self) -> int:
        """Return the port of the address; 0 without one."""
        return urlsplit(self.url).port or 0


def gateway_address(folder: Path, spec: GatewaySpec) -> GatewayAddress:
    """Return the address of a run's gateway, and write its token into the run's folder.

    A run that is resumed keeps token and, if it is free, port, so that callers that wait find the service again.
    """
    if not spec.replicas:
        return GatewayAddress()
    earlier = _earlier_address(folder)
    port = spec.port or (earlier.port if _is_free(earlier.port) else free_port())
    token = earlier.token or secrets.token_urlsafe(32)
    write_private(folder / TOKENS_FOLDER / "client", token)
    return GatewayAddress(f"http://127.0.0.1:{port}", token)


def write_address(folder: Path, redis: RedisAddress, gateway: GatewayAddress) -> None:
    """Write the addresses, token and password for clients into the run's folder."""
    content = {"run": folder.name, **asdict(gateway), "redis": asdict(redis)}
    write_private(folder / ADDRESS_FILE, json.dumps(content))


async def print_when_ready(folder: Path, redis: RedisAddress, gateway: GatewayAddress, console: Console) -> None:
    """Print the addresses and an example once a reward worker has opened all scorers."""
    try:
        transport, service = await connect(redis, run=folder.name, job="", wait_s=_READY_WITHIN_S)
    except ServiceError:
        return
    await transport.close()
    console.out(
        f"scoring service {service.job} is ready: {gateway.url or redis.url}, run {folder.name} (Ctrl-C ends it)\n"
        f"  {'URL and token' if gateway.url else 'address and password'}: {folder / ADDRESS_FILE}\n"
        f"  plaudit submit --runs-folder {folder.parent} --run {folder.name} samples.jsonl -o scores.jsonl",
        highlight=False,
    )


def _earlier_address(folder: Path) -> GatewayAddress:
    try:
        written = json.loads((folder / ADDRESS_FILE).read_text())
        return GatewayAddress(written["url"], written["token"])
    except (OSError, ValueError, KeyError):
        return GatewayAddress()


def _is_free(port: int) -> bool:
    if not port:
        return False
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def stretches_of_uptime() -> int:
    """Count periods of 10 minutes. A service closes no steps, so its processes regain their restarts with each."""
    return int(time.monotonic() / _STRETCH_S)
