"""``plaudit submit``: score a file of samples with a running scoring service, in order; resume after a kill.

Input and output are those of ``plaudit score`` (``service.lines``). A line of the output is written before its
result is acknowledged, so the output shows how far a killed command came. Each line has the digest of its sample, so
the same command on an edited input notices.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

import plaudit_client
from plaudit_wire.errors import RefusedError
from plaudit_wire.printable import print_text
from plaudit_wire.records import Outcome
from plaudit_wire.redis import RedisAddress
from plaudit_workers.commands.score import OfflineProgress
from plaudit_workers.commands.trial import show_logs
from plaudit_workers.files import lock_output, refuse_inputs
from plaudit_workers.launch.transport import SERVICE_FILE
from plaudit_workers.process import EXIT_DONE, redis_from
from plaudit_workers.service.client import ReportedWait, Result, RewardClient, ServiceError
from plaudit_workers.service.lines import SampleInput, SampleOutput, ScorerOutput, read_samples

_LOOK_EVERY_S = 0.2
_REREAD_EVERY_S = 1.0
_HTTP_TIMEOUT_S = 86_400.0
FoundService = tuple[RedisAddress, str]
"""Redis of a scoring service, and the id of its run."""


class _Line(SampleOutput, frozen=True, omit_defaults=True, kw_only=True):
    """Hold one line of the output."""

    digest: str = ""
    """Of the sample as submitted."""


def submit(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.output is not None:
        refuse_inputs(arguments.output, [arguments.samples])
    samples = list(read_samples(arguments.samples))
    show_logs()
    service = None if arguments.url else _service(arguments)
    with _Output(arguments.output, samples, arguments.samples) as output:
        if output.written < len(samples):
            try:
                asyncio.run(_score_on(service, arguments, output) if service else _score_over_http(arguments, output))
            except ServiceError as error:
                raise ServiceError(f"{error}{output.kept()}") from error
            print_text(output.progress.summary(), to_stderr=True)
        else:
            print_text(f"{arguments.output} already has the scores of all {len(samples):,} samples", to_stderr=True)
    return EXIT_DONE


async def _score_on(service: FoundService, arguments: argparse.Namespace, output: _Output) -> None:
    """Score the samples; when ``plaudit run --resume`` starts the service elsewhere, continue there."""
    session = arguments.session or output.session
    while True:
        scoring = asyncio.create_task(_score(output, service, session, arguments))
        moving = asyncio.create_task(_moved(service, arguments))
        await asyncio.wait({scoring, moving}, return_when=asyncio.FIRST_COMPLETED)
        if scoring.done():
            moving.cancel()
            return scoring.result()
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        service = moving.result()
        print_text(f"the service has moved to {service[0].url}; continuing there", to_stderr=True)


async def _moved(service: FoundService, arguments: argparse.Namespace) -> FoundService:
    """Wait until the run's folder names another Redis; a Redis given by ``--redis`` never moves."""
    while True:
        await asyncio.sleep(_REREAD_EVERY_S)
        found = None if arguments.redis else _read_service(arguments.runs_folder, service[1])
        if found is not None and found != service:
            return found


async def _score(output: _Output, service: FoundService, session: str, arguments: argparse.Namespace) -> None:
    address, run = service
    async with RewardClient(address, run=run, job=arguments.job, session=session, wait_s=arguments.wait) as client:
        output.check_service(client.service.scoring)
        submitting = asyncio.create_task(client.submit(output.missing()))
        await asyncio.sleep(0)  # start it: ``results`` lasts as long as it does
        try:
            async for result in client.results(acknowledge=False):
                await client.acknowledge(output.take(result))
            await submitting
        finally:
            submitting.cancel()
        await client.end()


async def _score_over_http(arguments: argparse.Namespace, output: _Output) -> None:
    """Score the samples through a gateway; a restarted command gets the same results under the same ids."""
    token = os.environ.get("PLAUDIT_TOKEN", "")
    try:
        client = plaudit_client.RewardClient(arguments.url, token, timeout_s=_HTTP_TIMEOUT_S)
    except ValueError as error:
        raise ServiceError(f"--url and PLAUDIT_TOKEN: {error}") from error
    async with client:
        try:
            if output.written:
                with contextlib.suppress(plaudit_client.UnavailableError):  # then the first result tells
                    output.check_service(str((await client.service()).get("scoring", "")))
            async for result in client.score_many(msgspec.to_builtins(sample) for sample in output.missing()):
                output.take(_over_http(result))
        except plaudit_client.RewardError as error:
            raise url_error(arguments.url, error) from error


