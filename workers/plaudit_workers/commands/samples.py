"""``plaudit samples RUN``: print stored samples of a run, with their texts, scores and reasons.

Find the samples that a user means, and select the first that fulfil conditions, or those with the lowest scores.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from plaudit_metrics.sources.audits import sample_audits
from plaudit_metrics.sources.sample_schema import FOLDER, Row, samples_file, scorers_of_row, surviving_files
from plaudit_metrics.sources.samples import MOST_CHARACTERS, TextBudget, UnreadableFileError, completion_messages
from plaudit_metrics.sources.search import FAILED, SampleFile, SampleQuery
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import ScorerRecord
from plaudit_workers.process import EXIT_DONE

_TEXT_CHARACTERS = 1000
_REASON_TAIL = 700
"""Of a reason's characters: a traceback says in its last line what happened."""
_STEP = re.compile(r"step-(\d+)-")


def samples(arguments: argparse.Namespace) -> int:
    """Run the command."""
    path = samples_path(arguments.run, arguments.runs_folder)
    files = sample_files(path)
    if arguments.step is not None:
        files = _of_step(files, arguments.step)
    if arguments.scorer and not (arguments.failed or arguments.outcome):
        raise RefusedError("--scorer names the scorer of --outcome or --failed: give one of them, too")
    query = SampleQuery(
        outcome=FAILED if arguments.failed else arguments.outcome,
        scorer=arguments.scorer,
        lowest=arguments.lowest_score,
        highest=arguments.highest_score,
        data_source=arguments.data_source,
        group=arguments.group,
        prompt_id=arguments.prompt,
    )
    select = lowest_samples if arguments.lowest else first_samples
    try:
        chosen = select(files, query, arguments.most)
    except UnreadableFileError as error:
        raise RefusedError(f"{error}. Give a run's id, or its samples folder") from error
    chosen = [_with_audits(row, path) for row in chosen]
    if arguments.json:
        for row in chosen:
            print(msgspec.json.encode(row).decode())
        return EXIT_DONE
    console = Console()
    if not chosen:
        console.out(_none(query, arguments.lowest), highlight=False)
    for row in chosen:
        for line in sample_lines(row, arguments.full):
            console.print(line, soft_wrap=True, highlight=False)
    return EXIT_DONE


def samples_path(given: Path, runs: Path) -> Path:
    """Return the samples that a user means by a file, a folder of samples or of a run, or the id of a run."""
    if given.is_file() or any(given.glob("step-*.parquet")):
        return given
    for folder in (given / FOLDER, runs / given / FOLDER):
        if folder.is_dir():
            return folder
    raise RefusedError(
        f"no stored samples of {given}: give a run's id (with --runs-folder, now {runs}), a run's folder, or a samples "
        "folder or file. A run stores samples unless metrics.keepSamples is false"
    )


def sample_files(path: Path) -> list[Path]:
    """Return the files of a run's samples by step, without those of steps that a resume rolled back."""
    if path.is_file():
        return [path]
    files = surviving_files(path)
    if not files:
        raise RefusedError(f"{path} has no stored samples yet: a run stores them when it closes its first step")
    return list(files.values())


def _of_step(files: list[Path], step: int) -> list[Path]:
    by_step = {int(found[1]): file for file in files if (found := _STEP.match(file.name))}
    if step not in by_step:
        stored = f"steps {min(by_step)} to {max(by_step)} are" if by_step else "no step is"
        raise RefusedError(f"--step {step}: no samples of that step are stored ({stored})")
    return [by_step[step]]


def _none(query: SampleQuery, lowest: bool) -> str:
    if query == SampleQuery(outcome=FAILED):
        return "every stored sample has a score"
    if lowest:
        return "no stored sample has a score: plaudit samples RUN --failed prints the reasons"
    return "no stored sample fulfils these conditions"


def first_samples(files: Sequence[Path], query: SampleQuery, most: int) -> list[Row]:
    """Return the first samples that fulfil the conditions, by file; raise ``UnreadableFileError`` for another file."""
    chosen: list[Row] = []
    for path in files:
        with SampleFile(path) as file:
            chosen += map(file.read, file.find(query)[: most - len(chosen)].tolist())
        if len(chosen) == most:
            break
    return chosen


