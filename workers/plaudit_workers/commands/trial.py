"""``plaudit try JOB``: score the first rows of the training data before a run, with their answers and without.

Each row is a group of two samples: its answer, which a good reward scores high, and an empty response, which it scores
low. The answer is the row's ``response`` or ``responses``, else ``extra_info.answer`` or ``extra_info.solution`` (of
verl's and TRL's datasets), else the ground truth as text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from plaudit_job.data_row import DataRow, data_row
from plaudit_job.load import load_job
from plaudit_job.problem import JobError
from plaudit_job.spec.rewards import RewardSpec
from plaudit_job.spec.rljob import RLJob
from plaudit_job.spec.rollout import ColumnsSpec
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_wire.plain import plain_text
from plaudit_wire.printable import print_text, printable
from plaudit_wire.records import Sample, ScoringRecord
from plaudit_workers.data_files import VERL, RowForm, data_paths, files_of, raw_rows
from plaudit_workers.launch.data_checks import data_problem
from plaudit_workers.process import EXIT_CRASHED, EXIT_DONE, model_servers
from plaudit_workers.server_tasks import with_server_tasks
from plaudit_workers.service.build import build_pipeline
from plaudit_workers.service.lines import SampleInput

_SHOWN_CHARACTERS = 60
GROUND_TRUTH = "ground truth"
"""The origin of an answer that stands nowhere else in its row."""
_SERVICE_LINES = RowForm(ColumnsSpec(ground_truth="ground_truth", extra_info=["ground_truth"]))
"""The rows that callers of a reward service send, and that ``plaudit score`` reads."""


class TriedRow(NamedTuple):
    """One row of the data, and its columns as the file gives them."""

    data: DataRow
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class _Trial:
    """Hold one row: its answer, the answer's origin, and the samples with the answer and with an empty response."""

    source: str
    samples: list[Sample]


def try_scorers(arguments: argparse.Namespace) -> int:
    """Run the command."""
    job = load_job(arguments.job)
    reward = reward_without_servers(job.spec.reward.rewarding)
    rows = first_rows(job, arguments.data, arguments.rows)
    trials = [_trial(f"row-{number}", row, job) for number, row in enumerate(rows, 1)]
    show_logs()
    scored = asyncio.run(_score(reward, trials))
    for number, (trial, scorings) in enumerate(zip(trials, scored, strict=True), 1):
        print_text("\n".join(_report(number, trial, scorings)))
    print_text(_verdict(scored))
    return ending_of([scoring for scorings in scored for scoring in scorings])


async def _score(reward: RewardSpec, trials: Sequence[_Trial]) -> list[list[ScoringRecord]]:
    pipeline, places = await build_pipeline(reward, "try"), asyncio.Semaphore(2)  # one trial at a time
    try:
        return [await pipeline.score_whole_group(trial.samples, places) for trial in trials]
    finally:
        await pipeline.close()


def ending_of(scorings: Sequence[ScoringRecord]) -> int:
    """Return the exit code of a trial: one in which no sample got a score has found nothing."""
    return EXIT_CRASHED if all(scoring.value is None for scoring in scorings) else EXIT_DONE


def reward_without_servers(reward: RewardSpec) -> RewardSpec:
    """Leave out scorers whose model has no server, and scorers that depend on one."""
    skipped: set[str] = set()
    servers = model_servers()
    for scorer in reward.scorers:
        if (scorer.served and scorer.name not in servers) or (scorer.when and scorer.when.scorer in skipped):
            skipped.add(scorer.name)
    if not skipped:
        return reward
    print(f"skipped, because only a run serves their models: {', '.join(sorted(skipped))}", file=sys.stderr)
    scorers = [scorer for scorer in reward.scorers if scorer.name not in skipped]
    if not scorers:
        raise RefusedError("the job serves a model for every scorer: there is nothing to try without a run")
    return reward.model_copy(update={"scorers": scorers})


def first_rows(job: RLJob, data: Path | None, num_rows: int) -> Iterator[TriedRow]:
    """Yield the first rows of the job's training data, or of another file. Raise ``JobError`` for unusable data."""
    if data is None and not job.spec.trains:
        raise RefusedError("the job has no training data: give some with --data FILE")
    field = "--data" if data else "spec.data.train"
    with TemporaryDirectory(prefix="plaudit-tasks-") as folder:
        try:
            path = str(data or data_paths(with_server_tasks(job, Path(folder)).spec.data.train)[0])
        except ConfigurationError as error:
            raise RefusedError(f"{field}.split: {error}") from error
        yield from islice(_tried_rows(path, _form_of(job, field, path)), num_rows)