def url_error(url: str, error: plaudit_client.RewardError) -> ServiceError:
    """Return the refusal of a command whose ``--url`` gives no scores."""
    if isinstance(error, plaudit_client.AuthenticationError):
        return ServiceError(
            f"--url {url} refuses the token in PLAUDIT_TOKEN"
            f"{'' if os.environ.get('PLAUDIT_TOKEN') else ', which is not set'}. That of a local service is in "
            f"runs/<run>/{SERVICE_FILE}"
        )
    if isinstance(error, plaudit_client.UnavailableError):  # its message has the address
        return ServiceError(f"--url: {error}. Start the service, or wait for it; then repeat the command")
    return ServiceError(f"--url {url}: {error}")


def _over_http(result: plaudit_client.Result) -> Result:
    scorers = {name: ScorerOutput(**vars(scorer)) for name, scorer in result.scorers.items()}
    return Result(
        id=result.id,
        score=result.score,
        outcome=cast(Outcome, result.outcome),
        reason=result.reason,
        scorers=scorers,
        version=result.version,
        seconds=result.seconds,
    )


class _Output:
    """Write results in the order of the samples (``path`` None: to standard output); hold those that come early."""

    def __init__(self, path: Path | None, samples: Sequence[SampleInput], source: Path) -> None:
        self._path = path
        self._file: BinaryIO = sys.stdout.buffer if path is None else _opened(path)
        self._held: dict[int, Result] = {}
        self._samples = samples
        self._source = source
        self._digests = [_digest(msgspec.json.encode(sample)) for sample in samples]
        self._scored_by = ""
        """Version of the service's scoring; empty until a result carries one."""
        self.progress = OfflineProgress()
        self.written = 0

    @property
    def session(self) -> str:
        """Return a name for these samples and this output; empty for standard output, which cannot be resumed."""
        if self._path is None:
            return ""
        return f"submit-{_digest(' '.join([*self._digests, os.path.realpath(self._path)]).encode())}"

    def __enter__(self) -> _Output:
        if self._path is not None:
            try:
                lock_output(self._file, self._path)
                self.written = self._complete_lines()
            except BaseException:
                self._file.close()
                raise
        self.progress = OfflineProgress(len(self._samples) - self.written)
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()

    def kept(self) -> str:
        """Return what an error adds: how many scores the file has; empty where there is nothing to continue."""
        if self._path is None or not self.written:
            return ""
        return f". {self._path} has {self.written:,} of {len(self._samples):,} scores; the same command continues there"

    def missing(self) -> list[SampleInput]:
        """Return the samples without a line, under the ids of this command: number and digest."""
        return [
            msgspec.structs.replace(self._samples[number], id=f"{number}.{self._digests[number]}")
            for number in range(self.written, len(self._samples))
        ]

    def take(self, result: Result) -> list[str]:
        """Write a result and those that waited for it; return the ids of all that are now in the file."""
        self._held[int(result.id.partition(".")[0])] = result
        done = [self._held.pop(number).id for number in list(self._held) if number < self.written]
        while self.written in self._held:
            number, one = self.written, self._held.pop(self.written)
            self._check_version(number, one.version)
            line = _Line(
                id=self._samples[number].id,
                score=one.score,
                outcome=one.outcome,
                reason=one.reason,
                scorers=one.scorers,
                version=one.version,
                digest=self._digests[number],
            )
            self._file.write(msgspec.json.encode(line) + b"\n")
            self.progress.add(one.outcome, one.score, one.reason)
            self.written += 1
            done.append(one.id)
        self._file.flush()
        return done

    def _complete_lines(self) -> int:
        """Count the lines, each of which must be of its sample; remove one that a kill has cut."""
        num_lines, end = 0, 0
        for line in self._file:
            if not line.endswith(b"\n"):
                begins = self._beginning(num_lines)
                if not (line.startswith(begins) or begins.startswith(line)):
                    raise self._refused(f"line {num_lines + 1} is not the score of sample {num_lines + 1}")
                break
            self._check(num_lines, line)
            num_lines, end = num_lines + 1, end + len(line)
        self._file.seek(end)
        self._file.truncate()
        return num_lines

    def _beginning(self, number: int) -> bytes:
        """Return how the line of a sample begins, for one that a kill may have cut anywhere."""
        own = self._samples[number].id if number < len(self._samples) else ""
        return b'{"id":%s,"score":' % msgspec.json.encode(own) if own else b'{"score":'

    def _check(self, number: int, line: bytes) -> None:
        if number >= len(self._samples):
            problem = f"has more lines than the {len(self._samples):,} samples of {self._source}"
        else:
            try:
                written = msgspec.json.decode(line, type=_Line)
                if written.digest == self._digests[number]:
                    self._check_version(number, written.version)
                    return
            except (msgspec.DecodeError, RecursionError):
                pass
            problem = f"line {number + 1} is not the score of sample {number + 1} of {self._source}, which has changed"
        raise self._refused(problem)

    def check_service(self, version: str) -> None:
        """Raise ``RefusedError`` if the service has other scorers now than for the lines in the file."""
        if self._scored_by:
            self._check_version(self.written, version)

    def _check_version(self, number: int, version: str) -> None:
        """Raise ``RefusedError`` where the service scores otherwise than before: nobody could compare the scores."""
        if self._scored_by and version not in ("", self._scored_by):
            raise self._refused(
                f"the service's scorers have changed: the samples before were scored by version {self._scored_by}, "
                f"sample {number + 1} by {version}"
            )
        self._scored_by = self._scored_by or version

    def _refused(self, problem: str) -> RefusedError:
        if self._path is None:
            return RefusedError(f"{problem}. Start again")
        return RefusedError(f"--output {self._path}: {problem}. Delete it to score all samples, or name another file")