def lowest_samples(files: Sequence[Path], query: SampleQuery, most: int) -> list[Row]:
    """Return the samples with the lowest scores of all that fulfil the conditions, the lowest first."""
    least = -math.inf if query.lowest is None else query.lowest  # leaves out samples without a score
    query = replace(query, lowest=least, order="lowest")
    lowest: list[tuple[float, int, int]] = []
    for number, path in enumerate(files):
        with SampleFile(path, ["score"]) as file:
            found = [(file.read(row)["score"], number, row) for row in file.find(query)[:most].tolist()]
        lowest = heapq.nsmallest(most, [*lowest, *found])
    return [_row(files[number], row) for _, number, row in lowest]


def _row(path: Path, row: int) -> Row:
    with SampleFile(path) as file:
        return file.read(row)


def _with_audits(row: Row, path: Path) -> Row:
    """Add the auditors' results to a sample, if its group has been audited."""
    if row.get("incarnation") is None:
        return row
    folder = path if path.is_dir() else path.parent
    file = samples_file(folder, row["step"], row["incarnation"])
    audits = sample_audits(folder.parent, file, row["group"], row["index"])
    return {**row, "audits": audits} if audits else row


def sample_lines(row: Row, full: bool) -> Iterator[Text]:
    """Yield the lines that show a sample; control characters of its texts are printed as escapes."""
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    head = f"step {row['step']} · group {row['group']} sample {row['index']} · {row['data_source']} · {score}"
    yield Text(_printable(head), style="bold red" if row["score"] is None else "bold")
    if row["score"] is None:
        reason = f"{row['outcome'] or row['end']}: {row['reason'] or row['end_reason'] or ''}"
        yield _line("reason", reason, full, tail=_REASON_TAIL)
    for name, scorer in scorers_of_row(row).items():
        yield _line(name, _result(scorer), full, tail=_REASON_TAIL)
    for name, audit in row.get("audits", {}).items():
        yield _line(f"{name} (audit)", _result(audit), full, tail=_REASON_TAIL)
    yield _line("prompt", row["prompt"] or "", full)
    if row.get("completion_json"):
        yield from _conversation(row, full)
    else:
        yield _line("response", row["response"] if row["response"] is not None else "(not generated)", full)
    yield _line("ground truth", _decoded(row["ground_truth_json"]), full)
    yield Text()


def _result(scorer: ScorerRecord) -> str:
    """Return a scorer's value, or its outcome and reason (``data_error: KeyError 'answer'``), and its extras."""
    result = scorer.outcome if scorer.value is None else f"{scorer.value:g}"
    extras = [
        f"{name} {extra:g}" if isinstance(extra, float) else f"{name} {extra}" for name, extra in scorer.extra.items()
    ]
    return ", ".join([f"{result}: {scorer.reason}" if scorer.reason else result, *extras])


def _conversation(row: Row, full: bool) -> Iterator[Text]:
    """Yield the messages after the prompt, with the tool calls of each turn."""
    for message in completion_messages(row, TextBudget(MOST_CHARACTERS)):
        notes = [] if message.generate_s is None else [f"{message.generate_s:.3g} s"]
        notes += [] if message.reward is None else [f"reward {message.reward:g}"]
        role = " ".join([message.role, message.name]).strip()
        yield _line(f"{role} ({', '.join(notes)})" if notes else role, message.content.text, full)
        for call in message.calls:
            took = "" if call.call_s is None else f", {call.call_s:.3g} s"
            yield _line(f"  calls {call.tool} ({call.outcome or 'no record'}{took})", call.arguments.text, full)


def _line(name: str, text: str, full: bool, tail: int = 0) -> Text:
    """Return a text under its name, cut unless ``full``: its first characters and the last ``tail``."""
    cut = _TEXT_CHARACTERS - tail
    is_short = full or len(text) <= _TEXT_CHARACTERS
    shown = text if is_short else f"{text[:cut]}… (--full){' …' + text[-tail:] if tail else ''}"
    return Text.assemble((f"  {_printable(name)}: ", "dim"), _printable(shown))


def _decoded(json: str | None) -> str:
    value = msgspec.json.decode(json) if json else None
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _printable(text: str) -> str:
    """Return the text with its lines indented, and escapes in place of other control characters."""
    shown = "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode() for sign in text
    )
    return shown.replace("\n", "\n    ")
