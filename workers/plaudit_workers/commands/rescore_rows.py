"""Read and score stored samples: by the scorers of a job in this process, or by a reward service over HTTP.

``Progress`` keeps the scorings beside the output, so that the same command continues after a kill.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

import msgspec
import pyarrow
import pyarrow.parquet

import plaudit_client
from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.sample_schema import LATER_SCORER_INPUT, SCORER_INPUT, scorer_input
from plaudit_reward.machines import KEPT, KeptMachines
from plaudit_reward.providers import provider_of
from plaudit_wire.errors import RefusedError, described
from plaudit_wire.plain import plain
from plaudit_wire.records import Outcome, Sample, ScorerRecord, ScoringRecord
from plaudit_workers.commands.score import scored_in_order
from plaudit_workers.commands.submit import url_error
from plaudit_workers.data_files import batch_rows
from plaudit_workers.files import lock_output
from plaudit_workers.process import model_servers
from plaudit_workers.service.build import BuildContext, build_pipeline, scoring_version
from plaudit_workers.service.client import ServiceError

_ROWS_AT_A_TIME = 256
_FROM_JSON = ("ground_truth", "extra_info", "messages")


class StoredSample(NamedTuple):
    """Hold a sample with its outcome and score in the run."""

    step: int
    sample: Sample
    outcome: str
    score: float | None


class _Earlier(msgspec.Struct):
    step: int
    outcome: str | None
    score: float | None


def stored_groups(files: Iterable[Path]) -> Iterator[list[StoredSample]]:
    """Yield the samples of one group after the other, without those that were never generated."""
    rows = (stored for file in files for stored in _stored(file))
    for _, group in itertools.groupby(rows, lambda stored: (stored.step, stored.sample.group)):
        yield list(group)


def _stored(file: Path) -> Iterator[StoredSample]:
    for number, row in enumerate(_rows(file), 1):
        if row["response"] is None:
            continue
        try:
            earlier = msgspec.convert({name: row[name] for name in _Earlier.__struct_fields__}, _Earlier)
            sample = scorer_input(row)
            judged = {name: plain(getattr(sample, name), name) for name in _FROM_JSON}
            # A file that another program wrote may hold values of any type: no child process could read them.
            sample = msgspec.convert(msgspec.to_builtins(msgspec.structs.replace(sample, **judged)), Sample)
        except (ValueError, TypeError, RecursionError) as error:
            raise RefusedError(
                f"{file}, row {number} is no stored sample ({described(error)}). Give the samples folder of a run"
            ) from error
        yield StoredSample(earlier.step, sample, earlier.outcome or "given_up", earlier.score)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            missing = set(SCORER_INPUT) - set(opened.schema_arrow.names)
            if missing:
                raise RefusedError(
                    f"{file} does not hold stored samples: it lacks the columns {', '.join(sorted(missing))}"
                )
            added = [name for name in LATER_SCORER_INPUT if name in opened.schema_arrow.names]
            yield from batch_rows(file, opened.iter_batches(_ROWS_AT_A_TIME, columns=SCORER_INPUT + added))
    except (pyarrow.ArrowException, OSError) as error:
        raise RefusedError(f"{file} cannot be read: {error}. Give the samples folder of a run") from error


class _Head(msgspec.Struct, frozen=True):
    samples: str
    version: str
    attempt: str


class _Line(msgspec.Struct, frozen=True):
    id: str
    scorings: list[ScoringRecord]


class Progress:
    """Hold the units that are scored already, in order.

    ``<output>.progress`` has one line for what decides the scores, then one for each unit. A line that a kill has cut
    is removed. The file goes when the output is complete.

    Args:
        output: of the command; None: nothing is kept.
        samples: what is scored, in words that differ for other samples.
        scoring: version of the service's scoring now; empty: it is not known before a result carries it.
    """

    def __init__(self, output: Path | None, samples: str, version: str, scoring: str = "") -> None:
        self._path = None if output is None else output.with_name(f"{output.name}.progress")
        self._head = _Head(samples, version, uuid.uuid4().hex[:12])
        self._scored_by = ""
        """Version of the service's scoring, which its results carry."""
        self._scoring = scoring
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch()
                self._file = self._path.open("r+b")
            except OSError as error:
                raise RefusedError(f"--output {output}: {self._path} cannot be written: {error.strerror}") from error
            try:
                lock_output(self._file, self._path)
                self._read_head(self._path)
            except RefusedError:
                self._file.close()
                raise
        self.attempt = self._head.attempt
        """Name of this rescore, which a resumed command repeats and a new one does not."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            self._file.close()
            if kind is None:
                self._path.unlink()

    def scored(self, name: str, size: int) -> list[ScoringRecord] | None:
        """Return the kept scorings of the next unit; None from the first one on that has none."""
        if self._path is None:
            return None
        place = self._file.tell()
        line = self._file.readline()
        kept = _decoded(line)
        if kept is None:
            self._file.seek(place)
            self._file.truncate()
            return None
        if kept.id != name or len(kept.scorings) != size:
            raise RefusedError(
                f"{self._path} has the scores of other samples than those stored now. Delete it to score all anew"
            )
        self._check_version([*kept.scorings, ScoringRecord("scored", version=self._scoring)])
        return kept.scorings

    def keep(self, name: str, scorings: list[ScoringRecord]) -> None:
        """Append the scorings of the next unit; raise ``RefusedError`` if the service scores otherwise than before."""
        self._check_version(scorings)
        if self._path is not None:
            self._file.write(msgspec.json.encode(_Line(name, scorings)) + b"\n")
            self._file.flush()

    def _check_version(self, scorings: list[ScoringRecord]) -> None:
        for scoring in scorings:
            if self._scored_by and scoring.version not in ("", self._scored_by):
                self._leave_attempt()
                raise RefusedError(
                    f"the service's scorers have changed: samples so far were scored by version {self._scored_by}, the "
                    f"next by {scoring.version}. "
                    + ("Start again" if self._path is None else f"Delete {self._path} to score all samples anew, or ")
                    + ("" if self._path is None else "repeat the command when the service has its former scorers again")
                )
            self._scored_by = self._scored_by or scoring.version

    def _leave_attempt(self) -> None:
        """Rename the attempt, in as many bytes: under the old name the service has the results of other scorers."""
        if self._path is not None:
            self._file.seek(0)
            renamed = msgspec.structs.replace(self._head, attempt=uuid.uuid4().hex[: len(self._head.attempt)])
            self._file.write(msgspec.json.encode(renamed) + b"\n")
            self._file.flush()

    def _read_head(self, path: Path) -> None:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(msgspec.json.encode(self._head) + b"\n")
            self._file.flush()
            return
        try:
            head = msgspec.json.decode(line, type=_Head)
        except msgspec.DecodeError as error:
            raise RefusedError(f"{path} is not the progress of a rescore: {error}. Delete or rename it") from error
        for field, was, now in (
            ("samples", head.samples, self._head.samples),
            ("scorers", head.version, self._head.version),
        ):
            if was != now:
                raise RefusedError(
                    f"{path} is the unfinished rescore of other {field} ({was}, now {now}). Delete it to score all "
                    "samples anew, or name another --output"
                )
        self._head = head


def _decoded(line: bytes) -> _Line | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError:
        return None


Unit = list[Sample]
"""Samples that are scored together: a whole group, or a single sample."""
_HTTP_TIMEOUT_S = 86_400.0
_IN_WORK = 1024
"""Units that a service has at a time; its own limits decide how many of them it works on."""


class StoredScorers(Protocol):
    """Score stored samples."""

    names: list[str]
    version: str
    """What decides a score; it changes with the scorers."""
    scoring: str
    """Version of a service's scoring, as in its results; empty if it is not known."""
    scores_groups: bool

    def scored(self, units: AsyncIterator[tuple[str, Unit]]) -> AsyncIterator[list[ScoringRecord]]:
        """Yield the scorings of each unit, in order; each comes with an id that a resumed command repeats."""


