"""Run a sample's agent that is a program, in the sample's process; report its reward or its failure.

Forked by ``template``, as ``sample_process`` is. A function runs on the main thread, where any library works; a command
runs as a child in the same process group, so killing the group ends both.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from plaudit_wire.frames import Frames, frame
from plaudit_wire.sample import AgentReward
from plaudit_wire.signals import signal_name
from plaudit_workers.agent_processes.messages import ProgramEnded, RunAgentProgram, to_sample
from plaudit_workers.agent_processes.sources.program import RunnableProgram
from plaudit_workers.agent_processes.sources.user_code import error_text

PROMPT_FILE = "prompt.json"
_READ_BYTES = 1 << 20
_LINE_BYTES = 1 << 16
_TAIL_LINES = 20
_MOST_CHARACTERS = 4000
_OUTCOMES = "scored, data_error, infra_error, timeout, skipped"


def serve_program(connection: socket.socket, program: RunnableProgram) -> None:
    """Receive the order to run the program, run it, report its end."""
    frames = Frames()
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            return
        for body in frames.feed(data):
            for order in to_sample.decode(body):
                assert isinstance(order, RunAgentProgram)
                connection.sendall(frame([run_program(program, order)]))
                return


def run_program(program: RunnableProgram, order: RunAgentProgram) -> ProgramEnded:
    """Run a program to its end; never raises."""
    os.chdir(order.folder)
    os.environ.update(order.environment)
    Path(PROMPT_FILE).write_text(json.dumps(order.document, ensure_ascii=False), encoding="utf-8")
    return (
        _run_command(program.command) if program.function is None else _run_function(program.function, order.document)
    )


def _run_function(function: Any, document: dict[str, Any]) -> ProgramEnded:
    try:
        returned = function(document)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except BaseException as error:  # the user's code: sys.exit and the like included
        return _failed("data_error", error_text(error))
    return ProgramEnded(reward_of(returned))


async def _awaited(returned: Any) -> Any:
    return await returned


def _run_command(command: list[str]) -> ProgramEnded:
    with open(PROMPT_FILE, "rb") as prompt:
        try:
            process = subprocess.Popen(command, stdin=prompt, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            return _failed("infra_error", f"{command[0]} cannot be started: {error}")
    assert process.stdout is not None
    assert process.stderr is not None
    printed: deque[str] = deque(maxlen=_TAIL_LINES)
    errors: deque[str] = deque(maxlen=_TAIL_LINES)
    readers = [
        threading.Thread(target=_read, args=pair, daemon=True)
        for pair in ((process.stdout, printed), (process.stderr, errors))
    ]
    for reader in readers:
        reader.start()
    status = process.wait()
    for reader in readers:
        reader.join(timeout=1.0)  # a child that outlives the program may hold the pipe
    if status == 0:
        return ProgramEnded(_printed_reward(printed))
    ended = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with {status}"
    tail = "\n".join(errors or printed)[-_MOST_CHARACTERS:]
    return _failed("infra_error" if status < 0 else "data_error", f"the program {ended}: {tail}")


def _read(pipe: IO[bytes], lines: deque[str]) -> None:
    """Keep the last lines of a pipe, and print them for the rollout's log."""
    for line in iter(lambda: pipe.readline(_LINE_BYTES), b""):
        text = line.decode(errors="replace").rstrip("\n")
        lines.append(text)
        print(text, file=sys.stdout, flush=True)


def _printed_reward(lines: deque[str]) -> AgentReward | None:
    """Return the reward in the last line, where that is a JSON object with ``reward`` or ``outcome``."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        value = json.loads(last)
    except ValueError:
        return None
    return reward_of(value) if isinstance(value, dict) else None


def reward_of(value: Any) -> AgentReward | None:
    """Read what a program returned or printed as a reward.

    Args:
        value: a number, ``{"reward": number}``, ``{"outcome": …, "reason": …}``, or anything else for no reward.
    """
    if isinstance(value, AgentReward):
        return value
    if isinstance(value, dict):
        outcome = value.get("outcome", "scored")
        if outcome != "scored":
            return _without_value(outcome, str(value.get("reason") or ""))
        value = value.get("reward")
    if value is None or isinstance(value, str | bytes | list | tuple | set):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return AgentReward("data_error", reason=f"the program's reward {value!r:.200} is no number")
    if not math.isfinite(number):
        return AgentReward("data_error", reason=f"the program's reward is {number}")
    return AgentReward("scored", number)


def _without_value(outcome: Any, reason: str) -> AgentReward:
    try:
        return msgspec.convert({"outcome": outcome, "reason": reason[:_MOST_CHARACTERS]}, AgentReward)
    except msgspec.ValidationError:
        return AgentReward("data_error", reason=f"the program's outcome is {outcome!r:.80}; known are {_OUTCOMES}")


def _failed(outcome: Literal["data_error", "infra_error"], reason: str) -> ProgramEnded:
    valid = reason[:_MOST_CHARACTERS].encode(errors="replace").decode()
    return ProgramEnded(failure=AgentReward(outcome, reason=valid))