def _form_of(job: RLJob, field: str, path: str) -> RowForm:
    """Return how a path's rows are read. Raise ``JobError`` for unusable ones."""
    form = RowForm.of_data(job.spec.data) if job.spec.trains else VERL
    problem = data_problem(field, path, form, job.spec.data.images if job.spec.trains else None)
    if problem is None:
        return form
    if job.spec.trains:
        raise JobError([problem])
    if problem := data_problem(field, path, _SERVICE_LINES):
        raise JobError([replace(problem, remedy="Give each row a prompt and a ground_truth, or verl's columns")])
    return _SERVICE_LINES


def _tried_rows(path: str, form: RowForm) -> Iterator[TriedRow]:
    for file, source in files_of(path):
        for row in raw_rows(file, form, ("response", "responses", "turns")):
            yield TriedRow(data_row(row, columns=form.columns, source=source, images=form.images), row)


def _trial(group: str, row: TriedRow, job: RLJob) -> _Trial:
    source, answer = right_answer(row)
    return _Trial(source, [row_sample(job, row.data, text, group, index) for index, text in enumerate((answer, ""))])


def row_sample(job: RLJob, row: DataRow, response: str, group: str, index: int) -> Sample:
    """Return a response to a row as a sample for the scorers."""
    return SampleInput(
        response=response,
        prompt=row.prompt,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        response_tokens=len(response.split()),
        max_tokens=job.spec.rollout.sampling.max_tokens,
    ).sample(group, index)


def right_answer(row: TriedRow) -> tuple[str, str]:
    """Return the row's answer, by the order in the module's docstring, after the name of its origin."""
    data, columns = row
    responses = columns.get("responses")
    candidates = (
        ("response", columns.get("response")),
        ("responses[0]", responses[0] if isinstance(responses, list) and responses else responses),
        ("extra_info.answer", data.extra_info.get("answer")),
        ("extra_info.solution", data.extra_info.get("solution")),
    )
    for source, value in candidates:
        if isinstance(value, str) and value:
            return source, plain_text(value)
    truth = data.ground_truth
    return GROUND_TRUTH, truth if isinstance(truth, str) else json.dumps(truth)


def _report(number: int, trial: _Trial, scorings: Sequence[ScoringRecord]) -> list[str]:
    answer = " ".join(trial.samples[0].response.split())
    shown = answer if len(answer) <= _SHOWN_CHARACTERS else answer[: _SHOWN_CHARACTERS - 1] + "…"
    lines = [f"row {number} ({trial.samples[0].data_source})"]
    for label, scoring in zip((f"{trial.source} {shown!r}", "empty response"), scorings, strict=True):
        parts = [
            f"{name} {of.outcome if of.value is None else f'{of.value:g}'} ({of.call_s:.2f} s)"
            for name, of in scoring.scorers.items()
        ]
        score = "no score" if scoring.value is None else f"{scoring.value:g}"
        lines.append(f"  {score}  {label}: {', '.join(parts)}")
        reasons = {f"{name}: {of.reason}": None for name, of in scoring.scorers.items() if of.reason}
        if scoring.reason:
            reasons = {scoring.reason: None} | reasons
        lines += [f"      {reason}" for reason in reasons]
    return lines


def _verdict(scored: Sequence[Sequence[ScoringRecord]]) -> str:
    """Return one sentence: rows in which the answer scores higher than an empty response, and failures."""
    pairs = [(answer.value, empty.value) for answer, empty in scored]
    higher = sum(a is not None and b is not None and a > b for a, b in pairs)
    failed = sum(value is None for pair in pairs for value in pair)
    failures = f"; {failed} of {2 * len(pairs)} samples have no score" if failed else ""
    return f"the answer scores higher than an empty response in {higher} of {len(pairs)} rows{failures}"


def show_logs() -> None:
    """Show on standard error what reward functions print, and warnings, while a command scores in this process.

    The lines are plain: ``mine: text`` for what the scorer ``mine`` printed.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainLines())
    handler.addFilter(_is_for_users)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _PlainLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the scorer's line as it is; any other record as level, message and fields."""
        fields = dict(getattr(record, "fields", {}))
        if _is_printed(record):
            return printable(f"{fields['scorer']}: {fields['line']}")
        values = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        return printable(f"{record.levelname.lower()}: {record.getMessage()} {values}".rstrip(), keep="\n")


def _is_for_users(record: logging.LogRecord) -> bool:
    """Leave out records below warnings of Plaudit itself and its engine and servers: they are for the logs of a run."""
    ours = record.name.startswith(("plaudit_", "uvicorn", "vllm", "httpx"))
    return _is_printed(record) or record.levelno >= logging.WARNING or not ours


def _is_printed(record: logging.LogRecord) -> bool:
    return set(getattr(record, "fields", {})) == {"scorer", "line"}