class JobScorers:
    """Score by the scorers of a job, in this process."""

    def __init__(self, job: RLJob, pipeline: Any) -> None:
        self.names = [scorer.name for scorer in job.spec.reward.rewarding.scorers]
        self.version = scoring_version(job)
        self.scoring = ""
        self.scores_groups = pipeline.scores_groups
        self._pipeline = pipeline
        self._max_concurrent = job.spec.reward.workers.max_concurrent_samples

    async def scored(self, units: AsyncIterator[tuple[str, Unit]]) -> AsyncIterator[list[ScoringRecord]]:
        """See ``StoredScorers``."""
        sizes: deque[int] = deque()

        async def samples() -> AsyncIterator[Unit]:
            async for _, unit in units:
                sizes.append(len(unit))
                yield unit

        scorings: list[ScoringRecord] = []
        async for scoring in scored_in_order(self._pipeline, samples(), self._max_concurrent):
            scorings.append(scoring)
            if len(scorings) == sizes[0]:
                sizes.popleft()
                yield scorings
                scorings = []


class _ServiceScorer(msgspec.Struct):
    name: str
    scope: str


class DescribedService(msgspec.Struct):
    """Hold what is read of a reward service's description of itself."""

    job: str
    scorers: list[_ServiceScorer]
    scoring: str = ""


