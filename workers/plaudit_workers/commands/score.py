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
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from plaudit_job.load import load_job
from plaudit_job.spec.rewards import RewardSpec
from plaudit_metrics.statistics.columns import NO_SCORER, FailureCounts
from plaudit_reward.pipeline import Pipeline
from plaudit_reward.rules.scorer import rule_of
from plaudit_wire.errors import RefusedError
from plaudit_wire.logs import collect_seldom
from plaudit_wire.printable import print_text
from plaudit_wire.records import Outcome, Sample, ScoringRecord
from plaudit_workers.commands.trial import show_logs
from plaudit_workers.data_files import whole_line
from plaudit_workers.files import lock_output, refuse_inputs
from plaudit_workers.job_start import has_group_scorers
from plaudit_workers.process import EXIT_DONE, in_daemon_thread
from plaudit_workers.service.build import build_pipeline
from plaudit_workers.service.lines import (
    EXPECTED,
    Numbered,
    RawSample,
    SampleInput,
    SampleOutput,
    decode_entry,
    file_entries,
    line_entries,
)

_STANDARD = Path("-")
_HELD_PER_PLACE = 16
"""Samples held in memory for each slot, so that a slow sample does not block the others."""
_BEGUN_AT_A_TIME = 8
"""Samples started in one round of the event loop, so that a start with hundreds of free slots delays nothing else."""


def score(arguments: argparse.Namespace) -> int:
    """Run the command."""
    reward = load_job(arguments.job).spec.reward
    source, target = arguments.input, arguments.output
    if target != _STANDARD:
        refuse_inputs(target, [arguments.job, source])
    if source != _STANDARD:
        _reader(source, reward).check(file_entries(source, "--input"))
    show_logs()
    collect_seldom()
    with _output(target) as output:
        asyncio.run(_score(reward, _reader(source, reward), _entries(source), output))
    return EXIT_DONE


async def _score(reward: RewardSpec, reader: StoredReader, entries: AsyncIterator[Numbered], output: BinaryIO) -> None:
    pipeline = await build_pipeline(reward, "score")
    progress = OfflineProgress()
    try:
        async for scoring in scored_in_order(pipeline, reader.units(entries), reward.workers.max_concurrent_samples):
            output.write(msgspec.json.encode(SampleOutput.from_record(scoring, reader.ids.popleft())) + b"\n")
            progress.add(scoring.outcome, scoring.value, scoring.reason)
        output.flush()
    finally:
        await pipeline.close()
        print_text(progress.summary(), to_stderr=True)


async def scored_in_order(
    pipeline: Pipeline, units: AsyncIterator[list[Sample]], max_concurrent: int
) -> AsyncIterator[ScoringRecord]:
    """Yield the scorings of all samples, in their order; raise the reader's error after those of all earlier samples.

    A sample gets its task when a slot is free, so that only the reader ever waits for one. A unit is scored together: a
    single sample or, where ``pipeline.scores_groups``, a group.
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


def _reader(path: Path, reward: RewardSpec) -> StoredReader:
    by_source = (scorer.name for scorer in reward.rewarding.scorers if scorer.kind == "rule" and scorer.rule is None)
    name = "standard input" if path == _STANDARD else str(path)
    return StoredReader(name, next(by_source, None), has_group_scorers(reward))


@contextmanager
def _output(path: Path) -> Iterator[BinaryIO]:
    if path == _STANDARD:
        yield sys.stdout.buffer
        return
    try:
        file = path.open("ab")
    except OSError as error:
        raise RefusedError(f"--output {path} cannot be written: {error.strerror}. Correct the path") from error
    with file:
        lock_output(file, path)
        if path.is_file():
            file.truncate(0)
        yield file


async def _entries(path: Path) -> AsyncIterator[Numbered]:
    """Yield lines or rows; waiting for standard input does not block the scorers."""
    if path != _STANDARD:
        for entry in file_entries(path, "--input"):
            yield entry
        return
    number = 0
    while line := await in_daemon_thread(lambda: whole_line(sys.stdin.buffer, "standard input")):
        number += 1
        for entry in line_entries(line, number):
            yield entry


_MAX_REPORTED = 10


class SampleLine(SampleInput, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold one line or row."""

    group: str = ""
    """Samples of one group are adjacent; empty: the sample has no group."""
    index: int | None = None
    """Its index in the group; None: its position among the group's lines."""

    def as_sample(self, number: int, place: int) -> Sample:
        """Return the sample for the scorers, from line ``number``, at ``place`` in its group."""
        return self.sample(self.group or f"line-{number}", place if self.index is None else self.index)


