"""Run one process of a job as a Ray actor: the actor's process *is* the role."""

from __future__ import annotations

import asyncio
import importlib
import os
import uuid
from pathlib import Path

from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import configure_logs
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, RESTARTED, ProcessEnding, ProcessSettings, serve_guarded


class ProcessActor:
    """Run one role until it ends or is stopped.

    A crash ends the whole process, so that no broken state is reused: Ray starts a new one, and the supervisor calls
    ``run`` again.
    """

    def __init__(self, name: str, serve: str) -> None:
        # A new name at each start: others claim the work of a dead process, and nobody mistakes it for this one's.
        os.environ["PLAUDIT_WORKER"] = f"{name}-{uuid.uuid4().hex[:8]}"
        if _was_restarted():
            os.environ[RESTARTED] = "1"
        self._serve = serve
        self._settings = ProcessSettings.from_environment()
        self._stop = asyncio.Event()
        self._running: asyncio.Task[ProcessEnding] | None = None
        _redirect_output(self._settings.log_file)
        _write_pid(self._settings.log_file)
        configure_logs(self._settings.log_file, worker=self._settings.worker)

    async def run(self, extra_environment: dict[str, str]) -> tuple[int, str]:
        """Serve the role; return its exit code and the reason if it was refused or failed.

        A second call waits for the same role: the reply to the first may be lost while the process lives.
        """
        if self._running is None:
            os.environ.update(extra_environment)
            self._running = asyncio.create_task(self._run())
        ending = await asyncio.shield(self._running)
        return ending.code, ending.message

    async def _run(self) -> ProcessEnding:
        module, _, function = self._serve.partition(":")
        serve = getattr(importlib.import_module(module), function)
        ending = await serve_guarded(serve, self._settings, self._stop)
        if ending.code == EXIT_CRASHED:
            os._exit(EXIT_CRASHED)
        return ending

    async def stop(self) -> None:
        """Ask the role to finish its work and to end, as SIGTERM asks a pod."""
        self._stop.set()

    async def address(self) -> tuple[str, int]:
        """Return this node's address and a free port on it, for the rendezvous of ranks."""
        import ray

        from plaudit_workers.launch.redis.server import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


def _was_restarted() -> bool:
    import ray

    return ray.is_initialized() and bool(ray.get_runtime_context().was_current_actor_reconstructed)


async def serve_metrics(_: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve metrics under ``plaudit run``. The service is below workers in the import order, with its own settings."""
    from plaudit_metrics.service.serve import CannotServeError, ServiceSettings, serve

    try:
        await serve(ServiceSettings.from_environment(), stop)
    except CannotServeError as error:
        raise RefusedError(str(error)) from error
    return EXIT_DONE


def _write_pid(log_file: Path | None) -> None:
    """Write the process id and the name of this process beside its log, for whoever wants to inspect it."""
    if log_file is not None:
        log_file.with_suffix(".pid").write_text(f"{os.getpid()}\n")
        log_file.with_suffix(".worker").write_text(os.environ["PLAUDIT_WORKER"] + "\n")


def _redirect_output(log_file: Path | None) -> None:
    """Send the output of libraries to the log of the process, beside its JSON lines."""
    if log_file is None:
        return
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