class ServiceScorers:
    """Score by a reward service, over HTTP and at its limits."""

    def __init__(self, client: plaudit_client.RewardClient, description: DescribedService) -> None:
        self.names = [scorer.name for scorer in description.scorers]
        self.version = f"{description.job} at {client.url}: {', '.join(self.names)}"
        self.scoring = description.scoring
        self.scores_groups = any(scorer.scope == "group" for scorer in description.scorers)
        self._client = client

    async def scored(self, units: AsyncIterator[tuple[str, Unit]]) -> AsyncIterator[list[ScoringRecord]]:
        """See ``StoredScorers``."""
        in_work: deque[asyncio.Task[list[ScoringRecord]]] = deque()
        try:
            async for name, unit in units:
                in_work.append(asyncio.create_task(self._score(name, unit)))
                while in_work and (len(in_work) >= _IN_WORK or in_work[0].done()):
                    yield await in_work.popleft()
            while in_work:
                yield await in_work.popleft()
        except plaudit_client.RewardError as error:
            raise url_error(self._client.url, error) from error
        finally:
            for task in in_work:
                task.cancel()

    async def _score(self, name: str, unit: Unit) -> list[ScoringRecord]:
        if len(unit) == 1 and not self.scores_groups:
            return [_record(await self._client.score(_body(unit[0], name)))]
        return [_record(result) for result in await self._client.score_group([_body(each) for each in unit], name)]


@asynccontextmanager
async def scorers_of_job(job: RLJob, run_folder: Path) -> AsyncIterator[JobScorers]:
    """Open a job's scorers; close them afterwards. Tests run again in the machines that the run kept.

    Raises ``RefusedError``.
    """
    reward, sandboxes = job.spec.reward.rewarding, job.spec.sandboxes
    context = BuildContext(reward, "rescore", model_servers=model_servers())
    if any(scorer.kind == "verifier" for scorer in reward.scorers):
        folder = run_folder / KEPT
        if not folder.is_dir():
            raise RefusedError(f"there is no {folder}: only machines that sandboxes.keep kept can be tested again")
        # By its folder's name: the broker of a run that goes on removes pods of the run that it does not know.
        machines = KeptMachines(folder, provider_of(sandboxes, folder))
        context = replace(context, machines=machines, max_concurrent_tests=sandboxes.max_concurrent)
    pipeline = await build_pipeline(reward, "rescore", context)
    try:
        yield JobScorers(job, pipeline)
    finally:
        await pipeline.close()


@asynccontextmanager
async def scorers_of_service(url: str, token: str) -> AsyncIterator[ServiceScorers]:
    """Connect to a reward service."""
    try:
        client = plaudit_client.RewardClient(url, token, timeout_s=_HTTP_TIMEOUT_S)
        description = msgspec.convert(await client.service(), DescribedService)
    except plaudit_client.RewardError as error:
        raise url_error(url, error) from error
    except ValueError as error:
        raise ServiceError(f"--url {url}: {error}") from error
    async with client:
        yield ServiceScorers(client, description)


_SENT = ("response", "data_source", "ground_truth", "extra_info", "response_tokens", "max_tokens", "finish_reason")


def _body(sample: Sample, id: str = "") -> dict[str, Any]:  # noqa: A002 (the field's name)
    body = {name: getattr(sample, name) for name in _SENT} | {"prompt": sample.messages or sample.prompt}
    return body | ({"id": id} if id else {})


def _record(result: plaudit_client.Result) -> ScoringRecord:
    scorers = {
        name: ScorerRecord(
            cast(Outcome, scorer.outcome), scorer.value, scorer.reason, call_s=scorer.seconds, extra=dict(scorer.extra)
        )
        for name, scorer in result.scorers.items()
    }
    outcome = cast(Outcome, result.outcome)
    return ScoringRecord(
        outcome, result.score, result.reason, result.drop_group, scorers, call_s=result.seconds, version=result.version
    )
