"""Score a sample by the tests of its task, run in the machine that its agent left behind: ``kind: verifier``.

Tests run in reward workers, after generation, so they hold no place of the engine or of an agent. A verdict is written
into the machine's folder, where no program of the machine can write: a sample that is delivered again gets the same
verdict without a second run of its tests, and a worker that died between the two left nothing that counts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from plaudit_job.tasks import Task, TaskError, expand
from plaudit_reward.functions.result import extra_of
from plaudit_reward.machines import VERDICTS, KeptMachines, RunMachines
from plaudit_reward.providers import TaskMachine
from plaudit_reward.scorer import Attempt, Score
from plaudit_sandbox.verification import Verdict
from plaudit_wire.errors import DataError, InfrastructureError
from plaudit_wire.plain import plain_text
from plaudit_wire.records import Outcome, Sample

Keep = Literal["none", "failed", "all"]
_MOST_OUTPUT_CHARACTERS = 2000
_decoder = msgspec.json.Decoder(Score)


class VerifierScorer:
    """Run the tests of samples' tasks.

    Args:
        max_concurrent: Samples whose tests run at the same time; others wait.
    """

    def __init__(self, name: str, machines: RunMachines, max_concurrent: int) -> None:
        self.name = name
        self._machines = machines
        self._max_concurrent = max_concurrent
        self._places = asyncio.Semaphore(max_concurrent)
        self._num_in_work = 0

    async def open(self) -> None:
        """Try a machine; raise ``ConfigurationError`` where none can run."""
        await asyncio.to_thread(self._machines.provider.require)

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Return the reward of the tests, with their further numbers and the end of their output as extras.

        Raises ``DataError`` for a sample without a task or a machine, ``InfrastructureError`` if its machine is gone
        or cannot run.
        """
        task = await asyncio.to_thread(self._machines.task_of, sample)
        if task is None:
            raise DataError("the row is no task: its extra_info has no task and digest. Give data.train.tasks")
        name = await asyncio.to_thread(self._machines.name_of, sample)
        machine = await asyncio.to_thread(self._machines.find, name, sample.group, sample.index, task)
        verdict_path = self._machines.folder / name / VERDICTS.replace("*", self.name)
        is_new = not isinstance(self._machines, KeptMachines)
        if is_new and (known := await asyncio.to_thread(_read, verdict_path)) is not None:
            return known
        self._num_in_work += 1
        try:
            with attempt.waiting():
                await self._places.acquire()
            try:
                score = _score(await self._verdict(task, machine, attempt))
            finally:
                self._places.release()
        finally:
            self._num_in_work -= 1
        if is_new:
            await asyncio.to_thread(_write, verdict_path, score)
        return score

    async def _verdict(self, task: Task, machine: TaskMachine, attempt: Attempt) -> Verdict:
        verifier, environment = task.config.verifier, task.config.environment
        try:
            variables = expand(environment.env) | expand(verifier.env)
        except TaskError as error:
            raise DataError(f"task {task.name}: {error}") from error
        limit_s = min(verifier.timeout_sec, max(attempt.limit_s - attempt.age_s, 0.0))
        return await self._machines.verify(machine, task, timeout_s=limit_s, environment=variables)

    def room(self) -> int:
        """Return how many more samples could begin soon."""
        return max(0, self._max_concurrent - self._num_in_work)

    async def close(self) -> None:
        """Close what the machines need; tests end with the calls that run them."""
        await self._machines.close()


def is_kept(keep: Keep, machine: Path) -> bool:
    """Return True if a job keeps the machine of a folder with these verdicts: ``sandboxes.keep``."""
    verdicts = [_read(path) for path in machine.glob(VERDICTS)]
    has_reward = bool(verdicts) and all(verdict is not None and verdict.outcome == "scored" for verdict in verdicts)
    return keep == "all" or (keep == "failed" and not has_reward)


def _score(verdict: Verdict) -> Score:
    """Return a verdict as a score; what the policy brought about counts 0 already."""
    extra = extra_of(verdict.rewards)
    extra["verify_s"] = round(verdict.executed.seconds, 3)
    if output := verdict.executed.output.strip():
        extra["output"] = plain_text(output[-_MOST_OUTPUT_CHARACTERS:])
    if verdict.reward is None:
        outcome: Outcome = "timeout" if verdict.outcome == "timeout" else "data_error"
        return Score(outcome, reason=verdict.reason, extra=extra)
    if verdict.reason:
        extra["failure"] = verdict.reason
    return msgspec.structs.replace(Score.scored(verdict.reward), extra=extra)


def _read(path: Path) -> Score | None:
    """Return a verdict that was written; None if there is none, or it was damaged with its disk."""
    try:
        return _decoder.decode(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, score: Score) -> None:
    """Write a verdict whole or not at all; raise ``InfrastructureError`` if it cannot be written."""
    temporary = path.with_name(f".verdict-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(score))
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise InfrastructureError(f"the verdict cannot be stored: {error.strerror or error}") from error