class StoredReader:
    """Convert the lines or rows of one file to samples and their groups, in order; an error names the line.

    ``by_source`` is the name of a scorer that finds its rule by data source.
    """

    def __init__(self, name: str, by_source: str | None, grouped: bool) -> None:
        self._name = name
        self._by_source = by_source
        self._grouped = grouped
        self._number = 0
        self._group = ""
        self._past_groups: set[int] = set()
        self.ids: deque[str] = deque()
        """Ids of the samples that ``units`` has yielded, in order; the writer of a score removes its id."""

    def parse(self, number: int, entry: RawSample) -> SampleLine | None:
        """Return the sample of the line or row of that number; None for an empty line.

        Raise ``RefusedError`` if it is not a sample, no rule scores its data source, or its group ended before.
        """
        self._number = number
        if isinstance(entry, bytes) and not entry.strip():
            return None
        try:
            sample = decode_entry(entry, SampleLine)
        except ValueError as error:
            raise self._refused(f"{error}. {EXPECTED}, group, index") from error
        if self._by_source is not None and rule_of(sample.data_source) is None:
            raise self._refused(
                f"scorer {self._by_source} has no rule for data_source {sample.data_source!r}. Name a rule in the "
                "scorer (rule: gsm8k), or score it with a function (kind: python)"
            )
        self._follow(sample.group)
        return sample

    def check(self, entries: Iterable[Numbered]) -> None:
        """Read all lines or rows; raise ``RefusedError`` with the first of those that are invalid."""
        reported: list[str] = []
        for number, entry in entries:
            try:
                self.parse(number, entry)
            except RefusedError as refused:
                reported.append(str(refused))
                if len(reported) == _MAX_REPORTED:
                    reported.append(f"{self._name}: there may be more; these are the first {_MAX_REPORTED}")
                    break
        if reported:
            raise RefusedError("\n".join(reported))

    async def units(self, entries: AsyncIterator[Numbered]) -> AsyncIterator[list[Sample]]:
        """Yield groups where groups are scored as a whole, else single samples; raise as ``parse`` does."""
        unit: list[Sample] = []
        async for number, entry in entries:
            stored = self.parse(number, entry)
            if stored is None:
                continue
            self.ids.append(stored.id)
            group = stored.group if self._grouped else ""
            if unit and unit[0].group != group:
                yield unit
                unit = []
            sample = stored.as_sample(number, len(unit))
            if group:
                unit.append(sample)
            else:
                yield [sample]
        if unit:
            yield unit

    def _follow(self, group: str) -> None:
        if not self._grouped or group == self._group:
            return
        if self._group:
            self._past_groups.add(hash(self._group))
        if group and hash(group) in self._past_groups:
            raise self._refused(f"group {group!r} ended before this line. Sort the lines by group")
        self._group = group

    def _refused(self, message: str) -> RefusedError:
        return RefusedError(f"{self._name}:{self._number}: {message}")


_REPORT_EVERY_S = 5.0
_SHOWN_FAILURES = 5


class OfflineProgress:
    """Count results, print a line on standard error every five seconds, and summarize them at the end."""

    def __init__(self, total: int | None = None) -> None:
        self._began_s = self._reported_s = time.monotonic()
        self._total = total
        self._outcomes: Counter[str] = Counter()
        self._failures = FailureCounts()
        self._sum = 0.0

    def add(self, outcome: Outcome, score: float | None, reason: str | None) -> None:
        """Count one result that was written; a reason begins with the name of its scorer."""
        self._outcomes[outcome] += 1
        self._sum += score or 0.0
        if reason:
            scorer, _, text = reason.partition(": ")
            self._failures.add_failure(scorer if text else NO_SCORER, outcome, text or reason)
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(self._so_far(), file=sys.stderr)

    def summary(self) -> str:
        """Return counts, the mean score and the most frequent failures, one a line."""
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in self._outcomes.most_common())
        scored = self._outcomes["scored"]
        mean = f"; mean score {self._sum / scored:.4g}" if scored else ""
        failures = self._failures.failures()
        lines = [f"{self._so_far()}: {outcomes or 'no samples'}{mean}"]
        lines += [f"  {each.count:,} × {each.scorer}: {each.reason}" for each in failures[:_SHOWN_FAILURES]]
        if len(failures) > _SHOWN_FAILURES:
            lines.append(f"  and {len(failures) - _SHOWN_FAILURES} other kinds of failure: see the output")
        return "\n".join(lines)

    def _so_far(self) -> str:
        seconds = time.monotonic() - self._began_s
        done, of = self._outcomes.total(), "" if self._total is None else f" of {self._total:,}"
        samples = "sample" if (self._total or done) == 1 else "samples"
        return f"{done:,}{of} {samples} in {f'{seconds:.1f}' if seconds >= 0.1 else 'less than 0.1'} s"