def _opened(path: Path) -> BinaryIO:
    try:
        path.touch()
        return path.open("r+b")
    except OSError as error:
        raise RefusedError(f"--output {path} cannot be written: {error.strerror or error}") from error


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _service(arguments: argparse.Namespace) -> FoundService:
    """Return the service of ``--redis``, or the one that ``plaudit run`` names in its folder; wait for it."""
    if arguments.redis:
        return redis_from(os.environ, arguments.redis), arguments.run or ""
    runs, deadline, wait = arguments.runs_folder, time.monotonic() + arguments.wait, ReportedWait()
    name = f"no scoring service with the name {arguments.run}" if arguments.run else "no scoring service"
    lacks = f"{runs}/ has {name}: start one with 'plaudit run', name its --runs-folder, or give --redis and --run"
    while (found := _read_service(runs, arguments.run)) is None and time.monotonic() < deadline:
        wait.goes_on(lacks)
        time.sleep(_LOOK_EVERY_S)
    if found is None:
        raise ServiceError(lacks)
    return found


def _read_service(runs: Path, run: str | None) -> FoundService | None:
    """Read the newest address file of a run, or of any; None if there is none, or while it is being written.

    Raises ``RefusedError`` for one that is something else.
    """
    newest = runs
    try:
        files = [runs / run / SERVICE_FILE] if run else runs.glob(f"*/{SERVICE_FILE}")
        newest = max(files, key=lambda file: file.stat().st_mtime)
        content = newest.read_bytes()
    except (ValueError, FileNotFoundError):
        return None
    except OSError as error:
        raise RefusedError(f"{newest} cannot be read: {error.strerror}; give --redis and --run") from error
    try:
        left = msgspec.json.decode(content, type=_ServiceFile)
        left.redis.check()
    except (msgspec.DecodeError, RecursionError) as error:
        if not isinstance(error, msgspec.ValidationError):
            return None
        problem: Exception = error
    except ValueError as error:
        problem = error
    else:
        return left.redis, left.run
    raise RefusedError(
        f"{newest} holds no address of a service: {problem}. Start the service again by 'plaudit run --resume', or "
        "give --redis and --run"
    )


class _ServiceFile(msgspec.Struct):
    run: str
    redis: RedisAddress
