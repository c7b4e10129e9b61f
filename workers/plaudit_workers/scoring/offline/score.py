"""``plaudit score``: score a file of samples with a job's scorers, in this process, without Redis.

read → score → write: samples are read as slots become free, scored as by a reward worker, and written in their order;
memory does not grow with the file. A first pass over the file reports invalid lines and data sources without a rule
before any sample is scored. Standard input cannot be read twice: the command stops at such a line, after it has written
the results of all earlier ones.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from plaudit_reward.pipeline.pipeline import Pipeline
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import ScoringRecord
from plaudit_wire.sample import Sample
from plaudit_workers.job.loading.load import load_job
from plaudit_workers.job.spec.rewards.reward import RewardSpec
from plaudit_workers.process import EXIT_DONE
from plaudit_workers.scoring.build import build_pipeline
from plaudit_workers.scoring.group_scope import has_group_scorers
from plaudit_workers.scoring.offline.entries import RawSample, file_entries
from plaudit_workers.scoring.offline.lines import SampleOutput
from plaudit_workers.scoring.offline.printed import show_logs
from plaudit_workers.scoring.offline.progress import OfflineProgress
from plaudit_workers.scoring.offline.stored import StoredReader

_STANDARD = Path("-")
_HELD_PER_PLACE = 16
"""Samples held in memory for each slot, so that a slow sample does not block the others."""
_BEGUN_AT_A_TIME = 8
"""Samples started in one round of the event loop, so that a start with hundreds of free slots delays nothing else."""


def score(arguments: argparse.Namespace) -> int:
    """Run the command."""
    reward = load_job(arguments.job).spec.reward
    source, output = arguments.input, arguments.output
    if _STANDARD not in (source, output) and output.resolve() == source.resolve():
        raise RefusedError(f"--output {output} is the input: name another file, writing would destroy the samples")
    if arguments.input != _STANDARD:
        reader_for(arguments.input, reward).check(file_entries(arguments.input, "--input"))
    show_logs()
    with _output(arguments.output) as output:
        asyncio.run(_score(reward, reader_for(arguments.input, reward), _entries(arguments.input), output))
    return EXIT_DONE


async def _score(reward: RewardSpec, reader: StoredReader, entries: AsyncIterator[RawSample], output: BinaryIO) -> None:
    pipeline = await build_pipeline(reward, "score")
    progress = OfflineProgress()
    try:
        async for scoring in scored_in_order(pipeline, reader.units(entries), reward.workers.max_concurrent_samples):
            output.write(msgspec.json.encode(SampleOutput.from_record(scoring, reader.ids.popleft())) + b"\n")
            progress.add(scoring.outcome, scoring.value, scoring.reason)
        output.flush()
    finally:
        await pipeline.close()
        print(progress.summary(), file=sys.stderr)


async def scored_in_order(
    pipeline: Pipeline, units: AsyncIterator[list[Sample]], max_concurrent: int
) -> AsyncIterator[ScoringRecord]:
    """Yield the scorings of all samples, in their order.

    A sample gets its task when a slot is free, so that only the reader ever waits for one.

    Args:
        units: samples that are scored together: single ones or, where ``pipeline.scores_groups``, groups.

    Raises:
        RefusedError: raised by ``units``, after the scorings of all earlier samples.
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
    """Yield the number of samples and the task of each unit, as slots become free."""
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


def reader_for(path: Path, reward: RewardSpec) -> StoredReader:
    """Return the reader of a file of samples for a job's scorers."""
    by_source = (scorer.name for scorer in reward.scorers if scorer.kind == "rule" and scorer.rule is None)
    name = "standard input" if path == _STANDARD else str(path)
    return StoredReader(name, next(by_source, None), has_group_scorers(reward))


@contextmanager
def _output(path: Path) -> Iterator[BinaryIO]:
    if path == _STANDARD:
        yield sys.stdout.buffer
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise RefusedError(f"--output {path} cannot be written: {error.strerror}. Correct the path") from error
    with file:
        yield file


async def _entries(path: Path) -> AsyncIterator[RawSample]:
    """Yield lines or rows; waiting for standard input does not block the scorers."""
    if path != _STANDARD:
        for entry in file_entries(path, "--input"):
            yield entry
        return
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        yield line
