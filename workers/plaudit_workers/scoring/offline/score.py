"""``plaudit score``: a file of samples through a job's scorers, in this process, without Redis.

read → score → write: lines are read as places become free, scored as a reward worker scores them, and written in their
order; what is held in memory does not grow with the file. A file is looked through first, so that a broken line, or a
data source without a rule, is told before anything is scored; standard input is refused at such a line, when everything
before it is written.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from plaudit_reward.pipeline.pipeline import Pipeline
from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.job.spec.reward import Reward
from plaudit_workers.process import EXIT_DONE, RefusedError
from plaudit_workers.scoring.build import build_pipeline
from plaudit_workers.scoring.group_scope import has_group_scorers
from plaudit_workers.scoring.offline.lines import SampleOutput
from plaudit_workers.scoring.offline.stored import StoredReader

_STANDARD = Path("-")
_HELD_PER_PLACE = 4
"""So many samples for each that may be in work are held, so that a slow one does not keep the others waiting."""
_BEGUN_AT_A_TIME = 8
"""So many samples begin in one round of the event loop, so that a start with hundreds of free places stalls nobody."""
_REPORT_EVERY_S = 5.0


def score(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        RefusedError: the job, a line or a file cannot be used.
    """
    reward = load_job(arguments.job).spec.reward
    _check_files(arguments.input, arguments.output)
    if arguments.input != _STANDARD:
        with _opened(arguments.input, "rb") as lines:
            _reader(arguments.input, reward).check(lines)
    with _opened(arguments.input, "rb") as lines, _opened(arguments.output, "wb") as output:
        asyncio.run(_score(reward, _reader(arguments.input, reward), lines, output))
    return EXIT_DONE


async def _score(reward: Reward, reader: StoredReader, lines: BinaryIO, output: BinaryIO) -> None:
    pipeline = await build_pipeline(reward, "score")
    progress = _Progress()
    units = reader.units(_each(lines))
    try:
        async for scoring in scored_in_order(pipeline, units, reward.workers.max_concurrent_samples):
            output.write(msgspec.json.encode(SampleOutput.from_record(scoring)) + b"\n")
            progress.add(scoring)
    finally:
        await pipeline.close()
        output.flush()
        progress.end()


async def scored_in_order(
    pipeline: Pipeline, units: AsyncIterator[list[Sample]], max_concurrent: int
) -> AsyncIterator[ScoringRecord]:
    """Yield the scorings of all samples, in their order.

    A sample gets its task when a place is free, so nothing but the reader ever queues for one.

    Args:
        pipeline: scores them.
        units: samples that are scored together: single ones or, where ``pipeline.scores_groups``, groups.
        max_concurrent: samples in work at a time.

    Raises:
        RefusedError: raised by ``units``; after the scorings of all samples before it.
    """
    held: deque[asyncio.Task[list[ScoringRecord]]] = deque()
    num_held = 0
    refused: RefusedError | None = None
    try:
        try:
            async for num_samples, task in _begun(pipeline, units, asyncio.Semaphore(max_concurrent)):
                held.append(task)
                num_held += num_samples
                while held and (num_held > _HELD_PER_PLACE * max_concurrent or held[0].done()):
                    scorings = await held.popleft()
                    num_held -= len(scorings)
                    for scoring in scorings:
                        yield scoring
        except RefusedError as error:
            refused = error
        while held:
            for scoring in await held.popleft():
                yield scoring
    finally:
        for task in held:
            task.cancel()
    if refused is not None:
        raise refused


async def _begun(
    pipeline: Pipeline, units: AsyncIterator[list[Sample]], places: asyncio.Semaphore
) -> AsyncIterator[tuple[int, asyncio.Task[list[ScoringRecord]]]]:
    """Yield the number of samples and the task of each unit, as places become free."""
    num_begun = 0
    async for unit in units:
        scorings = []
        for sample in unit:
            await places.acquire()
            scorings.append(asyncio.create_task(_scored(pipeline, sample, places)))
            num_begun += 1
            if num_begun % _BEGUN_AT_A_TIME == 0:
                await asyncio.sleep(0)
        together = pipeline.scores_groups
        yield len(unit), asyncio.create_task(_grouped(pipeline, unit, scorings)) if together else scorings[0]


async def _scored(pipeline: Pipeline, sample: Sample, places: asyncio.Semaphore) -> list[ScoringRecord]:
    try:
        return [await pipeline.score(sample)]
    finally:
        places.release()


async def _grouped(
    pipeline: Pipeline, unit: list[Sample], scorings: list[asyncio.Task[list[ScoringRecord]]]
) -> list[ScoringRecord]:
    records = [record for records in await asyncio.gather(*scorings) for record in records]
    return await pipeline.score_group(unit, records)


class _Progress:
    """Says on standard error how far it is, and what it came to."""

    def __init__(self) -> None:
        self._began_s = self._reported_s = time.monotonic()
        self._outcomes: Counter[str] = Counter()
        self._total = 0.0

    def add(self, scoring: ScoringRecord) -> None:
        """One more sample is written."""
        self._outcomes[scoring.outcome] += 1
        self._total += scoring.value or 0.0
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(self._so_far(), file=sys.stderr)

    def end(self) -> None:
        """All are written."""
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in self._outcomes.most_common())
        scored = self._outcomes["scored"]
        mean = f"; mean score {self._total / scored:.4g}" if scored else ""
        print(f"{self._so_far()}: {outcomes or 'there were none'}{mean}", file=sys.stderr)

    def _so_far(self) -> str:
        count, seconds = self._outcomes.total(), time.monotonic() - self._began_s
        return f"{count:,} samples in {seconds:.1f} s"


def _reader(path: Path, reward: Reward) -> StoredReader:
    by_source = (scorer.name for scorer in reward.scorers if scorer.kind == "rule" and scorer.rule is None)
    name = "standard input" if path == _STANDARD else str(path)
    return StoredReader(name, next(by_source, None), has_group_scorers(reward))


def _check_files(source: Path, output: Path) -> None:
    if output != _STANDARD and source != _STANDARD and output.resolve() == source.resolve():
        raise RefusedError(f"--output {output} is the input: name another file, writing would destroy the samples")


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[BinaryIO]:
    if path == _STANDARD:
        yield sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
        return
    try:
        file: BinaryIO = path.open(mode)  # type: ignore[assignment]  # a binary mode
    except OSError as error:
        option, words = ("--input", "cannot be read") if mode == "rb" else ("--output", "cannot be written")
        raise RefusedError(f"{option} {path} {words}: {error.strerror}. Mend the path") from error
    with file:
        yield file


async def _each(lines: BinaryIO) -> AsyncIterator[bytes]:
    """The lines; waiting for standard input keeps nobody else waiting."""
    if lines is not sys.stdin.buffer:
        for line in lines:
            yield line
        return
    while line := await asyncio.to_thread(lines.readline):
        yield line
