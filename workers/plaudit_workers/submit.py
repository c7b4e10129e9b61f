"""``plaudit submit``: a file of samples through a running scoring service, in order; goes on after a kill.

Input and output are those of ``plaudit score`` (``scoring.lines``). A line of the output is written before its result
is acknowledged, so the file itself says how far a command that was killed has come.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from plaudit_workers.client import Result, RewardClient, SampleInput, ServiceError
from plaudit_workers.launch.service import ADDRESS_FILE
from plaudit_workers.process import EXIT_DONE, RefusedError, redis_from
from plaudit_workers.scoring.offline.lines import SampleOutput, read_samples
from plaudit_workers.stream.connection import RedisAddress

_LOOK_EVERY_S = 0.2


def submit(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        RefusedError: the samples, the output or the service cannot be used; nothing was submitted.
    """
    samples = list(read_samples(arguments.samples))
    address, run = _service(arguments)
    session = arguments.session or _session_of(arguments)
    with _Output(arguments.output, len(samples)) as output:
        if output.written < len(samples):
            asyncio.run(_score(samples, output, address, run, session, arguments))
        print(output.summary(), file=sys.stderr)
    return EXIT_DONE


async def _score(
    samples: Sequence[SampleInput],
    output: _Output,
    address: RedisAddress,
    run: str,
    session: str,
    arguments: argparse.Namespace,
) -> None:
    named = [
        msgspec.structs.replace(sample, id=f"{number}.{_digest(msgspec.json.encode(sample))}")
        for number, sample in enumerate(samples)
    ]
    async with RewardClient(address, run=run, job=arguments.job, session=session, wait_s=arguments.wait) as client:
        submitting = asyncio.create_task(client.submit(named[output.written :]))
        await asyncio.sleep(0)  # it has begun: ``results`` lasts as long as it does
        try:
            async for result in client.results(acknowledge=False):
                await client.acknowledge(output.take(result))
            await submitting
        finally:
            submitting.cancel()
        await client.end()


class _Output:
    """Writes results in the order of the samples; holds those that came before their turn.

    Args:
        path: the file; None = standard output.
        wanted: how many lines it is to have.

    Attributes:
        written: complete lines in it.
    """

    def __init__(self, path: Path | None, wanted: int) -> None:
        self._path = path
        self._file: BinaryIO = sys.stdout.buffer if path is None else _opened(path)
        self._held: dict[int, Result] = {}
        self._outcomes: Counter[str] = Counter()
        self._wanted = wanted
        self.written = 0

    def __enter__(self) -> _Output:
        if self._path is not None:
            self.written = _complete_lines(self._file)
        if self.written > self._wanted:
            self._file.close()
            raise RefusedError(
                f"{self._path} has {self.written} lines, more than the {self._wanted} samples: it belongs to another "
                "file. Name another --output"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()

    def take(self, result: Result) -> list[str]:
        """Writes it if it is its turn, and those that waited for it; the ids of all that are in the file now."""
        self._held[int(result.id.partition(".")[0])] = result
        done = [self._held.pop(number).id for number in list(self._held) if number < self.written]
        while self.written in self._held:
            next_one = self._held.pop(self.written)
            line = SampleOutput(next_one.score, next_one.outcome, next_one.reason, next_one.scorers)
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._outcomes[next_one.outcome] += 1
            self.written += 1
            done.append(next_one.id)
        self._file.flush()
        return done

    def summary(self) -> str:
        """How many samples ended how."""
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in self._outcomes.most_common())
        return f"{self.written} samples scored; by this command: {outcomes or 'none, all were there'}"


def _opened(path: Path) -> BinaryIO:
    try:
        path.touch()
        return path.open("r+b")
    except OSError as error:
        raise RefusedError(f"--output {path} cannot be written: {error.strerror}") from error


def _complete_lines(file: BinaryIO) -> int:
    """Counts them, and cuts off one that a kill has torn."""
    lines, end = 0, 0
    for line in file:
        if line.endswith(b"\n"):
            lines, end = lines + 1, end + len(line)
    file.seek(end)
    file.truncate()
    return lines


def _session_of(arguments: argparse.Namespace) -> str:
    """The same for the same samples into the same output; standard output cannot be gone on with."""
    if arguments.output is None:
        return ""
    return f"submit-{_digest(arguments.samples.read_bytes() + str(arguments.output.resolve()).encode())}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _service(arguments: argparse.Namespace) -> tuple[RedisAddress, str]:
    """Where the service is: ``--redis``, or what ``plaudit run`` leaves in the run's folder once it is there."""
    if arguments.redis:
        return redis_from(os.environ, arguments.redis), arguments.run or ""
    runs = Path(arguments.runs_folder)
    pattern, deadline = f"{arguments.run or '*'}/{ADDRESS_FILE}", time.monotonic() + arguments.wait
    while not (files := list(runs.glob(pattern))) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    if not files:
        what = f"no scoring service of the name {arguments.run}" if arguments.run else "no scoring service"
        raise ServiceError(
            f"{runs}/ holds {what}: start one with 'plaudit run', name its --runs-folder, or give --redis and --run"
        )
    newest = max(files, key=lambda file: file.stat().st_mtime)
    left = json.loads(newest.read_text())
    run = left.pop("run")
    return msgspec.convert(left, RedisAddress), run
