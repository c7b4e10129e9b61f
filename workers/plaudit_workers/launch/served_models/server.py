"""Run one server of a served model: start the engine as a child, watch it, let it take turns on its GPU.

Under ``plaudit run`` the server's address is in ``<run folder>/model-servers/<scorer>/<number>.url`` while it is
healthy, a folder that reward workers read. On Kubernetes only servers that sleep during updates run here; a Service has
their addresses. If the child dies or stops responding, this process ends and is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from plaudit_reward.served.sleep_token import SLEEP_TOKEN_VARIABLE
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import get_logger
from plaudit_workers.gpu_start import GPU_SHARE, alone_on_gpu
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.job.model_server_command import server_command, server_environment
from plaudit_workers.job.spec.rewards.scorers import ServedModelSpec
from plaudit_workers.launch.redis.server import die_with_parent
from plaudit_workers.launch.served_models.identity import ServerIdentity
from plaudit_workers.launch.served_models.server_client import ServerClient, ServerDiedError
from plaudit_workers.launch.served_models.turns import ServerTurns
from plaudit_workers.process import EXIT_DONE, RESTARTED, ProcessSettings
from plaudit_workers.rollout.engines.vllm_platform import is_cpu_build
from plaudit_workers.stream.connection import Transport
from plaudit_workers.supervision import Supervised, unless_stopped

logger = get_logger(__name__)

_CHECK_STARTING_EVERY_S = 0.25
_CHECK_HEALTHY_EVERY_S = 2.0
_UNRESPONSIVE_AFTER_S = 30.0
"""A server that was healthy and has not responded for so long is restarted."""
_DRAIN_WITHIN_S = 20.0
_TAIL_LINES = 8


async def serve(settings: ProcessSettings, stop: asyncio.Event) -> int:
    """Serve one replica of a scorer's model until ``stop`` is set.

    Raises:
        RefusedError: the engine ended before it was ready; the message quotes the end of its log.
        ServerDiedError: it ended or stopped responding later, or at the start after that: the GPU's memory may not be
            free yet.
    """
    identity = ServerIdentity.from_environment()
    scorers = load_job(settings.job_path).spec.reward.scorers
    model = next(each.served for each in scorers if each.name == identity.scorer and each.served is not None)
    if not model.sleep_during_updates:
        await _serve(settings, identity, model, stop)
        return EXIT_DONE
    transport = await Transport.open(settings.redis, settings.run, stop=stop)
    try:
        turns = ServerTurns(settings.worker, transport)
        async with Supervised() as tasks:
            tasks.start(turns.beats())
            if await unless_stopped(stop, turns.begin()):
                await _serve(settings, identity, model, stop, turns)
    finally:
        await transport.close()
    return EXIT_DONE


async def _serve(
    settings: ProcessSettings,
    identity: ServerIdentity,
    model: ServedModelSpec,
    stop: asyncio.Event,
    turns: ServerTurns | None = None,
) -> None:
    identity = identity.with_port()
    sleep_token = secrets.token_urlsafe() if turns is not None else ""
    client = ServerClient(identity.url, sleep_token)
    async with contextlib.AsyncExitStack() as stack:
        async with alone_on_gpu(settings.run):
            child = await _start(model, identity, settings.log_file, sleep_token)
            stack.push_async_callback(_end, child)
            stack.callback(identity.withdraw, settings.run_folder)
            stack.push_async_callback(client.close)
            logger.info("starting the model server", scorer=identity.scorer, pid=child.pid, url=identity.url)
            if not await _until_ready(child, client, stop, settings, identity.scorer):
                return
        logger.info("serving", url=identity.url)
        identity.publish(settings.run_folder)
        async with Supervised() as tasks:
            if turns is not None:
                tasks.start(turns.follow(client))
            await _watch(child, client, stop)


async def _start(
    model: ServedModelSpec, identity: ServerIdentity, log_file: Path | None, sleep_token: str
) -> asyncio.subprocess.Process:
    gpu, share = not is_cpu_build(), float(os.environ.get(GPU_SHARE, "1"))
    # Code that comes with the model must not reach the run's Redis.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PLAUDIT_REDIS_")}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab")) if log_file else None
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *server_command(model, identity.scorer, identity.host, identity.port, with_gpu=gpu, gpu_share=share),
            env={**inherited, **server_environment(model, with_gpu=gpu), SLEEP_TOKEN_VARIABLE: sleep_token},
            stdout=log,
            stderr=log,
            start_new_session=True,  # a group of its own: an engine's own children are ended with it
            preexec_fn=die_with_parent,
        )


async def _until_ready(
    child: asyncio.subprocess.Process, client: ServerClient, stop: asyncio.Event, settings: ProcessSettings, scorer: str
) -> bool:
    """Wait until the engine has loaded, however long that takes. Return False when ``stop`` is set first."""
    while not stop.is_set():
        if child.returncode is not None:
            if child.returncode < 0:
                cause = signal.Signals(-child.returncode).name
                raise ServerDiedError(
                    f"the server of scorer {scorer} was killed by {cause} while it started (out of memory?)"
                )
            failure = ServerDiedError if os.environ.get(RESTARTED) else RefusedError
            raise failure(f"the model server did not start. Its log ends:\n{_tail(settings.log_file)}")
        if await client.healthy():
            return True
        await _pause(stop, _CHECK_STARTING_EVERY_S)
    return False


async def _watch(child: asyncio.subprocess.Process, client: ServerClient, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    answered_s = loop.time()
    while not stop.is_set():
        if child.returncode is not None:
            raise ServerDiedError(f"the engine ended with exit code {child.returncode}")
        if await client.healthy():
            answered_s = loop.time()
        elif loop.time() - answered_s > _UNRESPONSIVE_AFTER_S:
            raise ServerDiedError(f"the engine has not responded for {_UNRESPONSIVE_AFTER_S:.0f} s")
        await _pause(stop, _CHECK_HEALTHY_EVERY_S, child)


async def _pause(stop: asyncio.Event, seconds: float, child: asyncio.subprocess.Process | None = None) -> None:
    """Sleep, but not beyond a stop or the child's end."""
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
    if child is not None:
        waiting.append(asyncio.ensure_future(child.wait()))
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


async def _end(child: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, allow time to drain, then kill its process group."""
    if child.returncode is None:
        child.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_WITHIN_S):
                await child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


def _tail(log_file: Path | None) -> str:
    if log_file is None or not log_file.exists():
        return "(no log)"
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
